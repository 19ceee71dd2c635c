"""Writing rows: index_add, scatter with every reduction, and reductions over sorted segments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.bench.ops import own
from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.ops.operation import GRAPH, Operation, Unsupported, Variant, Work

__all__ = ["OPERATIONS"]

_TORCH_NAME = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin", "mul": "prod"}


def _rows(case: Case, draw: Draw) -> dict[str, Tensor]:
    _, target = draw.edges()
    edges, width = target.numel(), case.size("width")
    shape = (width, edges) if case.axis else (edges, width)
    src = draw.near_one(*shape) if case.op == "scatter_mul" else draw.normal(*shape)
    return {"src": src, "target": target}


def _work(case: Case) -> Work:
    width, size = case.size("width"), case.float_bytes
    edges, rows = case.size("edges"), case.rows_out
    read = edges * (width * size + case.index_bytes)
    return Work(float(edges * width), read + rows * width * size, read + 2.0 * edges * width * size)


def _axis(inputs: Inputs) -> int:
    return inputs.case.axis or 0


def _blank(inputs: Inputs, value: float = 0.0) -> Tensor:
    src, rows = inputs["src"], inputs.case.rows_out
    shape = (src.shape[0], rows) if _axis(inputs) else (rows, src.shape[1])
    return torch.full(shape, value, dtype=src.dtype, device=src.device)


def _spread_index(inputs: Inputs) -> Tensor:
    """The index seen once per element, without its bytes: how PyG calls scatter."""
    target = inputs["target"]
    if target.dtype != torch.int64:
        raise Unsupported("torch's scatter takes int64 indices only")
    return (target.unsqueeze(0) if _axis(inputs) else target.unsqueeze(1)).expand_as(inputs["src"])


def _torch_scatter_call(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    index = _spread_index(inputs)
    if reduce == "sum":
        return lambda: _blank(inputs).scatter_add_(_axis(inputs), index, inputs["src"])
    return lambda: _scatter_reduce(inputs, index, reduce)


def _scatter_reduce(inputs: Inputs, index: Tensor, reduce: str) -> Tensor:
    start = _blank(inputs, 1.0 if reduce == "mul" else 0.0)
    name = _TORCH_NAME[reduce]
    return start.scatter_reduce_(_axis(inputs), index, inputs["src"], name, include_self=reduce == "mul")


def _reference(inputs: Inputs, reduce: str) -> Tensor:
    target = inputs["target"].long()
    index = (target.unsqueeze(0) if _axis(inputs) else target.unsqueeze(1)).expand_as(inputs["src"])
    return _scatter_reduce(inputs, index, reduce)


def _index_add(inputs: Inputs) -> Callable[[], Tensor]:
    return lambda: _blank(inputs).index_add_(_axis(inputs), inputs["target"], inputs["src"])


def _pyg(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    from torch_geometric.utils import scatter

    src, target, rows, axis = inputs["src"], inputs["target"], inputs.case.rows_out, _axis(inputs)
    return lambda: scatter(src, target, dim=axis, dim_size=rows, reduce=reduce)


def _library(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    import torch_scatter  # type: ignore[import-not-found, unused-ignore]

    src, target, rows, axis = inputs["src"], inputs["target"], inputs.case.rows_out, _axis(inputs)
    return lambda: torch_scatter.scatter(src, target, dim=axis, dim_size=rows, reduce=reduce)


def _own(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    if inputs.case.axis:
        raise Unsupported("plait reduces rows, not columns")
    return own.reduced(inputs, reduce)


def _own_variant(reduce: str) -> Variant:
    return own.forward_variant(functools.partial(_own, reduce=reduce))


def _scatter_variants(reduce: str) -> tuple[Variant, ...]:
    found = [
        Variant("torch", functools.partial(_torch_scatter_call, reduce=reduce)),
        Variant("pyg", functools.partial(_pyg, reduce=reduce), needs="torch_geometric"),
        Variant("torch_scatter", functools.partial(_library, reduce=reduce), needs="torch_scatter"),
    ]
    if reduce != "mul":
        found.append(_own_variant(reduce))
    if reduce == "sum":
        found.append(Variant("index_add", _index_add))
    return tuple(found)


# Sorted segments ---------------------------------------------------------------------------------------


def _segment(inputs: Inputs) -> Callable[[], Tensor]:
    _, pointer = inputs.by_target
    return lambda: torch.segment_reduce(inputs["src"], "sum", offsets=pointer, axis=0)


def _pyg_segment(inputs: Inputs) -> Callable[[], Tensor]:
    from torch_geometric.utils import segment

    _, pointer = inputs.by_target
    src = inputs["src"]
    return lambda: segment(src, pointer, reduce="sum")


def _library_segment(inputs: Inputs) -> Callable[[], Tensor]:
    import torch_scatter

    _, pointer = inputs.by_target
    src = inputs["src"]
    return lambda: torch_scatter.segment_csr(src, pointer, reduce="sum")


_TAKES: Mapping[str, Any] = {**GRAPH, "axis": None, "value_sparsity": None, "reduction": None}
_SEGMENT_TAKES = {k: v for k, v in GRAPH.items() if k != "order"} | {"value_sparsity": None}


_reduction = functools.partial(
    Operation, family="scatter", draw=_rows, work=_work, leaves=("src",), has_sparse_path=False, takes=_TAKES
)


def _scatter(reduce: str) -> Operation:
    return _reduction(
        name=f"scatter_{'add' if reduce == 'sum' else reduce}",
        about=f"the {reduce} of the edges' rows at every target",
        variants=_scatter_variants(reduce),
        reference=functools.partial(_reference, reduce=reduce),
    )


OPERATIONS = (
    _reduction(
        name="index_add",
        about="the edges' rows added into their targets' rows",
        variants=(Variant("torch", _index_add), _own_variant("sum")),
        reference=functools.partial(_reference, reduce="sum"),
    ),
    *(_scatter(reduce) for reduce in ("sum", "mean", "max", "min", "mul")),
    _reduction(
        name="segment_reduce",
        about="the sum of the rows of every segment of sorted edges",
        takes=_SEGMENT_TAKES,
        variants=(
            Variant("torch", _segment),
            Variant("scatter_add", functools.partial(_torch_scatter_call, reduce="sum")),
            Variant("pyg", _pyg_segment, needs="torch_geometric"),
            Variant("torch_scatter", _library_segment, needs="torch_scatter"),
            _own_variant("sum"),
        ),
        reference=functools.partial(_reference, reduce="sum"),
    ),
)
