"""Relational layers under torch autograd: edges of several relations, each with its own weights.

All relations run together. A candidate is (collect, products, spread): a fixed sparse matrix that brings
source rows together, dense products by relation, a fixed sparse matrix that sums the results by target;
either sparse matrix may be absent. The gradient goes the same way back through the transposes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from plait.runtime.buffers import Buffers
from plait.runtime.orders import EdgeOrders
from plait.runtime.project import contiguous_rows, weight_gradient
from plait.runtime.segments import segment_sum
from plait.runtime.twice import added, differentiable

__all__ = ["FixedMatrix", "Product", "RelationalRun", "Relations", "relate", "relate_bases"]

Array = np.ndarray[Any, Any]


class FixedMatrix:
    """A sparse matrix that no gradient reaches, applied to rows or, transposed, to their gradients.

    Its non-zeros are ones, scaled by row or weighted by edge (in the order of the listed edges).
    """

    def __init__(self, graph: Graph, row_scale: Array | None = None, edge_weight: Array | None = None):
        self.orders = EdgeOrders(graph)
        self.rows, self.columns = graph.num_nodes, graph.num_sources
        self._row_scale = row_scale
        order = graph.order
        self._weight = edge_weight if edge_weight is None or order is None else edge_weight[order]
        self._cast: dict[tuple[str, torch.dtype], Tensor] = {}

    def _as(self, name: str, values: Array | None, dtype: torch.dtype) -> Tensor | None:
        if values is None:
            return None
        found = self._cast.get((name, dtype))
        if found is None:
            found = self._cast[name, dtype] = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
        return found

    @cached_property
    def _turned_weight(self) -> Array | None:
        return None if self._weight is None else self._weight[self.orders.order]

    def apply(
        self, x: Tensor, out: Tensor, addend: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """out = self @ x + addend + bias."""
        return sparse.spmm(
            self.orders.pattern, x, out, edge=self._as("edge", self._weight, x.dtype),
            target=self._as("row", self._row_scale, x.dtype), addend=addend, bias=bias,
        )  # fmt: skip

    def apply_transposed(self, x: Tensor, out: Tensor, addend: Tensor | None = None) -> Tensor:
        """out = self.T @ x + addend."""
        return sparse.spmm(
            self.orders.transpose, x, out, edge=self._as("turned", self._turned_weight, x.dtype),
            source=self._as("row", self._row_scale, x.dtype), addend=addend,
        )  # fmt: skip

    def in_torch(self, x: Tensor) -> Tensor:
        """self @ x, recorded by torch."""
        weight, scale = self._as("edge", self._weight, x.dtype), self._as("row", self._row_scale, x.dtype)
        rows = x.index_select(0, self.orders.sources)
        rows = rows if weight is None else rows * weight.unsqueeze(1)
        out = segment_sum(rows, self.orders.targets, self.rows)
        return out if scale is None else out * scale.unsqueeze(1)


class Relations:
    """The edges of one graph by relation, and every candidate's sparse matrices, made when first asked."""

    def __init__(
        self, source: Array, target: Array, kind: Array, num_targets: int, num_sources: int, count: int
    ):
        self.source, self.target, self.kind = (a.astype(np.int64) for a in (source, target, kind))
        self.num_targets, self.num_sources, self.count = num_targets, num_sources, count

    @cached_property
    def _mates(self) -> Array:
        """[targets * relations]: edges of one relation into one target."""
        return np.bincount(self.target * self.count + self.kind, minlength=self.num_targets * self.count)

    @cached_property
    def edge_weight(self) -> Array:
        """1 / (edges of its relation into its target): the mean's weight of every edge."""
        weight: Array = 1.0 / self._mates[self.target * self.count + self.kind]
        return weight

    @property
    def num_target_pairs(self) -> int:
        """(target, relation) pairs with edges."""
        return int(np.count_nonzero(self._mates))

    @cached_property
    def num_source_pairs(self) -> int:
        """(source, relation) pairs with edges."""
        return len(np.unique(self.source * self.count + self.kind))

    def stacked_targets(self, is_mean: bool) -> FixedMatrix:
        """[targets * relations, sources]: one row for each target and relation."""
        rows = self.num_targets * self.count
        graph = Graph.from_edge_index(
            self.source, self.target * self.count + self.kind, rows, self.num_sources
        )
        return FixedMatrix(graph, 1.0 / np.maximum(self._mates, 1) if is_mean else None)

    def stacked_sources(self, is_mean: bool) -> FixedMatrix:
        """[targets, sources * relations]: one column for each source and relation."""
        columns = self.num_sources * self.count
        graph = Graph.from_edge_index(
            self.source * self.count + self.kind, self.target, self.num_targets, columns
        )
        return FixedMatrix(graph, edge_weight=self.edge_weight if is_mean else None)

    def target_pairs(self, is_mean: bool) -> tuple[FixedMatrix, FixedMatrix, tuple[int, ...]]:
        """(collect, spread, bounds) with a row for each (relation, target) that has edges, by relation."""
        keys, pair = np.unique(self.kind * self.num_targets + self.target, return_inverse=True)
        target = keys % self.num_targets
        collect = Graph.from_edge_index(self.source, pair, len(keys), self.num_sources)
        spread = Graph.from_edge_index(np.arange(len(keys)), target, self.num_targets, len(keys))
        scale = 1.0 / np.bincount(pair, minlength=len(keys)) if is_mean else None
        return (
            FixedMatrix(collect, scale),
            FixedMatrix(spread),
            self._bounds(keys // max(1, self.num_targets)),
        )

    def source_pairs(self, is_mean: bool) -> tuple[FixedMatrix, FixedMatrix, tuple[int, ...]]:
        """(collect, spread, bounds) with a row for each (relation, source) that has edges, by relation."""
        keys, pair = np.unique(self.kind * self.num_sources + self.source, return_inverse=True)
        source = keys % self.num_sources
        collect = Graph.from_edge_index(source, np.arange(len(keys)), len(keys), self.num_sources)
        spread = Graph.from_edge_index(pair, self.target, self.num_targets, len(keys))
        weight = self.edge_weight if is_mean else None
        return (
            FixedMatrix(collect),
            FixedMatrix(spread, edge_weight=weight),
            self._bounds(keys // max(1, self.num_sources)),
        )

    def _bounds(self, kinds: Array) -> tuple[int, ...]:
        return tuple(int(b) for b in np.searchsorted(kinds, np.arange(self.count + 1)))

    @cached_property
    def plain(self) -> EdgeOrders:
        """The edges by target, whatever their relation."""
        graph = Graph.from_edge_index(self.source, self.target, self.num_targets, self.num_sources)
        return EdgeOrders(graph)

    @cached_property
    def by_target(self) -> tuple[Tensor, Tensor]:
        """(relation, mean's weight) of every edge in the order of `plain`."""
        order = self.plain.graph.order
        order = np.arange(len(self.kind)) if order is None else order
        return torch.from_numpy(self.kind[order]), torch.from_numpy(self.edge_weight[order])

    @cached_property
    def by_source(self) -> tuple[Tensor, Tensor]:
        """The same in the order of the transpose."""
        turn = torch.from_numpy(self.plain.order.astype(np.int64))
        return self.by_target[0][turn], self.by_target[1][turn]

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def get(
        self, choice: str, is_mean: bool
    ) -> tuple[FixedMatrix | None, FixedMatrix | None, tuple[int, ...]]:
        """(collect, spread, bounds of the relations' rows) of a candidate."""
        found = self._made.get((choice, is_mean))
        if found is None:
            if choice == "aggregate":
                found = self.stacked_targets(is_mean), None, ()
            elif choice == "transform":
                found = None, self.stacked_sources(is_mean), ()
            elif choice == "aggregate pairs":
                found = self.target_pairs(is_mean)
            else:
                found = self.source_pairs(is_mean)
            self._made[choice, is_mean] = found
        return found


@dataclass(frozen=True)
class Product:
    """z[rows, outer] (+)= h[rows, inner] @ w[weights]; the flags: the first to write there."""

    rows: slice
    inner: slice
    outer: slice
    weights: slice
    is_first_out: bool = True
    is_first_in: bool = True


@dataclass(frozen=True)
class RelationalRun:
    """One candidate on one graph; without products the rows given are summed as they are."""

    collect: FixedMatrix | None
    spread: FixedMatrix | None
    products: tuple[Product, ...]
    num_targets: int
    width: int
    inner: int  # columns of h as the products see it
    outer: int  # columns of z as the products see it
    buffers: Buffers


class _Relate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: RelationalRun,
        x: Tensor,
        own: Tensor | None,
        w: Tensor | None,
        root: Tensor | None,
        bias: Tensor | None,
        addend: Tensor | None,
    ) -> Tensor:
        buffers, given = run.buffers, (x, own)
        x = contiguous_rows(x, buffers)
        own = None if own is None else contiguous_rows(own, buffers)
        ctx.run, ctx.has_bias = run, bias is not None
        base = addend
        if root is not None:
            near = x if own is None else own
            base = buffers.take(run.num_targets, run.width, x.dtype)
            dense.gemm(near, root, base, addend=addend, bias=bias)
            bias = None
        h = _collected(run, x)
        if w is None:
            z = h
        elif run.spread is None:
            z = buffers.take(run.num_targets, run.width, x.dtype)
            _products(run, h, w, z, base, bias)
        else:
            z = _products(run, h, w, buffers.take(h.shape[0], run.outer, x.dtype), None, None)
        if run.spread is not None:
            out = buffers.take(run.num_targets, run.width, x.dtype)
            z = run.spread.apply(z.view(-1, run.width), out, base, bias)
        ctx.save_for_backward(*given, w, root, h if run.collect is not None else None)
        return z

    @staticmethod
    @differentiable(lambda *given: _relate_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: RelationalRun = ctx.run
        x, own, w, root, h = ctx.saved_tensors
        buffers = run.buffers
        x, grad = contiguous_rows(x, buffers), contiguous_rows(grad, buffers)
        own = None if own is None else contiguous_rows(own, buffers)
        _, wants_x, wants_own, wants_w, wants_root, wants_bias, wants_addend = ctx.needs_input_grad
        h = x if h is None else h
        to_z = grad
        if run.spread is not None:
            to_z = run.spread.apply_transposed(grad, buffers.take(run.spread.columns, run.width, x.dtype))
            to_z = to_z.view(h.shape[0], h.shape[1] if w is None else run.outer)
        to_w = None
        if w is not None and wants_w:
            to_w = torch.empty_like(w)
            for p in run.products:
                to_w[p.weights] = weight_gradient(h[p.rows, p.inner], to_z[p.rows, p.outer])
        is_joint = root is not None and own is None
        to_root = (
            weight_gradient(x if own is None else own, grad) if root is not None and wants_root else None
        )
        to_own = None
        if own is not None and root is not None and wants_own:
            to_own = dense.gemm(grad, root.t(), buffers.take(own.shape[0], own.shape[1], x.dtype))
        to_x = None
        if wants_x:
            near = None
            if is_joint:
                near = dense.gemm(grad, root.t(), buffers.take(x.shape[0], x.shape[1], x.dtype))
            to_x = _input_gradient(run, to_z, w, near, x)
        to_bias = dense.column_sums(grad) if ctx.has_bias and wants_bias else None
        return None, to_x, to_own, to_w, to_root, to_bias, grad if wants_addend else None


def _relate_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    run: RelationalRun = ctx.run
    x, own, w, root, _ = saved
    bias = added(grad.shape[1:], grad) if ctx.has_bias else None
    addend = added(grad.shape, grad) if ctx.needs_input_grad[6] else None
    z = x if run.collect is None else run.collect.in_torch(x).view(-1, run.inner)
    if w is not None:
        shape = (len(grad), run.width) if run.spread is None else (z.shape[0], run.outer)
        z = sum(
            (_placed(z[p.rows, p.inner] @ w[p.weights], p, shape) for p in run.products), z.new_zeros(shape)
        )
    if run.spread is not None:
        z = run.spread.in_torch(z.view(-1, run.width))
    terms = (None if root is None else (x if own is None else own) @ root, addend, bias)
    for term in terms:
        z = z if term is None else z + term
    return z, (None, x, own, w, root, bias, addend)


def _placed(part: Tensor, p: Product, shape: tuple[int, int]) -> Tensor:
    """A product where it belongs, zeros elsewhere."""
    (top, bottom, _), (left, right, _) = p.rows.indices(shape[0]), p.outer.indices(shape[1])
    return pad(part, (left, shape[1] - right, top, shape[0] - bottom))


def _collected(run: RelationalRun, x: Tensor) -> Tensor:
    if run.collect is None:
        return x
    rows = run.collect.apply(x, run.buffers.take(run.collect.rows, x.shape[1], x.dtype))
    return rows.view(-1, run.inner)


def _products(
    run: RelationalRun, h: Tensor, w: Tensor, z: Tensor, base: Tensor | None, bias: Tensor | None
) -> Tensor:
    for p in run.products:
        to = z[p.rows, p.outer]
        first = None if base is None else base[p.rows, p.outer]
        dense.gemm(
            h[p.rows, p.inner], w[p.weights], to, addend=first if p.is_first_out else to,
            bias=bias[p.outer] if bias is not None and p.is_first_out else None,
        )  # fmt: skip
    return z


def _input_gradient(
    run: RelationalRun, to_z: Tensor, w: Tensor | None, near: Tensor | None, x: Tensor
) -> Tensor:
    buffers = run.buffers
    if w is None:
        return to_z
    rows = to_z.shape[0]
    is_plain = run.collect is None
    to_h = near if is_plain and near is not None else buffers.take(rows, run.inner, x.dtype)
    for p in run.products:
        to = to_h[p.rows, p.inner]
        is_added = not p.is_first_in or (is_plain and near is not None)
        dense.gemm(to_z[p.rows, p.outer], w[p.weights].t(), to, addend=to if is_added else None)
    if run.collect is None:
        return to_h
    to_x = near if near is not None else buffers.take(x.shape[0], x.shape[1], x.dtype)
    return run.collect.apply_transposed(to_h.view(-1, x.shape[1]), to_x, near)


def relate(
    run: RelationalRun,
    x: Tensor,
    own: Tensor | None,
    w: Tensor | None,
    *,
    root: Tensor | None = None,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    """spread @ products(collect @ x) + own @ root + addend + bias; own is x where not given.

    w holds the products' weights below one another; a product of all relations has them side by side.
    """
    return _Relate.apply(run, x, own, w, root, bias, addend)  # type: ignore[no-any-return, no-untyped-call]


# Bases -----------------------------------------------------------------------------------------------------


class _Bases(torch.autograd.Function):
    """Rows aggregated once for every basis, weighted by the relation's share of it, then one product."""

    @staticmethod
    def forward(
        ctx: Any, relations: Relations, is_mean: bool, buffers: Buffers, x: Tensor, comp: Tensor, w: Tensor
    ) -> Tensor:
        given, x = x, contiguous_rows(x, buffers)
        inner = x.shape[1]
        mixed = buffers.take(relations.num_targets, comp.shape[1] * inner, x.dtype)
        for b, shares in enumerate(_shares(comp, *relations.by_target, is_mean)):
            sparse.spmm(relations.plain.pattern, x, mixed[:, b * inner : (b + 1) * inner], edge=shares)
        ctx.relations, ctx.is_mean, ctx.buffers = relations, is_mean, buffers
        ctx.save_for_backward(given, comp, w, mixed)
        return dense.gemm(mixed, w, buffers.take(relations.num_targets, w.shape[1], x.dtype))

    @staticmethod
    @differentiable(lambda *given: _bases_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        relations: Relations = ctx.relations
        buffers: Buffers = ctx.buffers
        x, comp, w, mixed = ctx.saved_tensors
        _, _, _, wants_x, wants_comp, wants_w = ctx.needs_input_grad
        x, grad = contiguous_rows(x, buffers), contiguous_rows(grad, buffers)
        to_w = weight_gradient(mixed, grad) if wants_w else None
        to_mixed = dense.gemm(grad, w.t(), buffers.take(mixed.shape[0], mixed.shape[1], x.dtype))
        parts = torch.split(to_mixed, x.shape[1], dim=1)
        to_x = None
        if wants_x:
            to_x = buffers.take(x.shape[0], x.shape[1], x.dtype)
            for b, shares in enumerate(_shares(comp, *relations.by_source, ctx.is_mean)):
                turned = relations.plain.transpose
                sparse.spmm(turned, parts[b], to_x, edge=shares, addend=to_x if b else None)
        to_comp = _share_gradient(relations, ctx.is_mean, x, parts) if wants_comp else None
        return None, None, None, to_x, to_comp, to_w


def _shares(comp: Tensor, kind: Tensor, weight: Tensor, is_mean: bool) -> list[Tensor]:
    """For every basis, the weight of each edge: its relation's share of it, over the mean's count."""
    scale = weight.to(comp.dtype) if is_mean else None
    found = [column[kind] for column in comp.t().contiguous()]
    return found if scale is None else [share.mul_(scale) for share in found]


def _share_gradient(relations: Relations, is_mean: bool, x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """[relations, bases]: sums over a relation's edges of x[j] . gradient[i]."""
    kind, weight = relations.by_target
    columns = []
    for part in parts:
        dots = torch.empty(len(kind), dtype=x.dtype)
        sparse.weight_gradient(relations.plain.pattern, x, part, dots)
        worth = (dots * weight if is_mean else dots).numpy()
        columns.append(np.bincount(kind.numpy(), weights=worth, minlength=relations.count))
    return torch.from_numpy(np.stack(columns, axis=1)).to(x.dtype)


def _bases_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    x, comp, w, _ = saved
    orders: EdgeOrders = ctx.relations.plain
    kind, weight = ctx.relations.by_target
    shares = comp.index_select(0, kind)
    shares = shares * weight.to(comp.dtype).unsqueeze(1) if ctx.is_mean else shares
    rows = (shares[:, :, None] * x.index_select(0, orders.sources)[:, None]).flatten(1)
    return segment_sum(rows, orders.targets, len(grad)) @ w, (None, None, None, x, comp, w)


def relate_bases(
    relations: Relations, is_mean: bool, buffers: Buffers, x: Tensor, comp: Tensor, w: Tensor
) -> Tensor:
    """sum over bases b of (sum over edges of comp[relation, b] x[j]) @ w_b; w is [bases * in, out]."""
    return _Bases.apply(relations, is_mean, buffers, x, comp, w)  # type: ignore[no-any-return, no-untyped-call]
