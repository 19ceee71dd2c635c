"""k-hop sampling over several node types and relations: in every hop one relation after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.loader.expand import Expander, Space, checked_fanout, checked_ids, whole
from plait.loader.relation import Relation, per_item
from plait.loader.space import induced

if TYPE_CHECKING:
    from plait.graph import Graph

__all__ = ["EdgeType", "HeteroSample", "HeteroSampler"]

Array = NDArray[Any]
EdgeType = tuple[str, str, str]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class HeteroSample:
    """One sampled subgraph: what `Sample` has, by node type and by edge type (source, relation, target).

    Places in row are those of n_id[source], places in col those of n_id[target]. `batch` numbers the trees of
    a disjoint sample through all seeds, in the order their types were given.
    """

    n_id: dict[str, Array]
    row: dict[EdgeType, Array]
    col: dict[EdgeType, Array]
    e_id: dict[EdgeType, Array]
    num_sampled_nodes: dict[str, list[int]] | None
    num_sampled_edges: dict[EdgeType, list[int]] | None
    batch: dict[str, Array] | None = None


class HeteroSampler(Expander):
    """Draws k-hop neighbourhoods: fanout[kind][h] in-edges of that kind for a node of hop h (-1: all).

    `graphs` has a Graph for every (source, relation, target); `num_nodes` counts every node type. A fanout
    that is a list serves all relations. Weights and edge times go by edge type, node times by node type;
    relations without one are sampled uniformly, or whatever their date.
    """

    def __init__(
        self,
        graphs: Mapping[EdgeType, Graph],
        fanout: Mapping[EdgeType, Sequence[int]] | Sequence[int],
        num_nodes: Mapping[str, int],
        *,
        replace: bool = False,
        weight: Mapping[EdgeType, ArrayLike] | None = None,
        node_time: Mapping[str, ArrayLike] | None = None,
        edge_time: Mapping[EdgeType, ArrayLike] | None = None,
        temporal_strategy: str = "uniform",
        disjoint: bool = False,
        method: str = "uniform",
        batch_dependency: int = 1,
        layer_dependency: bool = False,
        direction: str = "directional",
        seed: int = 0,
    ) -> None:
        if not graphs:
            raise InputError("graphs is empty; give a Graph for every (source, relation, target)")
        self._set_out(
            replace=replace, method=method, direction=direction, temporal_strategy=temporal_strategy,
            node_time=node_time, edge_time=edge_time, disjoint=disjoint, batch_dependency=batch_dependency,
            layer_dependency=layer_dependency, seed=seed,
        )  # fmt: skip
        if self.direction == "bidirectional":
            raise InputError("direction='bidirectional' is made of a directional sample; draw that")
        self.node_types, self.edge_types = tuple(num_nodes), tuple(graphs)
        self.num_nodes = {kind: int(count) for kind, count in num_nodes.items()}
        self.fanout = _by_relation(fanout, self.edge_types)
        self._node_time = {
            kind: per_item(f"node_time[{kind!r}]", times, self._count(kind), "node")
            for kind, times in (node_time or {}).items()
        }
        self.relations = tuple(
            self._relation(kind, graph, weight or {}, edge_time or {}) for kind, graph in graphs.items()
        )
        place = {kind: i for i, kind in enumerate(self.node_types)}
        self.ends = tuple((place[source], place[target]) for source, _, target in self.edge_types)
        self.fanouts = tuple(self.fanout[kind] for kind in self.edge_types)
        self.node_counts = tuple(self.num_nodes.values())

    def __repr__(self) -> str:
        return f"HeteroSampler({len(self.node_types)} node types, {len(self.edge_types)} edge types)"

    def _count(self, kind: str) -> int:
        if kind not in self.num_nodes:
            raise InputError(f"{kind!r} is not a node type; there are {', '.join(self.num_nodes)}")
        return self.num_nodes[kind]

    def _relation(
        self,
        kind: EdgeType,
        graph: Graph,
        weight: Mapping[Any, ArrayLike],
        edge_time: Mapping[Any, ArrayLike],
    ) -> Relation:
        source, _, target = kind
        if (graph.num_sources, graph.num_nodes) != (self._count(source), self._count(target)):
            raise InputError(
                f"graphs[{kind!r}] has {graph.num_sources} sources and {graph.num_nodes} targets, but there "
                f"are {self.num_nodes[source]} {source!r} and {self.num_nodes[target]} {target!r} nodes"
            )
        return Relation(
            graph,
            weight=weight.get(kind),
            source_time=self._node_time.get(source),
            edge_time=edge_time.get(kind),
            name=f"{kind!r} ",
            **self._choice(),
        )

    def sample(
        self,
        seeds: Mapping[str, ArrayLike],
        epoch: int = 0,
        batch: int = 0,
        *,
        seed_time: Mapping[str, ArrayLike] | None = None,
        threads: int = 1,
    ) -> HeteroSample:
        """The neighbourhood of the seeds of each type, in that epoch and batch; `threads` changes no edge."""
        if not seeds:
            raise InputError("seeds is empty; give the nodes of at least one type")
        given = {kind: checked_ids(f"seeds[{kind!r}]", ids, self._count(kind)) for kind, ids in seeds.items()}
        starts = np.cumsum([0, *(ids.size for ids in given.values())]).tolist()
        first = dict(zip(given, starts, strict=False))
        answer: HeteroSample = self._sampled(
            [given.get(kind, _NONE) for kind in self.node_types],
            self._checked_times(given, seed_time),
            whole("epoch", epoch),
            whole("batch", batch),
            whole("threads", threads, least=1),
            self._finish,
            [first.get(kind, 0) for kind in self.node_types],
        )
        return answer

    def _finish(self, space: Space) -> HeteroSample:
        n_id = {kind: nodes.nodes() for kind, nodes in zip(self.node_types, space.nodes, strict=True)}
        found = []
        for relation, (source, target), edges in zip(self.relations, self.ends, space.edges, strict=True):
            if self.direction == "induced":
                found.append(induced(relation, space.nodes[target], space.nodes[source]))
            else:
                found.append(edges.edges(space.expanded[target]))
        row, col, e_id = (
            dict(zip(self.edge_types, arrays, strict=True)) for arrays in zip(*found, strict=True)
        )
        if self.direction == "induced":
            return HeteroSample(n_id, row, col, e_id, None, None)
        nodes_by_hop = dict(
            zip(self.node_types, map(list, zip(*space.nodes_by_hop, strict=True)), strict=True)
        )
        edges_by_hop = dict(
            zip(self.edge_types, map(list, zip(*space.edges_by_hop, strict=True)), strict=True)
        )
        trees = [nodes.trees() for nodes in space.nodes]
        batch = {k: t for k, t in zip(self.node_types, trees, strict=True) if t is not None} or None
        return HeteroSample(n_id, row, col, e_id, nodes_by_hop, edges_by_hop, batch)

    def _checked_times(self, seeds: dict[str, Array], seed_time: Mapping[str, ArrayLike] | None) -> Array:
        """One time per tree."""
        if self._has_no_times(seed_time):
            return _NONE
        times = []
        for kind, ids in seeds.items():
            if seed_time is not None and kind in seed_time:
                times.append(per_item(f"seed_time[{kind!r}]", seed_time[kind], ids.size, "seed"))
            elif kind in self._node_time:
                times.append(self._node_time[kind][ids])
            else:
                raise InputError(
                    f"seed_time is missing for {kind!r}, whose nodes are not dated; pass one each"
                )
        dtype = np.result_type(*(r.times.dtype for r in self.relations if r.is_temporal))
        return np.concatenate(times).astype(dtype, copy=False)


def _by_relation(fanout: Any, edge_types: Sequence[EdgeType]) -> dict[EdgeType, tuple[int, ...]]:
    """The fanout of every relation; all have as many hops."""
    if not isinstance(fanout, Mapping):
        fanout = dict.fromkeys(edge_types, fanout)
    unknown, missing = set(fanout) - set(edge_types), set(edge_types) - set(fanout)
    if unknown or missing:
        what = (
            f"{sorted(unknown)[0]} is not an edge type" if unknown else f"{sorted(missing)[0]} has no fanout"
        )
        raise InputError(f"fanout: {what}; give one list for every edge type: {list(edge_types)}")
    checked = {kind: checked_fanout(fanout[kind], f"fanout[{kind!r}]") for kind in edge_types}
    if len({len(hops) for hops in checked.values()}) > 1:
        raise InputError("fanout: the edge types have different numbers of hops; give them the same")
    return checked
