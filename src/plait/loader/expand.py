"""Seeds to neighbourhoods, hop by hop, over any number of node types and relations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.loader.draw import stream_key
from plait.loader.relation import Relation
from plait.loader.space import EdgeSpace, NodeSpace

__all__ = ["Expander", "Space", "checked_fanout", "checked_ids", "whole"]

Array = NDArray[Any]

METHODS = ("uniform", "labor")
DIRECTIONS = ("directional", "bidirectional", "induced")
STRATEGIES = ("uniform", "last")
_NO_KEY = np.uint64(0)


@dataclass
class Space:
    """The buffers of one sample and what each hop brought."""

    nodes: list[NodeSpace]
    edges: list[EdgeSpace]
    expanded: list[int]
    nodes_by_hop: list[list[int]]
    edges_by_hop: list[list[int]]


class Expander:
    """What samplers of one and of several node types share: settings, random keys, buffers, the hop loop.

    A sampler sets `relations`, the (source, target) types of each, their fanouts and the number of nodes of
    each type after `_set_out`.
    """

    relations: Sequence[Relation]
    ends: Sequence[tuple[int, int]]
    fanouts: Sequence[tuple[int, ...]]
    node_counts: Sequence[int]

    def _set_out(
        self,
        *,
        replace: bool,
        method: str,
        direction: str,
        temporal_strategy: str,
        node_time: Any,
        edge_time: Any,
        disjoint: bool,
        batch_dependency: int,
        layer_dependency: bool,
        seed: int,
    ) -> None:
        self.replace = bool(replace)
        self.method = one_of("method", method, METHODS)
        self.direction = one_of("direction", direction, DIRECTIONS)
        self.temporal_strategy = one_of("temporal_strategy", temporal_strategy, STRATEGIES)
        if node_time is not None and edge_time is not None:
            raise InputError("node_time and edge_time were both given; choose the one that dates a neighbour")
        self.is_temporal = node_time is not None or edge_time is not None
        self.disjoint = bool(disjoint) or self.is_temporal
        self.batch_dependency = whole("batch_dependency", batch_dependency, least=1)
        self.layer_dependency = bool(layer_dependency)
        self.seed = whole("seed", seed, least=0)
        self._spare: list[Space] = []
        if self.method == "labor" and self.replace:
            raise InputError("replace=True: LABOR draws without replacement; use method='uniform'")
        if self.method != "labor" and (self.batch_dependency > 1 or self.layer_dependency):
            raise InputError(
                "batch_dependency and layer_dependency belong to method='labor'; leave them at 1 and False"
            )
        if self.direction == "induced" and self.disjoint:
            raise InputError(
                "direction='induced' is not defined for disjoint or temporal samples; use 'directional'"
            )

    def _has_no_times(self, seed_time: Any) -> bool:
        """Whether samples do not depend on times; seed_time is refused then."""
        if seed_time is not None and not self.is_temporal:
            raise InputError(
                "seed_time was given to a sampler without times; build it with node_time or edge_time"
            )
        return not self.is_temporal

    def _choice(self) -> dict[str, Any]:
        """The settings a relation chooses by."""
        return {
            "replace": self.replace,
            "is_labor": self.method == "labor",
            "batch_dependency": self.batch_dependency,
            "takes_last": self.temporal_strategy == "last",
        }

    def __getstate__(self) -> dict[str, Any]:
        """A copy for another process leaves the buffers behind."""
        return {**vars(self), "_spare": []}

    def _sampled(
        self,
        seeds: Sequence[Array],
        times: Array,
        epoch: int,
        batch: int,
        threads: int,
        finish: Callable[[Space], Any],
        first_trees: Sequence[int] = (0,),
    ) -> Any:
        """finish(the space in which the neighbourhood of `seeds`, one array per type, was drawn)."""
        space = self._taken()
        try:
            for nodes, given, tree in zip(space.nodes, seeds, first_trees, strict=True):
                nodes.begin(given, tree)
            self._expand(times, epoch, batch, threads, space)
            answer = finish(space)
            for nodes in space.nodes:
                nodes.end()
            return answer
        finally:
            self._spare.append(space)

    def _taken(self) -> Space:
        try:
            return self._spare.pop()
        except IndexError:
            pass
        node_type = np.result_type(*(r.indices.dtype for r in self.relations), np.int32)
        return Space(
            [NodeSpace(count, node_type, self.disjoint) for count in self.node_counts],
            [EdgeSpace(r.indices.dtype, r.indptr.dtype) for r in self.relations],
            [],
            [],
            [],
        )

    def _expand(self, times: Array, epoch: int, batch: int, threads: int, space: Space) -> None:
        for edges in space.edges:
            edges.total = 0
        begins, ends = [0] * len(space.nodes), [n.found for n in space.nodes]
        space.nodes_by_hop, space.edges_by_hop = [ends], []
        for hop in range(len(self.fanouts[0])):
            gains = []
            for r, (relation, (source, target)) in enumerate(zip(self.relations, self.ends, strict=True)):
                key, variate = self._keys(epoch, batch, hop, r)
                frontier = (begins[target], ends[target])
                targets, edges = space.nodes[target], space.edges[r]
                gained = relation.choose(
                    self.fanouts[r][hop], key, variate, *frontier, times, targets, edges, threads
                )
                space.nodes[source].discover(edges, gained, targets, *frontier)
                gains.append(gained)
            begins, ends = ends, [n.found for n in space.nodes]
            space.nodes_by_hop.append([end - begin for begin, end in zip(begins, ends, strict=True)])
            space.edges_by_hop.append(gains)
        space.expanded = begins

    def _keys(self, epoch: int, batch: int, hop: int, r: int) -> tuple[np.uint64, tuple[np.uint64, int]]:
        """The key of the hop's draws in relation r, and LABOR's key with the number of the batch."""
        if self.method != "labor":
            more = () if len(self.relations) == 1 else (r,)
            return stream_key(self.seed, epoch, batch, hop, *more), (_NO_KEY, batch)
        # LABOR's variates belong to sources and outlive a batch, so their keys leave the relation and the
        # batch out; the kernel brings the batch back in
        more = () if len(self.node_counts) == 1 else (self.ends[r][0],)
        lasting = -1 if self.batch_dependency > 1 else batch
        hops = -1 if self.layer_dependency else hop
        return _NO_KEY, (stream_key(self.seed, epoch, lasting, hops, *more), batch)


def checked_fanout(fanout: Any, name: str = "fanout") -> tuple[int, ...]:
    """The fanout of every hop."""
    message = (
        "is not a fanout; give one whole number per hop, such as [15, 10, 5], with -1 for all neighbours"
    )
    if isinstance(fanout, str | bytes) or not isinstance(fanout, Iterable):
        raise InputError(f"{name}: {fanout!r} {message}")
    hops = tuple(fanout)
    for k in hops:
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < -1:
            raise InputError(f"{name}: {k!r} in {list(hops)} {message}")
    if not hops:
        raise InputError(f"{name}: an empty list {message}")
    return tuple(int(k) for k in hops)


def checked_ids(name: str, ids: Any, count: int) -> Array:
    """Node numbers below `count`."""
    nodes = np.asarray(ids)
    if nodes.ndim != 1 or nodes.size == 0:
        raise InputError(f"{name} must be a list of at least one node; got shape {nodes.shape}")
    if nodes.dtype.kind not in "iu":
        raise InputError(f"{name} must be whole node numbers; got {nodes.dtype} (turn a mask into indices)")
    if nodes.min() < 0 or nodes.max() >= count:
        bad = nodes[(nodes < 0) | (nodes >= count)][0]
        raise InputError(f"{name} holds {bad}, but nodes are numbered 0 to {count - 1}")
    return nodes


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    """The value, which must be one of those known."""
    text = str(getattr(value, "value", value))
    if text not in known:
        raise InputError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
    return text


def whole(name: str, value: Any, least: int = 0) -> int:
    """The value as a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name}={value!r}: give a whole number of at least {least}")
    return int(value)
