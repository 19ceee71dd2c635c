"""Relational layers on a GPU: a graph's edges by relation made there, and the kernels of their products."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.cuda import whole_rows
from plait.runtime.placed import PlacedGraph
from plait.runtime.relational import Relations, shares_of

if TYPE_CHECKING:
    from plait.kernels.csr.gpu import Rows
    from plait.kernels.gemm.gpu import GroupedRows

__all__ = ["PlacedRelations"]


class PlacedRelations(Relations):
    """The edges of a placed graph by relation; making them reads a few numbers from the device."""

    def _pattern(self, column: Tensor, row: Tensor, rows: int, columns: int) -> PlacedGraph:
        graph = PlacedGraph.of(torch.stack([column, row]), rows, columns)
        graph.is_read = True
        return graph

    def _group(self, bounds: tuple[int, ...]) -> GroupedRows:
        from plait.kernels.gemm.gpu import GroupedRows  # here: it needs triton

        return GroupedRows(bounds, self.kind.device)

    @cached_property
    def by_relation(self) -> Rows:
        """[relations, edges]: a one for each edge, numbered by target, in its relation's row."""
        edges = torch.arange(self.kind.numel(), device=self.kind.device)
        return self._pattern(edges, self.by_target[0], self.count, self.kind.numel()).rows


# Products by relation -------------------------------------------------------------------------------------


class _Relate:
    """The shape of a step's products: [relations, blocks] of inner x width."""

    def __init__(self, b: Binding, step: Step):
        self.layout, self.relations, self.blocks = (
            step.option(name) for name in ("layout", "relations", "blocks")
        )
        self.inner, self.width = step.option("inner"), step.option("width")
        name = step.get("groups")
        self.groups: GroupedRows | None = None if name is None else b.constant(name)

    def weights(self, w: Tensor) -> Tensor:
        """[relations, blocks, inner, width]."""
        return w.reshape(self.relations, self.blocks, self.inner, self.width)

    def parts(self, rows: Tensor, is_outer: bool) -> Tensor:
        """Rows by what their columns belong to: [rows, relations or 1, blocks, columns]."""
        has_relations = self.layout == ("outer" if is_outer else "inner")
        columns = self.width if is_outer else self.inner
        return rows.reshape(rows.shape[0], self.relations if has_relations else 1, self.blocks, columns)


def _by_groups(of: _Relate, groups: GroupedRows, is_back: bool, x: Tensor, w: Tensor, out: Tensor) -> None:
    """Products of groups of rows: one launch; in float64, which checks rather than trains, one for each."""
    if x.dtype != torch.float64:
        from plait.kernels.gemm import gpu

        gpu.grouped(groups, groups.pieces_of(gpu.ROWS), whole_rows(x), w, out, of.blocks, is_back)
        return
    weights = of.weights(w)
    for r in range(of.relations):
        rows = slice(groups.bounds[r], groups.bounds[r + 1])
        part = x[rows].reshape(rows.stop - rows.start, of.blocks, of.width if is_back else of.inner)
        equation = "nbo,bio->nbi" if is_back else "nbi,bio->nbo"
        out[rows] = torch.einsum(equation, part, weights[r]).flatten(1)


# (layout, transposed): n rows, r relations, b blocks, i and o columns; q is one
_PRODUCTS = {
    ("inner", False): "nrbi,rbio->nbo", ("outer", False): "nqbi,rbio->nrbo",
    ("inner", True): "nqbo,rbio->nrbi", ("outer", True): "nrbo,rbio->nbi",
}  # fmt: skip


@kernel("relate", "cuda", "triton")
def _relate(b: Binding, step: Step, owns: bool) -> Bound:
    of, names, is_back = _Relate(b, step), dict(step.reads), step.is_transposed
    x_name, w_name, addend, bias = names["x"], names["w"], names.get("addend", ""), names.get("bias", "")
    columns = int(b.program.shapes[step.out][1])
    equation = _PRODUCTS.get((of.layout, is_back), "")

    def run(env: Env) -> Tensor:
        x, w = env[x_name], env[w_name]
        if of.groups is not None:
            out = b.room(env, step.out, x.shape[0], columns, x)
            _by_groups(of, of.groups, is_back, x, w, out)
        else:
            out = torch.einsum(equation, of.parts(x, is_back), of.weights(w)).reshape(x.shape[0], columns)
        if addend:
            out = out + env[addend]
        return out if not bias else out + env[bias]

    return run


