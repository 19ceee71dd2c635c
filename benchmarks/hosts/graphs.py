"""The graphs of the test bed, with features and labels that can be learned, divided once for every system.

DGL's METIS divides, as a DistDGL user would have it; plait's parts are made of the same assignment, so all
systems have the same cut. Every part has as many training nodes as the smallest, so that all systems run the
same steps on the same seeds: plait would repeat some, DGL would have other hosts train on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.hosts import judge
from benchmarks.hosts.network import HostsError
from numpy.typing import NDArray

from plait.distributed import partition
from plait.distributed.parts import Parts
from plait.graph import Graph, LoadedGraph, load
from plait.graph.partition import assign

__all__ = ["CLASSES", "NAME", "WIDTH", "block_model", "described", "divide", "even", "make", "seeds_of"]

Array = NDArray[Any]

NAME = "bed"  # of the graph, in DGL's files
WIDTH, CLASSES = 256, 16
_SEEDS = "seeds.npz"
_TRAIN, _VALID = 0.1, 0.01
_SIGNAL = 0.06  # distance of class means, in units of the noise; neighbours average the noise away
# Propensities are those of a power law of exponent 1 + 1 / 0.55, none above 130 times the mean.
_TAIL, _MOST = 0.55, 130.0


def block_model(
    nodes: int, edges: int, communities: int = 256, inside: float = 0.8, seed: int = 0
) -> tuple[Array, Array, Array]:
    """A degree-corrected block model: (indptr, indices, community), symmetric, no loops, no repeated edges.

    Each of edges / 2 draws joins an end chosen by propensity to another one, of its own community with
    probability `inside`. Draws that repeat an edge are made again, so there are nearly `edges` in all.
    """
    rng = np.random.default_rng(seed)
    community = np.sort(rng.integers(0, communities, nodes))
    heat = (1 - rng.random(nodes)) ** -_TAIL
    heat = np.minimum(heat, _MOST * heat.mean())
    reach = np.concatenate(([0.0], np.cumsum(heat)))
    first = np.searchsorted(community, np.arange(communities + 1))
    keys = np.empty(0, np.int64)
    for _ in range(6):
        lacking = edges // 2 - keys.size
        if lacking <= 0:
            break
        a = _drawn(rng.random(lacking) * reach[-1], reach)
        low, high = reach[first[community[a]]], reach[first[community[a] + 1]]
        own = rng.random(lacking) < inside
        low, high = np.where(own, low, 0.0), np.where(own, high, reach[-1])
        b = _drawn(low + rng.random(lacking) * (high - low), reach)
        pairs = np.minimum(a, b) * nodes + np.maximum(a, b)
        keys = np.unique(np.concatenate((keys, pairs[a != b])))
    a, b = keys // nodes, keys % nodes
    return (*_csr(np.concatenate((a, b)), np.concatenate((b, a)), nodes), community)


def _drawn(points: Array, reach: Array) -> Array:
    return np.minimum(np.searchsorted(reach, points, side="right") - 1, reach.size - 2)


def _csr(source: Array, target: Array, nodes: int) -> tuple[Array, Array]:
    order = np.lexsort((source, target))
    indptr = np.concatenate(([0], np.cumsum(np.bincount(target, minlength=nodes))))
    return indptr, source[order].astype(np.int32)


def make(name: str, file: Path | None = None, seed: int = 0) -> LoadedGraph:
    """The graph of that name: "block", "block-small", or any other one, whose edges are read from `file`.

    A graph without classes gets those of a METIS division into 16.
    """
    if name in ("block", "block-small"):
        size = (400_000, 7_400_000, 256) if name == "block" else (4_000, 60_000, 16)
        indptr, indices, community = block_model(*size, seed=seed)
        graph, label = Graph(indptr, indices, indptr.size - 1), community % CLASSES
    elif file is None:
        raise HostsError(f"graph {name!r} is not made here; give its npz file with --file")
    else:
        graph = load(file)
        label = assign(graph, CLASSES, method="metis")
    rng = np.random.default_rng(seed + 1)
    means = rng.standard_normal((CLASSES, WIDTH), np.float32) * np.float32(_SIGNAL)
    x = rng.standard_normal((graph.num_nodes, WIDTH), np.float32)
    x += means[label]
    lot = rng.random(graph.num_nodes)
    masks = {"train": lot < _TRAIN, "val": (lot >= _TRAIN) & (lot < _TRAIN + _VALID)}
    return LoadedGraph(graph, x, label.astype(np.int64), masks)


def divide(loaded: LoadedGraph, parts: int, folder: Path, is_alone: bool = False) -> None:
    """Writes the parts of both systems under `folder`: dgl/bed.json and plait/; plait's alone need no DGL."""
    if is_alone:
        partition(loaded, parts, folder / "plait", overwrite=True)
        return
    import dgl
    import torch

    graph = loaded.graph
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    ends = (torch.from_numpy(graph.indices.astype(np.int64)), torch.from_numpy(target))
    theirs = dgl.graph(ends, num_nodes=graph.num_nodes)
    theirs.ndata["feat"], theirs.ndata["label"] = torch.from_numpy(loaded.x), torch.from_numpy(loaded.y)
    for name, mask in loaded.masks.items():
        theirs.ndata[f"{name}_mask"] = torch.from_numpy(mask)
    mapping, _ = dgl.distributed.partition_graph(
        theirs,
        NAME,
        parts,
        str(folder / "dgl"),
        num_hops=1,
        part_method="metis",
        balance_ntypes=theirs.ndata["train_mask"].long(),
        balance_edges=True,
        return_mapping=True,
    )
    bounds = json.loads((folder / "dgl" / f"{NAME}.json").read_text())["node_map"]["_N"]
    assignment = np.empty(graph.num_nodes, np.int64)
    for part, (begin, end) in enumerate(bounds):
        assignment[mapping.numpy()[begin:end]] = part
    partition(loaded, parts, folder / "plait", assignment=assignment, overwrite=True)
    _number_seeds(even(loaded.masks["train"], assignment), folder, mapping.numpy())
    judge.prepare(loaded, folder / "judge.npz")


