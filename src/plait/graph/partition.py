"""Assigns nodes to equal parts with few edges between them: METIS (through pymetis), Fennel, random."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.graph.compiled import compiled

if TYPE_CHECKING:
    from plait.graph import Graph

__all__ = [
    "METHODS", "assign", "balance", "check_division", "distinct", "fennel", "has_metis", "loads", "metis",
    "scattered",
]  # fmt: skip

METHODS = ("metis", "fennel", "random")

# A part may hold this much more than its share of nodes, of edges and of training nodes.
SLACK = 1.05
# METIS takes one whole-number weight per node; this many units are one average node.
_UNITS = 16
# Passes of Fennel over the nodes: on an sbm of 200,000 nodes and 3.6 M edges in 4 parts they cut 52, 32, 20
# and 17% of the edges, two more passes no other; METIS cuts 17% in ten times the time.
_PASSES = 4


def has_metis() -> bool:
    """Whether pymetis is installed."""
    return find_spec("pymetis") is not None


def assign(
    graph: Graph, parts: int, method: str = "metis", *, train: ArrayLike | None = None, seed: int = 0
) -> NDArray[np.int64]:
    """The part of every node, level on nodes, in-edges and training nodes (a mask or a list of nodes).

    "metis" cuts fewest edges and holds the graph twice; "fennel" streams over the edges and holds one number
    per node; "random" cuts (parts - 1) / parts of all edges.
    """
    count = check_division(graph, parts, method, seed)
    mask = _mask(graph.num_nodes, train)
    if count == 1:
        return np.zeros(graph.num_nodes, np.int64)
    if method == "random":
        return scattered(mask, count, seed)
    weights = loads(graph, mask)
    if method == "fennel":
        return balance(graph, fennel(graph, count, weights), weights, count)
    share = weights[:, :2] / np.maximum(weights[:, :2].mean(axis=0), 1e-9)
    weight = np.maximum(1, np.rint(_UNITS * share.sum(axis=1))).astype(np.int64)
    found = metis(graph, count, recursive=count <= 8, weight=weight)
    return balance(graph, found, weights, count)


def metis(
    graph: Graph, parts: int, *, recursive: bool = False, weight: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The part of every node; edges count both ways, repeats once, loops not at all.

    Parts are level in the sum of `weight` (default: in nodes). pymetis hands METIS one weight per node, so
    several at once are left to `balance`.
    """
    count = _checked_parts(graph, parts)
    if count == 1:
        return np.zeros(graph.num_nodes, np.int64)
    if not has_metis():
        raise InputError(
            "partitioning needs pymetis, which is not installed; pip install pymetis, or choose "
            "the method fennel or random, or bring a partition of your own"
        )
    import pymetis

    pointer, neighbours = undirected(graph)
    adjacency: Any = pymetis.CSRAdjacency(pointer, neighbours)
    found: Any = pymetis.part_graph(count, adjacency, vweights=weight, recursive=recursive)
    return np.asarray(found.vertex_part, np.int64)


