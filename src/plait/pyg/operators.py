"""The propagation matrix of a layer, p @ (A + l) @ q, made from the edges by the layer's own rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.errors import InputError, PlanError
from plait.graph import Graph
from plait.runtime.placed import PlacedGraph, index_of, place_of

__all__ = ["Operator", "Propagation", "propagate"]


@dataclass(frozen=True, slots=True)
class Operator:
    """How the propagation matrix p @ (A + l) @ q of a layer is made from its edges.

    loops, what happens to edges v -> v before anything is counted:
      none       they stay in A
      remaining  l holds the weight of a node's last loop, `fill` where it has none
      replace    l holds `fill`, whatever was there
      add        l holds `fill` plus the weights of the node's loops
    normalise:
      none       A as it is
      symmetric  p = q = 1 / sqrt(weighted in-degree), loops counted; 0 where the degree is 0
      mean       p = 1 / number of incoming edges, whatever their weights
      clustergcn p = 1 / number of incoming edges, l raised by diag_lambda
      laplacian  2 L / lambda_max - I of the graph's Laplacian L
      degree     d = -(weighted in-degree), beside an A left as it is
    """

    loops: str = "none"
    fill: float = 1.0
    normalise: str = "none"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def diagonals(self) -> frozenset[str] | None:
        """Names of the diagonals of p @ (A + l) @ q; None where the matrix is made by rules of its own."""
        scales = {"none": "", "symmetric": "pq", "mean": "p"}.get(self.normalise)
        if scales is None or self.options:
            return None
        return frozenset(scales if self.loops == "none" else f"{scales}l")

    @property
    def is_by_rows(self) -> bool:
        """Whether the diagonals of a node depend on its incoming edges alone."""
        return self.normalise in ("none", "symmetric", "mean", "degree")

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option, by name."""
        return dict(self.options).get(name, default)

    def has_unit_loops(self, is_weighted: bool) -> bool | None:
        """Whether l is all one, where that is known without a look at it."""
        is_plain = self.normalise in ("none", "symmetric", "mean", "degree") and self.fill == 1.0
        is_known = is_plain and (self.loops == "replace" or (self.loops == "remaining" and not is_weighted))
        return True if is_known else None


@dataclass(frozen=True)
class Propagation:
    """The values of an operator's constant leaves on one graph; vectors are in the dtype of the features."""

    graph: Graph
    """Leaf A; without self loops where `l` carries them."""
    edge_weight: Tensor | None
    """In the order of graph's CSR; None: all ones."""
    p: Tensor | None = None
    l: Tensor | None = None
    q: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    """Further diagonals, by leaf name."""


def propagate(
    operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype
) -> Propagation:
    """The operator's matrix on `graph`; edge_weight is in the caller's edge order, None for all ones."""
    if operator.normalise not in _NORMALISE:
        raise PlanError(f"operator: normalise={operator.normalise!r} is not one of {sorted(_NORMALISE)}")
    if edge_weight is not None:
        edge_weight = edge_weight.to(dtype)
    return _NORMALISE[operator.normalise](operator, graph, edge_weight, dtype)


def _follow(edge_weight: Tensor | None, graph: Graph) -> Tensor | None:
    """The caller's edge weights in the order of graph's CSR."""
    if edge_weight is None or graph.order is None:
        return edge_weight
    return edge_weight[index_of(graph.order)]


def _rows(graph: Graph) -> Tensor:
    return index_of(graph.edge_rows())


def _columns(graph: Graph) -> Tensor:
    return index_of(graph.indices)


def _counts(degrees: Any, dtype: torch.dtype) -> Tensor:
    return index_of(degrees).to(dtype)


def _degrees(graph: Graph, weight: Tensor | None, dtype: torch.dtype, by: str = "target") -> Tensor:
    """Sums of the edge weights by target (row sums of A) or by source (column sums)."""
    if weight is None:
        return _counts(graph.degrees if by == "target" else graph.out_degrees, dtype)
    if isinstance(graph, PlacedGraph):
        return _summed(graph, weight, by)
    index = _rows(graph) if by == "target" else _columns(graph)
    size = graph.num_nodes if by == "target" else graph.num_sources
    return weight.new_zeros(size, dtype=dtype).index_add_(0, index, weight)


