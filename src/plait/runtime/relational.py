"""Relational layers: a graph's edges by relation, the kernels of their products and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from plait.graph import Graph
from plait.kernels import gemm as dense
from plait.kernels import spmm as sparse
from plait.ops.program import Step
from plait.ops.work import Matrix
from plait.plan import relational as plan
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.constants import SparseValue
from plait.runtime.meaning import ends, meaning, with_terms
from plait.runtime.orders import EdgeOrders
from plait.runtime.segments import segment_sum

__all__ = ["Relations", "shares_of"]


class Relations:
    """The edges of one graph by relation, and the matrices programs read, made when first asked for.

    `order`: where the graph's edges by target are among those given; None: they are in order. Patterns and
    groups of pairs are what kernels of the CPU read; runtime/cuda_relations.py makes those of a GPU.
    """

    def __init__(
        self, source: Tensor, target: Tensor, kind: Tensor, num_targets: int, num_sources: int, count: int,
        order: Any = None,
    ):  # fmt: skip
        # copies: the caller may write to the originals, and matrices are made later
        self.source, self.target, self.kind = (
            given.to(torch.int64, copy=True) for given in (source, target, kind)
        )
        self.num_targets, self.num_sources, self.count = num_targets, num_sources, count
        self._order = None if order is None else _long(order)
        self._graphs: dict[str, Any] = {}
        self._values: dict[tuple[str, torch.dtype], Any] = {}

    @cached_property
    def _mates(self) -> Tensor:
        """[targets * relations]: edges of one relation into one target."""
        return torch.bincount(self.target * self.count + self.kind, minlength=self.num_targets * self.count)

    @cached_property
    def edge_weight(self) -> Tensor:
        """1 / (edges of its relation into its target): the mean's weight of every edge."""
        return 1.0 / self._mates[self.target * self.count + self.kind].double()

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Targets and sources times relations, and the pairs of either with a relation that have edges."""
        return {
            "NR": self.num_targets * self.count,
            "MR": self.num_sources * self.count,
            "P": self._target_pairs[0].numel(),
            "Q": self._source_pairs[0].numel(),
        }

    def cost(self, name: str, whole: Matrix) -> Matrix:
        """What the cost model knows of a matrix of this name."""
        return plan.cost(name, whole, self.sizes)

    # Matrices by name -------------------------------------------------------------------------

    def value(self, name: str, dtype: torch.dtype) -> Any:
        """A matrix, a diagonal of means, the groups of relations among pairs, or these relations."""
        if name == "relations":
            return self
        if name in ("target pairs", "source pairs"):
            return self._groups[name]
        found = self._values.get((name, dtype))
        if found is None:
            found = self._values[name, dtype] = self._value(name, dtype)
        return found

    def _value(self, name: str, dtype: torch.dtype) -> Any:
        if name == "means":
            return (1.0 / self._mates.clamp(min=1).double()).to(dtype)
        if name == "means of pairs":
            keys, pair = self._target_pairs
            return (1.0 / torch.bincount(pair, minlength=keys.numel()).double()).to(dtype)
        bare = name.replace("Ā", "A")
        graph = self._graphs.get(bare)
        if graph is None:
            graph = self._graphs[bare] = self._pattern(*self._edges(bare))
        if bare == name:
            return SparseValue(graph, None)
        weight = self.edge_weight
        return SparseValue(graph, (weight if graph.order is None else weight[_long(graph.order)]).to(dtype))

    def _pattern(self, column: Tensor, row: Tensor, rows: int, columns: int) -> Any:
        """The graph of these entries."""
        return Graph.from_edge_index(column.numpy(), row.numpy(), rows, columns)

    def _edges(self, name: str) -> tuple[Tensor, Tensor, int, int]:
        """(column of every entry, its row, rows, columns)."""
        targets, sources, sizes = self.num_targets, self.num_sources, self.sizes
        if name == "A by target":
            return self.source, self.target * self.count + self.kind, sizes["NR"], sources
        if name == "A by source":
            return self.source * self.count + self.kind, self.target, targets, sizes["MR"]
        keys, pair = self._target_pairs if name in ("A to pairs", "pairs to targets") else self._source_pairs
        every = torch.arange(keys.numel(), device=keys.device)
        if name == "A to pairs":
            return self.source, pair, keys.numel(), sources
        if name == "pairs to targets":
            return every, keys % max(1, targets), targets, keys.numel()
        if name == "sources to pairs":
            return keys % max(1, sources), every, keys.numel(), sources
        return pair, self.target, targets, keys.numel()

    @cached_property
    def _target_pairs(self) -> tuple[Tensor, Tensor]:
        """(relation * targets + target of every pair with edges, in order; the pair of every edge)."""
        keys, pair = torch.unique(self.kind * self.num_targets + self.target, return_inverse=True)
        return keys, pair

    @cached_property
    def _source_pairs(self) -> tuple[Tensor, Tensor]:
        """The same of relations and sources."""
        keys, pair = torch.unique(self.kind * self.num_sources + self.source, return_inverse=True)
        return keys, pair

    @cached_property
    def _groups(self) -> dict[str, Any]:
        """The pairs of targets and of sources by relation."""
        found = {}
        for name, (keys, _), nodes in (
            ("target pairs", self._target_pairs, self.num_targets),
            ("source pairs", self._source_pairs, self.num_sources),
        ):
            starts = torch.arange(self.count + 1, device=keys.device) * nodes
            found[name] = self._group(tuple(torch.searchsorted(keys, starts).tolist()))
        return found

    def _group(self, bounds: tuple[int, ...]) -> Any:
        """Pairs by relation, as products read them: where each one's begin, and where the last one's end."""
        return bounds

    @cached_property
    def by_target(self) -> tuple[Tensor, Tensor]:
        """(relation, mean's weight) of every edge, by target."""
        if self._order is None:
            return self.kind, self.edge_weight
        return self.kind[self._order], self.edge_weight[self._order]

    def by_source(self, orders: EdgeOrders) -> tuple[Tensor, Tensor]:
        """The same by source."""
        turn = _long(orders.order)
        return self.by_target[0][turn], self.by_target[1][turn]


def _long(order: Any) -> Tensor:
    """Numbers of edges, numpy's or torch's, to index a tensor with."""
    return torch.as_tensor(order).long()


# Products by relation -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """z[rows, outer] (+)= h[rows, inner] @ w[weights]; the flags: the first to write there."""

    rows: slice
    inner: slice
    outer: slice
    weights: slice
    is_first_out: bool
    is_first_in: bool


def _products(step: Step, bounds: tuple[int, ...]) -> list[_Product]:
    """The products of a step, relation by relation and block by block."""
    layout, count, blocks = (step.option(name) for name in ("layout", "relations", "blocks"))
    inner, width = step.option("inner"), step.option("width")
    found = []
    for r in range(count):
        for b in range(blocks):
            at = r * blocks + b
            at_inner, at_outer = at if layout == "inner" else b, at if layout == "outer" else b
            found.append(
                _Product(
                    slice(bounds[r], bounds[r + 1]) if bounds else slice(None),
                    slice(at_inner * inner, (at_inner + 1) * inner),
                    slice(at_outer * width, (at_outer + 1) * width),
                    slice(at * inner, (at + 1) * inner),
                    is_first_out=layout != "inner" or r == 0,
                    is_first_in=layout != "outer" or r == 0,
                )
            )
    return found


def _bounds_of(b: Binding, step: Step) -> tuple[int, ...]:
    name = step.get("groups")
    bounds: tuple[int, ...] = () if name is None else b.constant(name)
    return bounds


@kernel("relate", "cpu")
def _relate(b: Binding, step: Step, owns: bool) -> Bound:
    names, products = dict(step.reads), _products(step, _bounds_of(b, step))
    x_name, w_name = names["x"], names["w"]
    addend_name, bias_name = names.get("addend", ""), names.get("bias", "")
    columns, is_back = int(b.program.shapes[step.out][1]), step.is_transposed

    def run(env: Env) -> Tensor:
        x, w, bias = env[x_name], env[w_name], env.get(bias_name)
        addend: Tensor | None = env[addend_name] if addend_name else None
        out = addend if owns and addend is not None else b.room(env, step.out, x.shape[0], columns, x)
        for p in products:
            read, written = (p.outer, p.inner) if is_back else (p.inner, p.outer)
            is_first = p.is_first_in if is_back else p.is_first_out
            part = out[p.rows, written]
            plus = part if not is_first else None if addend is None else addend[p.rows, written]
            dense.gemm(
                x[p.rows, read], w[p.weights].t() if is_back else w[p.weights], part, addend=plus,
                bias=bias[written] if bias is not None and is_first else None,
            )  # fmt: skip
        return out

    return run


@kernel("relate_weights", "cpu")
def _relate_weights(b: Binding, step: Step, owns: bool) -> Bound:
    products, left, right = _products(step, _bounds_of(b, step)), step["left"], step["right"]
    rows, columns = (int(size) for size in b.program.shapes[step.out])

    def run(env: Env) -> Tensor:
        h, grad = env[left], env[right]
        out: Tensor = h.new_empty((rows, columns))
        for p in products:
            out[p.weights] = dense.weight_gradient(h[p.rows, p.inner], grad[p.rows, p.outer])
        return out

    return run


@meaning("relate")
def _relate_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x, w, name = env[step["x"]], env[step["w"]], step.get("groups")
    groups = () if name is None else env[name]
    products = _products(step, getattr(groups, "bounds", groups))  # on a GPU they know how to be cut, too
    shape = (x.shape[0], max(p.outer.stop for p in products))
    parts = [_placed(x[p.rows, p.inner] @ w[p.weights], p, shape) for p in products]
    return with_terms(torch.stack(parts).sum(0), step, env)


def _placed(part: Tensor, p: _Product, shape: tuple[int, int]) -> Tensor:
    """A product where it belongs, zeros elsewhere."""
    top, bottom, _ = p.rows.indices(shape[0])
    return pad(part, (p.outer.start, shape[1] - p.outer.stop, top, shape[0] - bottom))


# Bases ----------------------------------------------------------------------------------------------------


@kernel("basis_sums", "cpu")
def _basis_sums(b: Binding, step: Step, owns: bool) -> Bound:
    """Rows aggregated once for every basis, side by side, weighted by the relation's share of it."""
    relations, pattern = b.constant(step["relations"]), b.orders.pattern
    x_name, comp, is_mean = step["x"], step["comp"], step.option("is_mean")

    def run(env: Env) -> Tensor:
        x: Tensor = env[x_name]
        out = b.room(env, step.out, pattern.num_rows, step.option("bases") * x.shape[1], x)
        parts = torch.split(out, x.shape[1], dim=1)
        for part, shares in zip(parts, _shares(env[comp], relations.by_target, is_mean), strict=True):
            sparse.spmm(pattern, x, part, edge=shares)
        return out

    return run


@kernel("basis_sources", "cpu")
def _basis_sources(b: Binding, step: Step, owns: bool) -> Bound:
    relations, turned = b.constant(step["relations"]), b.orders.transpose
    by_source, comp, grad = relations.by_source(b.orders), step["comp"], step["grad"]
    width, addend, is_mean = int(b.program.shapes[step.out][1]), step.get("addend"), step.option("is_mean")

    def run(env: Env) -> Tensor:
        rows: Tensor = env[grad]
        plus: Tensor | None = None if addend is None else env[addend]
        out = plus if owns and plus is not None else b.room(env, step.out, turned.num_rows, width, rows)
        parts = torch.split(rows, width, dim=1)
        for part, shares in zip(parts, _shares(env[comp], by_source, is_mean), strict=True):
            sparse.spmm(turned, part, out, edge=shares, addend=plus)
            plus = out
        return out

    return run


@kernel("basis_shares", "cpu")
def _basis_shares(b: Binding, step: Step, owns: bool) -> Bound:
    """[relations, bases]: sums over a relation's edges of x[j] . gradient[i]."""
    relations, pattern = b.constant(step["relations"]), b.orders.pattern
    x_name, grad, is_mean = step["x"], step["grad"], step.option("is_mean")

    def run(env: Env) -> Tensor:
        kind, weight = relations.by_target
        x: Tensor = env[x_name]
        columns = []
        for part in torch.split(env[grad], x.shape[1], dim=1):
            dots = torch.empty(len(kind), dtype=x.dtype)
            sparse.weight_gradient(pattern, x, part, dots)
            worth = (dots * weight if is_mean else dots).numpy()
            columns.append(np.bincount(kind.numpy(), weights=worth, minlength=relations.count))
        return torch.from_numpy(np.stack(columns, axis=1)).to(x.dtype)

    return run


def _shares(comp: Tensor, edges: tuple[Tensor, Tensor], is_mean: bool) -> list[Tensor]:
    """For every basis, the weight of each edge: its relation's share of it, over the mean's count.

    edges: (relation, mean's weight) of each.
    """
    kind, weight = edges
    scale = weight.to(comp.dtype) if is_mean else None
    found = [column[kind] for column in comp.t().contiguous()]
    return found if scale is None else [share.mul_(scale) for share in found]


def shares_of(comp: Tensor, edges: tuple[Tensor, Tensor], is_mean: bool) -> Tensor:
    """[edges, bases]: the same side by side."""
    kind, weight = edges
    shares = comp.index_select(0, kind)
    return shares.mul_(weight.to(comp.dtype).unsqueeze(1)) if is_mean else shares


@meaning("basis_sums")
def _basis_sums_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x, comp = env[step["x"]], env[step["comp"]]
    kind, weight = env[step["relations"]].by_target
    sources, targets = ends(edges, x)
    shares = comp.index_select(0, kind)
    shares = shares * weight.to(comp.dtype).unsqueeze(1) if step.option("is_mean") else shares
    rows = (shares[:, :, None] * x.index_select(0, sources)[:, None]).flatten(1)
    return segment_sum(rows, targets, edges.pattern.num_rows)