def even(mask: Array, assignment: Array) -> list[Array]:
    """The nodes of a mask, part by part, of each as many as the smallest has."""
    nodes = np.flatnonzero(mask)
    by_part = [nodes[assignment[nodes] == part] for part in range(int(assignment.max()) + 1)]
    count = min(map(len, by_part))
    return [own[:count] for own in by_part]


def _number_seeds(seeds: list[Array], folder: Path, mapping: Array) -> None:
    """Writes the seeds of every part by the numbers of both systems."""
    numbers = {"dgl": mapping, "plait": Parts(folder / "plait").nodes()}
    places = {}
    for system, nodes in numbers.items():
        places[system] = np.empty(nodes.size, np.int64)
        places[system][nodes] = np.arange(nodes.size)
    kept = {
        f"{system}-{part}": np.sort(p[own]) for system, p in places.items() for part, own in enumerate(seeds)
    }
    np.savez(folder / _SEEDS, **kept)


def seeds_of(folder: str, system: str) -> list[Array]:
    """The training nodes of every part by the numbers of a system, "dgl" or "plait"."""
    with np.load(Path(folder) / _SEEDS) as kept:
        names = sorted(
            (name for name in kept.files if name.startswith(system)), key=lambda n: int(n.split("-")[1])
        )
        return [kept[name] for name in names]


def described(folder: Path) -> dict[str, Any]:
    """What is known of a divided graph: its sizes and its cut."""
    manifest = json.loads((folder / "plait" / "manifest.json").read_text())
    return {name: manifest[name] for name in ("num_nodes", "num_edges", "parts", "statistics")}