def _summed(graph: PlacedGraph, weight: Tensor, by: str) -> Tensor:
    """The same row by row: adding on a GPU wherever an edge points gives other bits at every run."""
    if by == "source":
        graph, weight = graph.transpose, weight[index_of(graph.transpose_order)]
    offsets = graph.rows.indptr.long()
    return torch.segment_reduce(weight.contiguous(), "sum", offsets=offsets, initial=0.0, unsafe=True)


def _inverse_root(degrees: Tensor) -> Tensor:
    """degrees ** -0.5, and 0 where the degree is 0; a negative degree gives NaN, as in PyG."""
    root = degrees.pow(-0.5)
    return root.masked_fill_(root == float("inf"), 0.0)


def _split(
    operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype
) -> tuple[Graph, Tensor | None, Tensor | None]:
    """(A, its weights, l): the self loops taken out of the graph as the operator says."""
    if operator.loops == "none":
        return graph, _follow(edge_weight, graph), None
    bare = graph.without_self_loops()
    if edge_weight is not None and isinstance(bare, PlacedGraph):
        bare = bare.trimmed()  # weights of loops that were left behind must not count
    loops = torch.full((graph.num_nodes,), operator.fill, dtype=dtype, device=place_of(graph))
    # loops that are there count one without weights, as the missing ones do
    is_all_one = operator.loops == "remaining" and edge_weight is None and operator.fill == 1.0
    if operator.loops in ("remaining", "add") and bare is not graph and not is_all_one:
        _old_loops(loops, operator, graph, edge_weight)
    return bare, _follow(edge_weight, bare), loops


def _old_loops(loops: Tensor, operator: Operator, graph: Graph, edge_weight: Tensor | None) -> None:
    """Write (remaining) or add (add) the loops the graph already has."""
    places, nodes = _loops(graph)
    weight = _follow(edge_weight, graph)
    values = loops.new_ones(len(places)) if weight is None else weight[places]
    if operator.loops == "add":
        loops.index_add_(0, nodes, values)
        return
    # of several loops on one node the last in the caller's order counts; a CSR row keeps that order
    if values.requires_grad:
        # torch hands the gradient of such a write to all of them, and so does PyG
        loops[nodes] = values
        return
    last = nodes.diff(append=nodes.new_full((1,), -1)).nonzero().reshape(-1)
    loops[nodes[last]] = values[last]


def _loops(graph: Graph) -> tuple[Tensor, Tensor]:
    """(positions of the edges v -> v, v of each)."""
    rows = _rows(graph)
    places = (rows == _columns(graph)).nonzero().reshape(-1)
    return places, rows[places]


def _plain(operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype) -> Propagation:
    a, weight, loops = _split(operator, graph, edge_weight, dtype)
    return Propagation(a, weight, l=loops)


def _symmetric(
    operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype
) -> Propagation:
    a, weight, loops = _split(operator, graph, edge_weight, dtype)
    degrees = _degrees(a, weight, dtype)
    scale = _inverse_root(degrees if loops is None else degrees + loops)
    return Propagation(a, weight, p=scale, l=loops, q=scale)


def _mean(operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype) -> Propagation:
    a, weight, loops = _split(operator, graph, edge_weight, dtype)
    counts = _counts(a.degrees, dtype) + (0 if loops is None else 1)
    return Propagation(a, weight, p=1.0 / counts.clamp(min=1), l=loops)


def _degree(operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype) -> Propagation:
    a, weight, loops = _split(operator, graph, edge_weight, dtype)
    return Propagation(a, weight, l=loops, extra={"d": -_degrees(a, weight, dtype)})


