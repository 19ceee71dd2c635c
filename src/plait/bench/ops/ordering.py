"""Putting edges in order: sort, coalesce and transpose."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.ops.operation import FORWARD, GRAPH, Operation, Variant, Work
from plait.bench.ops.own import WHY_CPU

__all__ = ["OPERATIONS"]

_TAKES: Mapping[str, Any] = {k: v for k, v in GRAPH.items() if k != "width"}


def _keys(case: Case, draw: Draw) -> dict[str, Tensor]:
    return {"key": draw.edges()[1]}


def _edges(case: Case, draw: Draw) -> dict[str, Tensor]:
    source, target = draw.edges()
    return {"source": source, "target": target, "value": draw.normal(source.numel())}


def _repeated(case: Case, draw: Draw) -> dict[str, Tensor]:
    """Every edge `reduction` times over, in a random order."""
    source, target = draw.edges()
    distinct = max(1, source.numel() // (case.reduction or 1))
    pick = torch.arange(source.numel(), device=source.device) % distinct
    pick = pick[draw.permutation(pick.numel())]
    return {"source": source[pick], "target": target[pick], "value": draw.normal(source.numel())}


def _work(case: Case) -> Work:
    entry = case.index_bytes + (0 if case.op == "sort" else case.index_bytes + case.float_bytes)
    least = 2.0 * case.size("edges") * entry + (case.size("edges") * 8.0 if case.op == "sort" else 0.0)
    # a radix sort of the used bits passes over everything once per byte
    passes = max(1, (max(1, case.size("nodes")).bit_length() + 7) // 8)
    return Work(0.0, least, least * passes)


def _sorted_keys(out: Any, inputs: Inputs) -> tuple[Tensor, ...]:
    """The keys, and the keys the permutation leads to: both must be in order."""
    keys, order = out
    return keys, inputs["key"][order]


def _pyg_sort(inputs: Inputs) -> Callable[[], Any]:
    from torch_geometric.utils import index_sort

    key, most = inputs["key"], inputs.case.size("nodes")
    return lambda: index_sort(key, max_value=most)


def _numpy_sort(inputs: Inputs) -> Callable[[], Any]:
    key = inputs["key"].numpy()

    def call() -> tuple[Tensor, Tensor]:
        order = key.argsort(kind="stable")
        return torch.from_numpy(key[order]), torch.from_numpy(order)

    return call


def _size(inputs: Inputs) -> tuple[int, int]:
    return inputs.case.size("nodes"), inputs.case.size("nodes")


def _matrix(inputs: Inputs) -> Tensor:
    ends = torch.stack([inputs["target"], inputs["source"]]).long()
    return torch.sparse_coo_tensor(ends, inputs["value"], _size(inputs), check_invariants=False)


def _torch_coalesce(inputs: Inputs) -> Callable[[], Tensor]:
    matrix = _matrix(inputs)
    return lambda: matrix.coalesce()


def _pyg_coalesce(inputs: Inputs) -> Callable[[], Tensor]:
    from torch_geometric.utils import coalesce

    ends, value = torch.stack([inputs["target"], inputs["source"]]), inputs["value"]
    nodes = inputs.case.size("nodes")
    return lambda: coalesce(ends, value, num_nodes=nodes)


def _entries(out: Any, inputs: Inputs) -> tuple[Tensor, ...]:
    """(rows, columns, values) in the order of rows, then columns, repeats summed."""
    if isinstance(out, tuple):
        ends, value = out
        out = torch.sparse_coo_tensor(ends.long(), value, _size(inputs), check_invariants=False)
        if inputs.case.op == "coalesce":
            # what the variant calls coalesced must not hold a repeat: shapes are compared with the reference
            return ends[0], ends[1], value
    if out.layout != torch.sparse_coo:
        # a CSR matrix may hold repeats, and torch marks the COO made of it coalesced all the same
        whole = out.to_sparse_coo()
        out = torch.sparse_coo_tensor(whole._indices(), whole._values(), whole.shape, check_invariants=False)
    whole = out.coalesce()
    return whole.indices()[0], whole.indices()[1], whole.values()


def _torch_transpose(inputs: Inputs, layout: str) -> Callable[[], Tensor]:
    if layout == "coo":
        matrix = inputs.coo()
        return lambda: matrix.t().coalesce()
    csr = inputs.csr()

    def call() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return csr.t().to_sparse_csr()

    return call


def _pyg_transpose(inputs: Inputs) -> Callable[[], Any]:
    from torch_geometric.utils import sort_edge_index

    ends, value = torch.stack([inputs["source"], inputs["target"]]), inputs["value"]
    nodes = inputs.case.size("nodes")
    return lambda: sort_edge_index(ends, value, num_nodes=nodes)


def _own_transpose(inputs: Inputs) -> Callable[[], Any]:
    from plait.graph import Graph

    order, pointer = inputs.by_target
    pointer_array, indices = pointer.int().numpy(), inputs["source"][order].int().numpy()
    value = inputs["value"][order]

    def call() -> Any:
        # a fresh graph: a Graph keeps its transpose once it has been asked for
        graph = Graph.from_csr(pointer_array, indices, validate=False)
        back = graph.transpose
        moved = value if graph.order is None else value[torch.from_numpy(graph.order).long()]
        rows = torch.from_numpy(back.edge_rows())
        ends = torch.stack([rows, torch.from_numpy(back.indices)])
        return ends, moved[torch.from_numpy(graph.transpose_order).long()]

    return call


OPERATIONS = (
    Operation(
        name="sort",
        family="ordering",
        about="the targets of edges in order, and the order",
        takes={**_TAKES, "order": "random"},
        draw=_keys,
        variants=(
            Variant("torch", lambda t: lambda: torch.sort(t["key"]), directions=FORWARD),
            Variant("torch-stable", lambda t: lambda: torch.sort(t["key"], stable=True), directions=FORWARD),
            Variant("pyg", _pyg_sort, needs="torch_geometric", directions=FORWARD),
            Variant("numpy", _numpy_sort, devices=("cpu",), directions=FORWARD, why="numpy runs on the CPU"),
        ),
        work=_work,
        reference=lambda t: torch.sort(t["key"], stable=True),
        answer=_sorted_keys,
        has_sparse_path=False,
    ),
    Operation(
        name="coalesce",
        family="ordering",
        about="edges sorted, repeats summed",
        takes={**_TAKES, "order": "random", "reduction": None},
        draw=_repeated,
        variants=(
            Variant("torch", _torch_coalesce, directions=FORWARD),
            Variant("pyg", _pyg_coalesce, needs="torch_geometric", directions=FORWARD),
        ),
        work=_work,
        reference=lambda t: _matrix(t).coalesce(),
        answer=_entries,
        has_sparse_path=True,
    ),
    Operation(
        name="transpose",
        family="ordering",
        about="the matrix by columns: COO sorted again, CSR rebuilt",
        takes={**_TAKES, "sparsity": None},
        draw=_edges,
        variants=(
            Variant("torch-coo", functools.partial(_torch_transpose, layout="coo"), directions=FORWARD),
            Variant("torch-csr", functools.partial(_torch_transpose, layout="csr"), directions=FORWARD),
            Variant("pyg", _pyg_transpose, needs="torch_geometric", directions=FORWARD),
            Variant("plait", _own_transpose, devices=("cpu",), directions=FORWARD, why=WHY_CPU),
        ),
        work=_work,
        reference=lambda t: _matrix(t).t().coalesce(),
        answer=_entries,
        has_sparse_path=True,
    ),
)
