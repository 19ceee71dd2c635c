"""Buffers for the nodes and edges of a sample, kept because fresh pages are slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.loader import relabel

__all__ = ["STAMP_LIMIT", "EdgeSpace", "NodeSpace", "in_threads", "induced"]

Array = NDArray[Any]

# A stamped array of this many nodes takes 512 MiB per thread; larger graphs are relabelled by hashing.
STAMP_LIMIT = 1 << 27
_NONE = np.empty(0, np.int64)


class _Space:
    """Buffers that grow, one sample at a time."""

    def grow(self, name: str, size: int) -> None:
        """Makes the buffer at least `size` long, its contents kept."""
        buffer: Array = getattr(self, name)
        if buffer.size < size:
            longer = np.empty(max(size, 2 * buffer.size, 1024), buffer.dtype)
            longer[: buffer.size] = buffer
            setattr(self, name, longer)


class NodeSpace(_Space):
    """The sampled nodes of one type in order of discovery; in disjoint samples each with its tree."""

    def __init__(self, num_nodes: int, node_type: Any, disjoint: bool, most: int | None = None) -> None:
        """Graphs of up to `most` nodes get a table of all of them, larger ones are hashed."""
        self.num_nodes, self.disjoint = num_nodes, disjoint
        self.is_stamped = not disjoint and num_nodes <= (STAMP_LIMIT if most is None else most)
        self.slot = np.zeros(num_nodes if self.is_stamped else 0, np.uint32)
        self.base = np.uint32(1)
        self.n_id = np.empty(0, node_type)
        self.tree = _NONE
        self.found = 0

    def begin(self, seeds: Array, first_tree: int) -> None:
        """Enters the seeds; those of a disjoint sample start trees numbered from `first_tree`."""
        self.found = found = seeds.size
        self.grow("n_id", found)
        self.n_id[:found] = seeds
        if self.disjoint:
            self.grow("tree", found)
            self.tree[:found] = np.arange(first_tree, first_tree + found)
        if self.is_stamped:
            relabel.stamp_seeds(self.slot, self.base, self.n_id, found)

    def end(self) -> None:
        """Moves past the entries of this sample; starts over before uint32 runs out."""
        base = int(self.base) + self.found
        if base >= 1 << 31:
            self.slot.fill(0)
            base = 1
        self.base = np.uint32(base)

    def discover(self, edges: EdgeSpace, gained: int, targets: NodeSpace, begin: int, end: int) -> None:
        """Gives the sources of the last `gained` edges, those of targets begin..end, their places."""
        total = edges.total
        # one entry to spare: the kernel writes before it knows whether the source is new
        self.grow("n_id", self.found + gained + 1)
        edges.grow("row", total + gained)
        edges.total = total + gained
        if self.is_stamped:
            span = (edges.source, total, edges.total)
            self.found = int(
                relabel.stamp_relabel(self.slot, self.base, *span, self.n_id, self.found, edges.row)
            )
            return
        if self.disjoint:
            self.grow("tree", self.found + gained + 1)
        cells = 1 << (2 * (self.found + gained)).bit_length()
        table = (np.zeros(cells, np.int64), np.empty(cells, np.int32), self.num_nodes)
        frontier = (edges.source, edges.pointer, begin, end)
        known = (self.n_id, self.tree, targets.tree, self.found)
        self.found = int(relabel.hash_relabel(*table, *frontier, *known, edges.row))

    def nodes(self) -> NDArray[np.int64]:
        """The nodes found, copied."""
        return self.n_id[: self.found].astype(np.int64)

    def trees(self) -> NDArray[np.int64] | None:
        """The tree of every node found, copied; None when trees are not kept apart."""
        return self.tree[: self.found].copy() if self.disjoint else None


class EdgeSpace(_Space):
    """The chosen edges of one relation, target by target."""

    def __init__(self, node_type: Any, edge_type: Any) -> None:
        self.start = np.empty(0, edge_type)
        self.degree = np.empty(0, edge_type)
        self.key = np.empty(0, np.uint64)
        self.pointer = np.zeros(1, np.int64)
        self.edge = np.empty(0, edge_type)
        self.source = np.empty(0, node_type)
        self.row = np.empty(0, np.uint32)
        self.total = 0

    def edges(self, targets: int) -> tuple[Array, Array, Array]:
        """Places of sources and of targets (the first `targets` have edges) and numbers of the edges."""
        (row, col), e_id = np.empty((2, self.total), np.int64), np.empty(self.total, np.int64)
        relabel.finish(self.row, self.edge, self.pointer, targets, row, col, e_id)
        return row, col, e_id  # row and col side by side: they are an edge_index as they lie


def induced(relation: Any, targets: NodeSpace, sources: NodeSpace) -> tuple[Array, Array, Array]:
    """All edges of the relation among the nodes found: places of sources and targets, and numbers."""
    if not sources.is_stamped:
        raise InputError(
            f"direction='induced' needs a table of all nodes and serves up to {STAMP_LIMIT:,} of them; "
            "use 'directional'"
        )
    n_id = targets.n_id[: targets.found]
    where = (sources.slot, sources.base, relation.indptr, relation.indices, n_id)
    total = relabel.induce(*where, _NONE, _NONE, _NONE)
    row, col, e_id = (np.empty(total, np.int64) for _ in range(3))
    relabel.induce(*where, row, col, e_id)
    if relation.number is not None:
        e_id = relation.number[e_id].astype(np.int64)
    return row, col, e_id


def in_threads(work: Callable[[int, int], None], begin: int, end: int, threads: int) -> None:
    """Runs work on [begin, end) in equal parts, the last one here; the first error of any part is raised."""
    if threads == 1 or end - begin < threads:
        work(begin, end)
        return
    cuts = [begin + (end - begin) * i // threads for i in range(threads + 1)]
    errors: list[BaseException] = []

    def guarded(a: int, b: int) -> None:
        try:
            work(a, b)
        except BaseException as error:  # carried to the caller's thread and raised there
            errors.append(error)

    helpers = [threading.Thread(target=guarded, args=(cuts[i], cuts[i + 1])) for i in range(threads - 1)]
    for helper in helpers:
        helper.start()
    guarded(cuts[-2], cuts[-1])
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
