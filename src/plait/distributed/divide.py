"""Writes a graph as a folder of parts: assign, renumber, write, measure; a second run continues the first."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.distributed.files import MANIFEST, Manifest, StoredArray, checksum, read_manifest, write_array
from plait.distributed.layout import (
    Layout,
    PartStatistics,
    check_assignment,
    halo,
    lay_out,
    remote_rows,
    renumbered,
)
from plait.distributed.parts import MASKS, Parts, feature_file, halo_file
from plait.errors import InputError
from plait.graph import Graph, LoadedGraph, SparseFeatures, index_dtype, load_arrays
from plait.graph.partition import assign, check_division
from plait.loader.expand import checked_fanout
from plait.measure.progress import Meter

__all__ = ["partition"]

Array = NDArray[Any]

# Feature rows are gathered and written this many bytes at a time.
_BLOCK_BYTES = 1 << 25
_WHOLE = ("nodes.npy", "indptr.npy", "indices.npy", "y.npy", *(f"{name}_mask.npy" for name in MASKS))
_OF_PART = re.compile(r"part-\d+\.(x|halo)\.npy")


def partition(
    data: Any,
    parts: int,
    folder: str | os.PathLike[str],
    *,
    method: str = "metis",
    seed: int = 0,
    assignment: ArrayLike | None = None,
    fanout: Sequence[int] = (10, 25),
    batch_size: int = 1000,
    overwrite: bool = False,
    file: TextIO | None = None,
) -> Parts:
    """Writes `data` in `parts` parts to `folder` and returns the opened parts.

    `data` is the path of an npz file, a LoadedGraph, a Graph or a PyG Data. `assignment` gives every node its
    part; without it `method` ("metis", "fennel", "random") finds one. `fanout` and `batch_size` are used
    for statistics only. Complete files of an earlier run with the same arguments are kept. Progress is drawn
    on `file` (default: standard error).
    """
    loaded = _loaded(data)
    checked_fanout(fanout)
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size}: a batch has at least one node")
    # before anything is written: the folder of a division that cannot be made is not left behind
    check_division(loaded.graph, parts, method, seed)
    given = None if assignment is None else _given(assignment, loaded.graph.num_nodes)
    if given is not None:
        check_assignment(given, parts)
    target = Path(folder)
    digest = _digest(loaded, parts, method, seed, given)
    manifest = _started(target, digest, loaded, parts, method if given is None else "given", seed, overwrite)
    steps = 4 + len(_node_arrays(loaded)) + 2 * parts
    meter = Meter("partition", steps, sys.stderr if file is None else file)
    try:
        _Division(loaded, manifest, target, meter).run(given, list(fanout), batch_size)
    finally:
        meter.close()
    return Parts(target)


class _Division:
    """The work of one run, step by step, each of which is one file."""

    def __init__(self, loaded: LoadedGraph, manifest: Manifest, folder: Path, meter: Meter) -> None:
        self.loaded, self.manifest, self.folder, self.meter = loaded, manifest, folder, meter
        masks = _node_arrays(loaded)
        self.train = np.flatnonzero(masks.get("train_mask.npy", np.zeros(loaded.graph.num_nodes, bool)))

    def run(self, given: Array | None, fanout: list[int], batch_size: int) -> None:
        """Everything, in order; the manifest is marked complete last."""
        layout = self._layout(given)
        number, graph = layout.number(), self.loaded.graph
        pairs = list(itertools.pairwise(layout.bounds.tolist()))

        def sources(begin: int, end: int) -> Array:
            return renumbered(graph, layout, number, begin, end)[1]

        pointer = self._pointer(layout)
        self._keep_array("indptr.npy", pointer)
        kind, count = index_dtype(graph.num_nodes, graph.num_edges), graph.num_edges
        self._keep("indices.npy", kind, (count,), lambda: itertools.starmap(sources, pairs))
        for name, array in _node_arrays(self.loaded).items():
            self._keep_array(name, array[layout.nodes])
        found = []
        for part, (begin, end) in enumerate(pairs):
            outside, cut = halo(sources(begin, end), begin, end, graph.num_nodes)
            self._keep_array(halo_file(part), outside)
            self._features(part, layout.nodes[begin:end])
            found.append((end - begin, int(pointer[end]) - int(pointer[begin]), cut, outside.size))
        self._measure(layout, found, fanout, batch_size)

    def _pointer(self, layout: Layout) -> Array:
        """Row pointers of the whole graph under its new numbers."""
        degrees = self.loaded.graph.degrees[layout.nodes]
        return np.concatenate(([0], np.cumsum(degrees, dtype=np.int64))).astype(
            self.loaded.graph.indptr.dtype
        )

    def _layout(self, given: Array | None) -> Layout:
        """The parts of all nodes, from an earlier run where it got that far."""
        manifest, graph = self.manifest, self.loaded.graph
        if self._is_kept("nodes.npy") and manifest.bounds:
            nodes = np.load(self.folder / "nodes.npy", allow_pickle=False)
            self.meter.advance()
            return Layout(nodes, np.asarray(manifest.bounds, np.int64))
        if given is None:
            given = assign(graph, manifest.parts, manifest.method, train=self.train, seed=manifest.seed)
        layout = lay_out(given, manifest.parts)
        manifest.bounds = layout.bounds.tolist()
        self._keep_array("nodes.npy", layout.nodes)
        return layout

    def _features(self, part: int, nodes: Array) -> None:
        x = self.loaded.x
        if x is None:
            self.meter.advance()
            return
        self._keep(feature_file(part), np.float32, (nodes.size, x.shape[1]), lambda: _blocks(x, nodes))

    def _measure(
        self, layout: Layout, found: Sequence[tuple[int, int, int, int]], fanout: list[int], batch_size: int
    ) -> None:
        """Statistics into the manifest, which is complete with them."""
        graph, x = self.loaded.graph, self.loaded.x
        part = np.empty(graph.num_nodes, np.int64)
        part[layout.nodes] = np.repeat(np.arange(layout.num_parts), np.diff(layout.bounds))
        held = np.bincount(part[self.train], minlength=layout.num_parts)
        each = [
            PartStatistics(*counts, int(held[p]), remote_rows(graph, part, p, self.train, fanout, batch_size))
            for p, counts in enumerate(found)
        ]
        self.manifest.statistics = {
            "fanout": fanout,
            "batch_size": batch_size,
            "row_bytes": 0 if x is None else 4 * int(x.shape[1]),
            "parts": [asdict(part) for part in each],
        }
        self.manifest.is_complete = True
        self.manifest.write(self.folder)
        self.meter.advance()

    def _is_kept(self, name: str) -> bool:
        """Whether an earlier run left this file as the manifest says."""
        stored, path = self.manifest.files.get(name), self.folder / name
        if stored is None or not path.is_file() or path.stat().st_size != stored.bytes:
            return False
        return checksum(path) == stored.blake2b

    def _keep_array(self, name: str, array: Array) -> None:
        self._keep(name, array.dtype, array.shape, lambda: [array])

    def _keep(
        self, name: str, dtype: Any, shape: tuple[int, ...], blocks: Callable[[], Iterable[Array]]
    ) -> None:
        """Writes a file unless a good one of the same type and shape is there."""
        stored = self.manifest.files.get(name)
        is_same = stored is not None and (stored.dtype, stored.shape) == (np.dtype(dtype).str, shape)
        if not (is_same and self._is_kept(name)):
            self.manifest.is_complete = False
            written: StoredArray = write_array(self.folder / name, dtype, shape, blocks())
            self.manifest.files[name] = written
            self.manifest.write(self.folder)
        self.meter.advance()


def _blocks(x: Array | SparseFeatures, nodes: Array) -> Iterator[Array]:
    """Rows of x, a bounded number at a time, dense."""
    step = max(1, _BLOCK_BYTES // max(1, 4 * x.shape[1]))
    for begin in range(0, nodes.size, step):
        wanted = nodes[begin : begin + step]
        yield _dense(x, wanted) if isinstance(x, SparseFeatures) else x[wanted].astype(np.float32, copy=False)


def _dense(x: SparseFeatures, nodes: Array) -> Array:
    counts = (x.indptr[nodes + 1] - x.indptr[nodes]).astype(np.int64)
    rows = np.repeat(np.arange(nodes.size), counts)
    first = np.repeat(x.indptr[nodes] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    at = first + np.arange(rows.size)
    dense = np.zeros((nodes.size, x.shape[1]), np.float32)
    np.add.at(dense, (rows, x.indices[at]), x.values[at])
    return dense


def _node_arrays(loaded: LoadedGraph) -> dict[str, Array]:
    """Labels and masks by file name; of several splits the first."""
    arrays = {} if loaded.y is None else {"y.npy": loaded.y}
    for name in MASKS:
        mask = loaded.masks.get(name)
        if mask is not None:
            arrays[f"{name}_mask.npy"] = np.asarray(mask if mask.ndim == 1 else mask[0], bool)
    return arrays


def _loaded(data: Any) -> LoadedGraph:
    """The graph with what is known of its nodes, from any of the types `partition` takes."""
    if isinstance(data, LoadedGraph):
        return data
    if isinstance(data, str | os.PathLike):
        return load_arrays(data)
    if isinstance(data, Graph):
        return LoadedGraph(data)
    if not hasattr(data, "edge_index") and not hasattr(data, "adj_t"):
        raise InputError(
            f"data: {type(data).__name__} is not a graph; give the path of an npz file, a plait LoadedGraph "
            "or Graph, or a PyG Data"
        )
    graph = Graph.from_any(data, int(data.num_nodes))
    x, y = (None if data.get(name) is None else data[name].cpu().numpy() for name in ("x", "y"))
    found = {name: data.get(f"{name}_mask") for name in MASKS}
    masks = {name: mask.cpu().numpy().T for name, mask in found.items() if mask is not None}
    return LoadedGraph(graph, None if x is None else x.astype(np.float32, copy=False), y, masks)


def _given(assignment: ArrayLike, num_nodes: int) -> Array:
    given = np.asarray(assignment)
    if given.shape != (num_nodes,) or given.dtype.kind not in "iu":
        raise InputError(
            f"assignment has shape {given.shape} and type {given.dtype}; give a part for each of "
            f"{num_nodes} nodes"
        )
    return given.astype(np.int64)


def _digest(loaded: LoadedGraph, parts: int, method: str, seed: int, given: Array | None) -> str:
    """What tells one set of parts from another: graph, arrays and settings."""
    digest = hashlib.blake2b(f"{loaded.graph.fingerprint} {parts} {method} {seed}".encode(), digest_size=16)
    x = loaded.x
    rows = [] if x is None else [x.indptr, x.indices, x.values] if isinstance(x, SparseFeatures) else [x]
    for array in [*rows, *_node_arrays(loaded).values(), *([] if given is None else [given])]:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _clear(folder: Path) -> None:
    """Removes what partitioning writes, and nothing else."""
    for pattern in ("*.npy", MANIFEST):
        for path in folder.glob(pattern):
            if path.name in _WHOLE or path.name == MANIFEST or _OF_PART.fullmatch(path.name):
                path.unlink()


def _started(
    folder: Path, digest: str, loaded: LoadedGraph, parts: int, method: str, seed: int, overwrite: bool
) -> Manifest:
    """The manifest of an earlier run of the same, else a new one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder: cannot make {folder} ({error})") from error
    if overwrite:
        _clear(folder)
    found = read_manifest(folder)
    if found is not None and found.inputs != digest:
        raise InputError(
            f"folder: {folder} holds parts of another graph or other settings; choose another folder, or "
            "overwrite them (--overwrite, overwrite=True)"
        )
    if found is not None:
        return found
    graph = loaded.graph
    name = str(loaded.meta.get("name", ""))
    return Manifest(digest, parts, method, seed, graph.num_nodes, graph.num_edges, name)
