"""PyG as users run it: with its defaults, normalised once, on torch CSR, on EdgeIndex, compiled."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plait.bench.cases import ATTENTION, LEARNED
from plait.bench.peers.runner import Runner, SameAs, Unavailable, named_gradients
from plait.bench.problem import Problem
from plait.kernels.csr.coalesced import torch_csr
from plait.measure.device import free_bytes

__all__ = ["cached_edge_index", "compiled", "csr", "csr_matrix", "default", "in_double", "normalised_once"]

# Tensors of edges x width alive at once in PyG's gather and scatter, seen in its code; max keeps masks too.
_COPIES = {"inference": 3, "training": 5}
_COPIES_MAX = {"inference": 3, "training": 8}
# Edges x width up to which torch's own CSR kernels are given int32. With 24.6 M x 64 the gradient of a mean
# is wrong by a factor of 90 (torch 2.13), with int64 it is right.
_MOST_IN_INT32 = 1 << 30


def default(problem: Problem, mode: str) -> Runner:
    """The layer as constructed, on edge_index: degrees are counted and edges scaled on every call."""
    _require_memory(problem, mode)
    layer = copy.deepcopy(problem.layer)
    arguments = (problem.edge_index, *problem.extra)
    return _runner(layer, lambda x: layer(x, *arguments))


def in_double(problem: Problem, mode: str) -> Runner:
    """The layer as constructed, computing in float64: what float32 answers in dispute are held against."""
    _require_memory(problem, mode, 8)
    layer = copy.deepcopy(problem.layer).double()
    arguments = (problem.edge_index, *problem.extra)
    return _runner(layer, lambda x: layer(x.double(), *arguments))


def normalised_once(problem: Problem, mode: str) -> Runner:
    """The layer on edge_index with weights computed beforehand and normalize=False, or loops added once."""
    if not problem.is_normalised and not problem.has_own_loops:
        raise SameAs("pyg-default")
    _require_memory(problem, mode)
    arguments = _arguments(problem)
    layer = _prepared_once(problem)
    return _runner(layer, lambda x: layer(x, *arguments))


def csr(problem: Problem, mode: str) -> Runner:
    """The layer on the transposed adjacency as a torch CSR matrix, weights inside."""
    if problem.kind in (*ATTENTION, *LEARNED):
        raise Unavailable("messages of its own: gathers every edge on torch CSR too")
    layer = _prepared_once(problem)
    # means and maxima are of edges, and torch's own kernels compute them; sums go to MKL
    counts_edges = problem.kind in ("sage-mean", "sage-max")
    numbers = problem.edge_index.shape[1] * max(problem.width_in, problem.width_out)
    index = torch.int64 if counts_edges and numbers > _MOST_IN_INT32 else torch.int32
    key = ("csr", problem.is_normalised, problem.kind == "tag", counts_edges, index)
    matrix = problem.forms.once(
        key, lambda: csr_matrix(*_weighted(problem), problem.num_nodes, index, keeps_repeats=counts_edges)
    )
    return _runner(layer, lambda x: layer(x, matrix))


def cached_edge_index(problem: Problem, mode: str) -> Runner:
    """The layer on a sorted EdgeIndex, caches filled; PyG fuses it only where edges have no weight."""
    if problem.kind in (*ATTENTION, *LEARNED):
        raise Unavailable("messages of its own: gathers every edge on EdgeIndex too")
    if problem.is_normalised:
        raise Unavailable("EdgeIndex with edge weights runs as edge_index does")
    if problem.kind == "sage-max" and mode == "training":
        raise Unavailable("EdgeIndex has no max with a gradient; runs as edge_index does")
    from torch_geometric import EdgeIndex

    layer = copy.deepcopy(problem.layer)
    nodes = problem.num_nodes

    def by_target() -> Any:
        edges = EdgeIndex(
            problem.edge_index, sparse_size=(nodes, nodes), is_undirected=problem.forms.is_symmetric
        )
        return edges.sort_by("col").values.fill_cache_()

    edges = problem.forms.once("EdgeIndex", by_target)
    return _runner(layer, lambda x: layer(x, edges))


def compiled(problem: Problem, mode: str) -> Runner:
    """The layer normalised or its loops added once, under torch.compile for these shapes.

    Its first call compiles (10 s and more), so it is made here: preparation, stated apart from the step.
    """
    _require_memory(problem, mode)
    _require_compiler()
    torch._dynamo.reset()
    layer = _prepared_once(problem)
    arguments = _arguments(problem)
    fast: Any = torch.compile(layer, dynamic=False)
    runner = _runner(layer, lambda x: fast(x, *arguments))
    if mode == "inference":
        runner.inference(problem.x)()
    else:
        runner.training(problem.x, problem.cotangent)()
        problem.x.grad = None
    return runner


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise Unavailable("torch.compile needs a C++ compiler and found none; install g++") from None


def csr_matrix(
    edge_index: Tensor,
    weight: Tensor | None,
    num_nodes: int,
    index: torch.dtype = torch.int32,
    keeps_repeats: bool = False,
) -> Tensor:
    """[nodes, nodes] torch CSR with row = target, repeated edges added up: MKL may crash on them.

    Indices are int32 unless asked otherwise: torch's MKL converts int64 on every call.
    """
    source, target = edge_index
    order = torch.argsort(target * num_nodes + source)
    pointer = torch.zeros(num_nodes + 1, dtype=torch.int64, device=target.device)
    pointer[1:] = torch.bincount(target, minlength=num_nodes).cumsum(0)
    values = torch.ones(order.numel(), device=target.device) if weight is None else weight[order]
    pointer, columns = pointer.to(index), source[order].to(index)
    if not keeps_repeats and target.is_cpu:  # cuSPARSE takes them as they come
        return torch_csr(pointer.numpy(), columns.numpy(), values, num_nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "CSR support is in beta state"
        return torch.sparse_csr_tensor(
            pointer, columns, values, (num_nodes, num_nodes), check_invariants=False
        )


class _Simple(nn.Module):
    """SGConv without its per-call normalisation, which has no switch: the same propagate, the same lin."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        for _ in range(self.layer.K):
            x = self.layer.propagate(edge_index, x=x, edge_weight=weight)
        out: Tensor = self.layer.lin(x)
        return out