def _cluster_gcn(
    operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype
) -> Propagation:
    """1 / degree on every edge, lambda / degree more on loops; edge weights are not read.

    PyG counts and divides in torch's default dtype whatever x is; so do we, to the last bit.
    """
    bare = graph.without_self_loops()
    by, strength = operator.option("by"), operator.option("diag_lambda")
    counts = _degrees(bare, None, operator.option("counts", torch.get_default_dtype()), by)
    if operator.loops == "none":
        nodes, partners = _loop_partners(graph)
        counts = counts.index_add(0, nodes, counts.new_ones(len(nodes)))
    else:
        nodes = partners = torch.arange(graph.num_nodes, device=place_of(graph))
        counts = counts + 1
    inverse = 1.0 / counts.clamp(min=1.0)
    entries = inverse[nodes] + strength * inverse[partners]
    scale = inverse.to(dtype)
    loops = torch.zeros_like(scale).index_add_(0, nodes, entries.to(dtype)) / scale
    return Propagation(
        bare, None, scale if by == "target" else None, loops, scale if by == "source" else None
    )


def _loop_partners(graph: Graph) -> tuple[Tensor, Tensor]:
    """(node of every loop, node whose degree it gets): in PyG the k-th loop of the caller meets node k."""
    places, nodes = _loops(graph)
    if graph.num_nodes > 1 and len(places) != graph.num_nodes:
        raise InputError(
            f"edge_index: ClusterGCNConv(add_self_loops=False) needs one self loop per node, "
            f"{graph.num_nodes} in all, and got {len(places)}; add them or leave add_self_loops=True"
        )
    if graph.order is not None:
        nodes = nodes[index_of(graph.order)[places].argsort()]
    return nodes, torch.arange(len(nodes)).to(nodes) if graph.num_nodes > 1 else torch.zeros_like(nodes)


def _laplacian(
    operator: Operator, graph: Graph, edge_weight: Tensor | None, dtype: torch.dtype
) -> Propagation:
    """2 L / lambda_max - I, lambda_max twice the largest entry of L, which bounds its eigenvalues."""
    a = graph.without_self_loops()
    if isinstance(a, PlacedGraph):
        a = a.trimmed()
    kind, by = operator.option("kind"), operator.option("by")
    weight = _follow(edge_weight, a)
    degrees = _degrees(a, weight, dtype, by)
    if weight is not None:
        return _weighted_laplacian(a, weight, degrees, kind, by)
    if kind == "sym":
        root = _inverse_root(degrees)
        return Propagation(a, None, p=-root, q=root)
    if kind == "rw":
        inverse = 1.0 / degrees
        inverse = -inverse.masked_fill_(inverse == float("inf"), 0.0)
        return Propagation(
            a, None, p=inverse if by == "target" else None, q=inverse if by == "source" else None
        )
    largest = degrees.max() if len(degrees) else degrees.new_zeros(())
    # 2 (D - A) / (2 largest) - I = p (A + l); without edges PyG divides 0 by 0, and so do we
    return Propagation(a, None, p=(-1.0 / largest).expand(len(degrees)).contiguous(), l=largest - degrees)


def _weighted_laplacian(
    graph: Graph, weight: Tensor, degrees: Tensor, kind: str | None, by: str
) -> Propagation:
    """Every entry written out: a weighted degree of 0 may still have edges, which p, l and q cannot say."""
    targets, sources = _rows(graph), _columns(graph)
    diagonal = degrees if kind is None else torch.ones_like(degrees)
    if kind == "sym":
        root = _inverse_root(degrees)
        weight = root[sources] * weight * root[targets]
    elif kind == "rw":
        inverse = 1.0 / degrees
        inverse = inverse.masked_fill_(inverse == float("inf"), 0.0)
        weight = inverse[sources if by == "source" else targets] * weight
    entries = torch.cat([-weight, diagonal])
    entries = 2.0 * entries / (2.0 * entries.max()) if len(entries) else entries
    entries = entries.masked_fill(entries == float("inf"), 0.0)
    return Propagation(graph, entries[: len(weight)], l=entries[len(weight) :] - 1.0)


_Make = Callable[[Operator, Graph, "Tensor | None", torch.dtype], Propagation]
_NORMALISE: dict[str, _Make] = {
    "none": _plain,
    "symmetric": _symmetric,
    "mean": _mean,
    "degree": _degree,
    "clustergcn": _cluster_gcn,
    "laplacian": _laplacian,
}
