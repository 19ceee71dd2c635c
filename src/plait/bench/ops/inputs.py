"""The tensors of one case, drawn on its device from a fixed seed, and what variants share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait.bench.ops.case import Case

__all__ = ["Draw", "Inputs"]

T = TypeVar("T")
# Sources of clustered edges lie this near their targets: rows that fit a first-level cache at small widths.
_NEAR = 128


class Draw:
    """Draws values and edges of a case; the same case gives the same tensors."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = torch.device(case.device)
        self.dtype: torch.dtype = getattr(torch, case.dtype or "float32")
        self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """Normal values; the case's share of them is set to zero."""
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        zeros = self.case.value_sparsity
        if zeros:
            chance = torch.rand(shape, generator=self.generator, device=self.device)
            drawn.masked_fill_(chance < zeros, 0.0)
        return drawn.to(self.dtype)

    def near_one(self, *shape: int) -> Tensor:
        """Values whose products neither vanish nor overflow."""
        drawn = torch.rand(shape, generator=self.generator, device=self.device)
        return (0.99 + 0.02 * drawn).to(self.dtype)

    def below(self, bound: int, *shape: int) -> Tensor:
        """Uniform indices."""
        drawn = torch.randint(bound, shape, generator=self.generator, device=self.device)
        return drawn.to(getattr(torch, self.case.index_dtype or "int64"))

    def permutation(self, count: int) -> Tensor:
        """0 .. count - 1 in a random order."""
        return torch.randperm(count, generator=self.generator, device=self.device)

    def edges(self) -> tuple[Tensor, Tensor]:
        """(source, target) of the case's edges, in its order and index dtype."""
        case = self.case
        if case.graph is not None:
            source, target = _file_edges(case.graph)
            source, target = source.to(self.device), target.to(self.device)
        elif case.sparsity is not None:
            return self._typed(*self._square(case.size("nodes"), 1.0 - case.sparsity))
        else:
            source, target = self._drawn_edges(case.size("edges"), case.size("nodes"))
        if case.reduction:
            target = target % case.rows_out
        if case.order == "random":
            mixed = self.permutation(target.numel())
        else:
            mixed = torch.argsort(target, stable=True)
        return self._typed(source[mixed], target[mixed])

    def _typed(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        dtype = getattr(torch, self.case.index_dtype or "int64")
        return source.to(dtype), target.to(dtype)

    def _drawn_edges(self, edges: int, nodes: int) -> tuple[Tensor, Tensor]:
        case = self.case
        if case.law == "powerlaw":
            names = self.permutation(nodes)
            source, target = (names[self._ranks(edges, nodes)] for _ in range(2))
        else:
            source, target = (self.below(nodes, edges).long() for _ in range(2))
        if case.law == "regular":
            target = torch.arange(edges, device=self.device) * nodes // edges
        if case.order == "clustered":
            away = torch.randint(-_NEAR, _NEAR + 1, (edges,), generator=self.generator, device=self.device)
            source = (target + away) % nodes
        return source, target

    def _ranks(self, edges: int, nodes: int) -> Tensor:
        """Ranks whose frequencies fall as rank ** (-1 / (exponent - 1)): degrees follow the exponent."""
        exponent = self.case.exponent or 2.5
        draw = torch.rand(edges, generator=self.generator, device=self.device, dtype=torch.float64)
        power = (exponent - 1.0) / (exponent - 2.0)
        return (nodes * draw**power).long().clamp_(max=nodes - 1)

    def _square(self, nodes: int, density: float) -> tuple[Tensor, Tensor]:
        """Positions of a square matrix, each filled with the same chance; none is repeated."""
        filled = torch.rand(nodes, nodes, generator=self.generator, device=self.device) < density
        target, source = filled.nonzero(as_tuple=True)
        return source, target


def _file_edges(name: str) -> tuple[Tensor, Tensor]:
    from plait.bench.cases import find_graph

    graph = find_graph(name).graph
    target = torch.from_numpy(graph.edge_rows().astype("int64"))
    return torch.from_numpy(graph.indices.astype("int64")), target


class Inputs:
    """Named tensors of a case; `leaves` names those gradients are taken of."""

    def __init__(self, case: Case, tensors: Mapping[str, Tensor], leaves: tuple[str, ...]) -> None:
        self.case = case
        self.tensors = dict(tensors)
        self.leaves = leaves
        self._made: dict[Hashable, Any] = {}
        for name in leaves:
            self.tensors[name].requires_grad_(case.direction != "forward")

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def double(self) -> Inputs:
        """The same values in float64: what the reference is computed from."""
        wide = {
            name: tensor.detach().double() if tensor.is_floating_point() else tensor
            for name, tensor in self.tensors.items()
        }
        return Inputs(self.case, wide, self.leaves)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned the first time: what a user prepares once, off the clock."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def by_target(self) -> tuple[Tensor, Tensor]:
        """(order, pointer): edges sorted by target, and where each target's edges begin."""

        def make() -> tuple[Tensor, Tensor]:
            return _grouped(self["target"], self.case.rows_out)

        return self.once("by_target", make)

    def csr(self, index_dtype: torch.dtype | None = None) -> Tensor:
        """[targets, sources] torch CSR matrix, edges summed where they repeat: MKL may crash on others."""

        def make() -> Tensor:
            whole = self.coo()
            pointer = torch.zeros(self.case.rows_out + 1, dtype=torch.int64, device=whole.device)
            pointer[1:] = torch.bincount(whole.indices()[0], minlength=self.case.rows_out).cumsum(0)
            dtype = self["source"].dtype if index_dtype is None else index_dtype
            return _csr_tensor(pointer.to(dtype), whole.indices()[1].to(dtype), whole.values(), whole.shape)

        return self.once(("csr", index_dtype), make)

    def edges_csr(self) -> Tensor:
        """The same with an entry for each edge: for torch's own kernels, which count or return the edges."""

        def make() -> Tensor:
            order, pointer = self.by_target
            source = self["source"][order]
            shape = (self.case.rows_out, self.case.size("nodes"))
            return _csr_tensor(pointer.to(source.dtype), source, self["value"].detach()[order], shape)

        return self.once("edges_csr", make)

    def coo(self) -> Tensor:
        """[targets, sources] torch COO matrix, its edges summed where they repeat."""

        def make() -> Tensor:
            ends = torch.stack([self["target"], self["source"]]).long()
            shape = (self.case.rows_out, self.case.size("nodes"))
            return torch.sparse_coo_tensor(
                ends, self["value"].detach(), shape, check_invariants=False
            ).coalesce()

        return self.once("coo", make)


def _csr_tensor(pointer: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "CSR support is in beta state"
        return torch.sparse_csr_tensor(pointer, columns, values, shape, check_invariants=False)


def _grouped(ends: Tensor, count: int) -> tuple[Tensor, Tensor]:
    order = torch.argsort(ends, stable=True)
    pointer = torch.zeros(count + 1, dtype=torch.int64, device=ends.device)
    pointer[1:] = torch.bincount(ends.long(), minlength=count).cumsum(0)
    return order, pointer