@kernel("relate_weights", "cuda", "triton")
def _relate_weights(b: Binding, step: Step, owns: bool) -> Bound:
    of, left, right = _Relate(b, step), step["left"], step["right"]

    def run(env: Env) -> Tensor:
        h, grad = env[left], env[right]
        if of.groups is None:
            equation = "nrbi,nqbo->rbio" if of.layout == "inner" else "nqbi,nrbo->rbio"
            made = torch.einsum(equation, of.parts(h, False), of.parts(grad, True))
            return made.reshape(-1, of.width)
        if h.dtype != torch.float64:
            from plait.kernels.gemm import gpu

            chunk = gpu.chunk_of(of.groups, of.blocks, of.inner, of.width)
            pieces = of.groups.pieces_of(chunk)
            return gpu.grouped_weights(of.groups, pieces, whole_rows(h), whole_rows(grad), of.blocks)
        bounds, parts = of.groups.bounds, []
        for first, last in itertools.pairwise(bounds):
            ends = (rows[first:last].unflatten(1, (of.blocks, -1)) for rows in (h, grad))
            parts.append(torch.einsum("nbi,nbo->bio", *ends).reshape(-1, of.width))
        return torch.cat(parts)

    return run


# Bases ----------------------------------------------------------------------------------------------------


@kernel("basis_sums", "cuda", "triton")
def _basis_sums(b: Binding, step: Step, owns: bool) -> Bound:
    """Rows aggregated once for all bases, side by side, weighted by the relation's share of each."""
    from plait.kernels.attention import gpu_pieces as gpu  # here: it needs triton

    relations, rows = b.constant(step["relations"]), b.orders.pattern
    x_name, comp, is_mean, bases = step["x"], step["comp"], step.option("is_mean"), step.option("bases")

    def run(env: Env) -> Tensor:
        x = whole_rows(env[x_name])
        out = b.room(env, step.out, rows.num_rows, bases * x.shape[1], x)
        shares = shares_of(env[comp], relations.by_target, is_mean)
        return gpu.edge_sums(rows, None, shares, x, bases, out, far_is_shared=True)

    return run


@kernel("basis_sources", "cuda", "triton")
def _basis_sources(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.attention import gpu_pieces as gpu

    relations, turned, addend = b.constant(step["relations"]), b.orders.transpose, step.get("addend")
    by_source, comp, grad = relations.by_source(b.orders), step["comp"], step["grad"]
    width, is_mean = int(b.program.shapes[step.out][1]), step.option("is_mean")

    def run(env: Env) -> Tensor:
        rows = whole_rows(env[grad])
        out = b.take(turned.num_rows, width, rows.dtype)
        shares = shares_of(env[comp], by_source, is_mean)
        gpu.edge_sums(turned, None, shares, rows, shares.shape[1], out, out_is_shared=True)
        return out if addend is None else out.add_(env[addend])

    return run


@kernel("basis_shares", "cuda", "triton")
def _basis_shares(b: Binding, step: Step, owns: bool) -> Bound:
    """[relations, bases]: sums over a relation's edges of x[j] . gradient[i]."""
    from plait.kernels.attention import gpu_pieces as gpu
    from plait.kernels.spmm import gpu as sparse

    relations, targets = b.constant(step["relations"]), b.orders.targets
    sources = cast(Tensor, b.orders.pattern.indices)
    x_name, grad, is_mean, bases = step["x"], step["grad"], step.option("is_mean"), step.option("bases")

    def run(env: Env) -> Tensor:
        x, to_out = whole_rows(env[x_name]), whole_rows(env[grad])
        dots = gpu.edge_dots(targets, sources, to_out, x, bases, is_shared=True)
        if is_mean:
            dots *= relations.by_target[1].to(dots.dtype).unsqueeze(1)
        out = dots.new_empty((relations.count, dots.shape[1]))
        return sparse.spmm(relations.by_relation, dots, out)[:, :bases]

    return run