def _arguments(problem: Problem) -> tuple[Tensor, ...]:
    """What a layer made by _prepared_once takes after x."""
    if problem.has_own_loops:
        return (problem.forms.with_loops(),)
    return problem.normalised if problem.is_normalised else (problem.edge_index, *problem.extra)


def _weighted(problem: Problem) -> tuple[Tensor, Tensor | None]:
    return problem.normalised if problem.is_normalised else (problem.edge_index, None)


def _prepared_once(problem: Problem) -> nn.Module:
    """A copy of the layer that trusts the weights and loops it is given."""
    layer: Any = copy.deepcopy(problem.layer)
    if problem.kind == "sgc":
        return _Simple(layer)
    if problem.is_normalised:
        layer.normalize = False
    if problem.has_own_loops:
        layer.add_self_loops = False
    return layer  # type: ignore[no-any-return]


def _runner(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Runner:
    inner = layer.layer if isinstance(layer, _Simple) else layer
    return Runner(forward, tuple(inner.parameters()), named_gradients(inner))


def _require_memory(problem: Problem, mode: str, float_bytes: int = 4) -> None:
    copies = (_COPIES_MAX if problem.kind == "sage-max" else _COPIES)[mode]
    needed = copies * float_bytes * problem.edge_index.shape[1] * problem.gathered_width
    free = free_bytes(problem.edge_index.device.type)
    if free is not None and needed > 0.8 * free:
        raise Unavailable(
            f"gathering every edge needs about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
        )
