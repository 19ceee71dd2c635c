"""Repeated epochs and early breaks: which memory, threads and files are left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

import plait
from plait.bench.batches.part import Bar, Measured, Options, edge_list, load
from plait.bench.task import build_model
from plait.features import Cache
from plait.graph import Graph
from plait.loader import NeighborLoader

__all__ = ["leaks"]

WIDTH = 64
# Pages the allocators of C, numpy and torch may still be spreading over: a leak of one batch of the smallest
# loader below would pass it within three epochs.
MOST_GROWTH = 8_000_000
_SEGMENTS = Path("/dev/shm")


def leaks(options: Options) -> Iterator[Measured]:
    """Memory over epochs of three loaders and of a compiled model; threads and segments over breaks."""
    name, source = list(options.graphs.items())[-1]
    graph = load(source, options.data_dir)
    made = _loaders(graph, 3 if options.is_small else 20, 64 if options.is_small else 1024)
    epochs = options.epochs
    for kind, loader in made.items():
        yield {"graph": name, "loader": kind, "epochs": epochs}, *_epochs(loader, epochs, None)
    model = plait.compile(build_model("sage", WIDTH, 16))
    trained = {"graph": name, "loader": "prefetch", "epochs": epochs, "model": "sage"}
    yield trained, *_epochs(made["prefetch"], epochs, model)
    for kind in ("prefetch", "cache"):
        yield {"graph": name, "loader": kind, "breaks": options.breaks}, *_breaks(made[kind], options.breaks)


def _loaders(graph: Graph, batches: int, size: int) -> dict[str, Any]:
    x = torch.randn(graph.num_nodes, WIDTH, generator=torch.Generator().manual_seed(0))
    edge_index = torch.from_numpy(edge_list(graph))
    whole = Data(x=x, edge_index=edge_index)
    seeds = torch.arange(batches * size)
    given: dict[str, Any] = {"batch_size": size, "shuffle": True, "seed": 0}
    bare = Data(edge_index=edge_index, num_nodes=graph.num_nodes)
    rows = x.numpy()
    cache = Cache(lambda ids: rows[ids], graph.num_nodes // 4, num_rows=graph.num_nodes)
    return {
        "plain": NeighborLoader(whole, [10, 5], seeds, **given),
        "prefetch": NeighborLoader(whole, [10, 5], seeds, prefetch=2, **given),
        "cache": NeighborLoader(bare, [10, 5], seeds, prefetch=2, features=cache, **given),
    }


def _epochs(loader: Any, epochs: int, model: Any) -> tuple[dict[str, object], tuple[Bar, ...]]:
    resident = []
    for _ in range(epochs):
        for batch in loader:
            if model is not None:
                torch.autograd.backward(model(batch.x, batch.edge_index)[: batch.batch_size].sum())
                model.zero_grad()
            del batch
        resident.append(_resident_bytes())
    # the first half fills pools; what a leak adds, it adds in the second half too
    half = epochs // 2
    grown = min(resident[-max(1, half // 2) :]) - min(resident[half : half + max(1, half // 2)])
    result = {"resident_bytes": resident, "grown_bytes": grown, "objects": len(gc.get_objects())}
    return result, (Bar("grown in the last half, bytes", grown, MOST_GROWTH, is_least=False),)


def _breaks(loader: Any, breaks: int) -> tuple[dict[str, object], tuple[Bar, ...]]:
    next(iter(loader))
    gc.collect()
    threads, segments, files = threading.active_count(), _segments(), _files()
    before = _resident_bytes()
    for _ in range(breaks):
        for _ in loader:
            break
    grown = _resident_bytes() - before
    more_threads, more_files = threading.active_count() - threads, _files() - files
    more_segments = len(_segments() - segments)
    result: dict[str, object] = {
        "threads": more_threads,
        "segments": more_segments,
        "files": more_files,
        "grown_bytes": grown,
    }
    bars = (
        Bar("threads, segments and files left", more_threads + more_segments + more_files, 0, is_least=False),
        Bar("grown, bytes", grown, MOST_GROWTH, is_least=False),
    )
    return result, bars


def _resident_bytes() -> int:
    """Pages in use once everything free was given back to the system."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _segments() -> set[str]:
    return {path.name for path in _SEGMENTS.iterdir()} if _SEGMENTS.is_dir() else set()


def _files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0
