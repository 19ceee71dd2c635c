"""Reading rows: index_select, gather with an index per element, and the rows of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.ops.operation import FORWARD, GRAPH, Operation, Unsupported, Variant, Work
from plait.bench.ops.own import forward_variant

__all__ = ["OPERATIONS"]


def _rows(case: Case, draw: Draw) -> dict[str, Tensor]:
    nodes, width = case.size("nodes"), case.size("width")
    source, target = draw.edges()
    x = draw.normal(nodes, width) if not case.axis else draw.normal(width, nodes)
    # sorted: rows are read from the first to the last; else as an edge list's sources lie
    index = target if case.order == "sorted" else source
    return {"x": x, "index": index % case.rows_out if case.reduction else index}


def _element_index(case: Case, draw: Draw) -> dict[str, Tensor]:
    nodes, width, edges = case.size("nodes"), case.size("width"), case.size("edges")
    shape = (width, nodes) if case.axis else (nodes, width)
    index = draw.below(case.rows_out, *((width, edges) if case.axis else (edges, width)))
    return {"x": draw.normal(*shape), "index": index}


def _batch_rows(case: Case, draw: Draw) -> dict[str, Tensor]:
    nodes = case.size("nodes")
    picked = draw.permutation(nodes)[: min(nodes, case.size("batch"))]
    return {"x": draw.normal(nodes, case.size("width")), "index": picked}


def _work(case: Case) -> Work:
    moved = case.size("edges") * case.size("width") * case.float_bytes
    once = min(case.size("nodes"), case.size("edges")) * case.size("width") * case.float_bytes
    index = case.size("edges") * case.index_bytes
    return Work(0.0, once + moved + index, 2.0 * moved + index)


def _element_work(case: Case) -> Work:
    count = case.size("edges") * case.size("width")
    once = min(case.size("nodes") * case.size("width"), count) * case.float_bytes
    return Work(0.0, once + count * (case.float_bytes + case.index_bytes), count * (64.0 + case.index_bytes))


def _batch_work(case: Case) -> Work:
    moved = 2.0 * case.size("batch") * case.size("width") * case.float_bytes + case.size("batch") * 8
    return Work(0.0, moved, moved)


def _select(inputs: Inputs) -> Tensor:
    return inputs["x"].index_select(inputs.case.axis or 0, inputs["index"])


def _bracket(inputs: Inputs) -> Callable[[], Tensor]:
    x, index, axis = inputs["x"], inputs["index"], inputs.case.axis
    return (lambda: x[:, index]) if axis else (lambda: x[index])


def _gathered(inputs: Inputs) -> Tensor:
    return torch.gather(inputs["x"], inputs.case.axis or 0, inputs["index"].long())


def _torch_gather(inputs: Inputs) -> Callable[[], Tensor]:
    if inputs["index"].dtype != torch.int64:
        raise Unsupported("torch.gather takes int64 indices only")
    return lambda: _gathered(inputs)


def _own(inputs: Inputs) -> Callable[[], Tensor]:
    from plait.features.rows import gather

    if inputs.case.axis:
        raise Unsupported("plait gathers rows, not columns")
    if inputs["x"].dtype == torch.bfloat16:
        raise Unsupported("numpy has no bfloat16")
    rows, index = inputs["x"].detach().numpy(), inputs["index"].numpy()

    def call() -> Tensor:
        out = torch.empty((index.size, rows.shape[1]), dtype=inputs["x"].dtype)
        gather(rows, index, out.numpy())
        return out

    return call


def _numpy_take(inputs: Inputs) -> Callable[[], Tensor]:
    rows, index = inputs["x"].numpy(), inputs["index"].numpy()
    return lambda: torch.from_numpy(rows.take(index, axis=0))


_OWN = forward_variant(_own)
_TAKES: Mapping[str, Any] = {**GRAPH, "order": "random", "axis": None, "value_sparsity": None}

OPERATIONS = (
    Operation(
        name="index_select",
        family="gather",
        about="one row of x per edge",
        takes={**_TAKES, "reduction": None},
        draw=_rows,
        variants=(
            Variant("torch", lambda inputs: lambda: _select(inputs)),
            Variant("brackets", _bracket),
            _OWN,
        ),
        work=_work,
        reference=_select,
        leaves=("x",),
        has_sparse_path=False,
    ),
    Operation(
        name="gather",
        family="gather",
        about="one value of x per element, an index for each",
        takes={k: v for k, v in _TAKES.items() if k not in ("law", "exponent", "order", "graph")}
        | {"reduction": None},
        draw=_element_index,
        variants=(Variant("torch", _torch_gather),),
        work=_element_work,
        reference=_gathered,
        leaves=("x",),
        has_sparse_path=False,
    ),
    Operation(
        name="feature_gather",
        family="gather",
        about="the feature rows of a mini-batch, each once",
        takes={"nodes": 100_000, "batch": 20_000, "width": 128, "dtype": "float32"},
        draw=_batch_rows,
        variants=(
            Variant("torch", lambda inputs: lambda: _select(inputs), directions=FORWARD),
            _OWN,
            Variant("numpy", _numpy_take, devices=("cpu",), directions=FORWARD, why="numpy runs on the CPU"),
        ),
        work=_batch_work,
        reference=_select,
        has_sparse_path=False,
    ),
)