def distinct(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each code once, ascending. numpy's unique hashes: 15.8 s for 5.4 M codes, sorted in 1.6 s."""
    ordered = np.sort(codes)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if ordered.size else ordered


def undirected(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pointers and neighbours of the graph both ways, each pair once, without loops.

    int64: METIS as pymetis builds it indexes with 64 bits and would copy anything else.
    """
    both = (graph.indptr, graph.indices, graph.transpose.indptr, graph.transpose.indices)
    pointer = np.zeros(graph.num_nodes + 1, np.int64)
    _merge(*both, pointer, np.empty(0, np.int64))
    np.cumsum(pointer, out=pointer)
    neighbours = np.empty(int(pointer[-1]), np.int64)
    _merge(*both, pointer, neighbours)
    return pointer, neighbours


def scattered(train: NDArray[np.bool_], parts: int, seed: int = 0) -> NDArray[np.int64]:
    """A random part for every node; training nodes and the others are both spread evenly."""
    part = np.empty(train.size, np.int64)
    rng = np.random.default_rng(seed)
    dealt = 0
    for group in (np.flatnonzero(train), np.flatnonzero(~train)):
        part[rng.permutation(group)] = (np.arange(group.size) + dealt) % parts
        dealt += group.size
    return part


def loads(graph: Graph, train: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[nodes, 3]: what a node adds to its part: itself, its in-edges, whether it is trained on."""
    return np.stack((np.ones(graph.num_nodes, np.int64), graph.degrees.astype(np.int64), train), axis=1)


def fennel(graph: Graph, parts: int, weights: NDArray[np.int64], passes: int = _PASSES) -> NDArray[np.int64]:
    """The part of every node, chosen one node after the other (Fennel, Tsourakakis et al. 2014).

    Node v goes to the part i with most of its in-neighbours less 1.5 alpha sqrt(|i|), alpha = sqrt(parts)
    edges / nodes^1.5, among the parts whose loads leave room for it. Later passes place every node again,
    knowing where all others are. Needs the CSR, which may be a mapped file, and 8 bytes per node.
    """
    part = np.full(graph.num_nodes, -1, np.int64)
    alpha = np.sqrt(parts) * graph.num_edges / max(1.0, graph.num_nodes**1.5)
    held = np.zeros((parts, weights.shape[1]), np.int64)
    limits = _limits(weights, parts)
    for _ in range(passes):
        _fennel_pass(graph.indptr, graph.indices, weights, limits, float(alpha), held, part)
    return part


def balance(
    graph: Graph, part: NDArray[np.int64], weights: NDArray[np.int64], parts: int
) -> NDArray[np.int64]:
    """The parts with nodes moved from those that exceed 1.05 of their share of a load, few edges cut by it.

    Nodes that lose no neighbour go first, then those that lose few, then any; a load that so few nodes carry
    that it cannot be level (one hub, three training nodes) stays as near as moves bring it.
    """
    moved = part.astype(np.int64, copy=True)
    held = np.zeros((parts, weights.shape[1]), np.int64)
    for load in range(weights.shape[1]):
        held[:, load] = np.bincount(moved, weights=weights[:, load], minlength=parts)
    limits = _limits(weights, parts)
    for least in (0, -2, -8, -(2**62)):
        if (held <= limits).all():
            break
        _balance_pass(graph.indptr, graph.indices, weights, limits, least, held, moved)
    return moved


def _limits(weights: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """The most a part should hold of every load."""
    most: NDArray[np.int64] = np.ceil(SLACK * weights.sum(axis=0) / parts).astype(np.int64)
    return most


def check_division(graph: Graph, parts: int, method: str, seed: int) -> int:
    """The number of parts, where a graph can be divided so."""
    count = _checked_parts(graph, parts)
    if method not in METHODS:
        raise InputError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if seed < 0:
        raise InputError(f"seed={seed}: give a whole number of at least 0")
    if not graph.is_square:
        raise InputError(
            f"graph: {graph.num_nodes} targets and {graph.num_sources} sources are different node sets; "
            "parts are cut of graphs with one"
        )
    return count


def _checked_parts(graph: Graph, parts: int) -> int:
    if isinstance(parts, bool) or not isinstance(parts, int | np.integer) or parts < 1:
        raise InputError(f"parts={parts!r}: give a whole number of at least 1")
    if parts > max(1, graph.num_nodes):
        raise InputError(f"parts={parts}: the graph has only {graph.num_nodes} nodes; ask for fewer parts")
    return int(parts)


def _mask(num_nodes: int, train: ArrayLike | None) -> NDArray[np.bool_]:
    """The training nodes as a mask; empty if none are given."""
    mask = np.zeros(num_nodes, bool)
    if train is None:
        return mask
    given = np.asarray(train)
    if given.dtype == np.bool_:
        if given.shape != (num_nodes,):
            raise InputError(f"train: the mask has shape {given.shape} for {num_nodes} nodes")
        return given
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InputError(f"train has shape {given.shape} and type {given.dtype}; give nodes or a mask")
    if given.size and not 0 <= given.min() <= given.max() < num_nodes:
        raise InputError(f"train: nodes are numbered 0 to {num_nodes - 1}")
    mask[given.astype(np.int64)] = True
    return mask


@compiled
def _merge(indptr: Any, indices: Any, back_indptr: Any, back_indices: Any, pointer: Any, out: Any) -> None:
    """Counts the distinct neighbours of row v in pointer[v + 1] when `out` is empty, else writes them."""
    fills = out.size > 0
    for v in range(indptr.size - 1):
        p, q = indptr[v], back_indptr[v]
        p_end, q_end = indptr[v + 1], back_indptr[v + 1]
        last = np.int64(-1)
        found = pointer[v] if fills else np.int64(0)
        while p < p_end or q < q_end:
            if q >= q_end or (p < p_end and indices[p] <= back_indices[q]):
                u = np.int64(indices[p])
                p += 1
            else:
                u = np.int64(back_indices[q])
                q += 1
            if u != last and u != v:
                if fills:
                    out[found] = u
                found += 1
            last = u
        if not fills:
            pointer[v + 1] = found


@compiled
def _has_room(weights: Any, v: int, held: Any, limits: Any, i: int) -> bool:
    for load in range(limits.size):
        if weights[v, load] and held[i, load] + weights[v, load] > limits[load]:
            return False
    return True


@compiled
def _fennel_pass(
    indptr: Any, indices: Any, weights: Any, limits: Any, alpha: float, held: Any, part: Any
) -> None:
    parts = held.shape[0]
    near = np.zeros(parts, np.int64)
    for v in range(part.size):
        if part[v] >= 0:
            held[part[v]] -= weights[v]
            part[v] = -1
        near[:] = 0
        for p in range(indptr[v], indptr[v + 1]):
            owner = part[indices[p]]
            if owner >= 0:
                near[owner] += 1
        best, best_score = -1, -np.inf
        lightest = 0
        for i in range(parts):
            if held[i, 0] < held[lightest, 0]:
                lightest = i
            score = near[i] - 1.5 * alpha * np.sqrt(held[i, 0])
            if score > best_score and _has_room(weights, v, held, limits, i):
                best, best_score = i, score
        if best < 0:  # no part has room for all its loads: a hub, or the last nodes
            best = lightest
        part[v] = best
        held[best] += weights[v]


@compiled
def _balance_pass(
    indptr: Any, indices: Any, weights: Any, limits: Any, least: int, held: Any, part: Any
) -> None:
    """Moves nodes that gain at least `least` neighbours out of parts that hold too much of what they add."""
    parts = held.shape[0]
    near = np.zeros(parts, np.int64)
    for v in range(part.size):
        home = part[v]
        is_over = False
        for load in range(limits.size):
            is_over |= weights[v, load] > 0 and held[home, load] > limits[load]
        if not is_over or held[home, 0] <= 1:
            continue
        near[:] = 0
        for p in range(indptr[v], indptr[v + 1]):
            near[part[indices[p]]] += 1
        best, most = -1, np.int64(0)
        for i in range(parts):
            gain = near[i] - near[home]
            is_best = i != home and gain >= least and (best < 0 or gain > most)
            if is_best and _has_room(weights, v, held, limits, i):
                best, most = i, gain
        if best >= 0:
            part[v] = best
            held[home] -= weights[v]
            held[best] += weights[v]
