"""Dense products: mm, addmm and bmm, at the tall shapes of feature matrices."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.bench.ops import own
from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw
from plait.bench.ops.operation import Operation, Variant, Work

__all__ = ["OPERATIONS"]

_TAKES: Mapping[str, Any] = {
    "nodes": 20_000,
    "inner": 64,
    "width": 64,
    "dtype": "float32",
    "value_sparsity": None,
}


def _operands(case: Case, draw: Draw) -> dict[str, Tensor]:
    nodes, inner, width = case.size("nodes"), case.size("inner"), case.size("width")
    if case.batch is not None:
        batch = case.size("batch")
        return {"x": draw.normal(batch, nodes, inner), "w": draw.normal(batch, inner, width)}
    operands = {"x": draw.normal(nodes, inner), "w": draw.normal(inner, width)}
    return operands | ({"b": draw.normal(width)} if case.op == "addmm" else {})


def _work(case: Case) -> Work:
    nodes, inner, width = case.size("nodes"), case.size("inner"), case.size("width")
    batch = case.batch or 1
    moved = batch * (nodes * inner + inner * width + nodes * width) * case.float_bytes
    return Work(2.0 * batch * nodes * inner * width, float(moved), float(moved))


def _own(bias: str | None) -> Variant:
    return own.forward_variant(lambda inputs: own.gemm(inputs, bias))


_product = functools.partial(
    Operation, family="dense", draw=_operands, work=_work, has_sparse_path=False, takes=_TAKES
)
OPERATIONS = (
    _product(
        name="mm",
        about="x @ w",
        variants=(Variant("torch", lambda t: lambda: torch.mm(t["x"], t["w"])), _own(None)),
        reference=lambda t: t["x"] @ t["w"],
        leaves=("x", "w"),
    ),
    _product(
        name="addmm",
        about="b + x @ w",
        variants=(Variant("torch", lambda t: lambda: torch.addmm(t["b"], t["x"], t["w"])), _own("b")),
        reference=lambda t: t["b"] + t["x"] @ t["w"],
        leaves=("x", "w", "b"),
    ),
    _product(
        name="bmm",
        about="x[k] @ w[k] for every k of a batch",
        takes={**_TAKES, "batch": 64, "nodes": 128},
        variants=(
            Variant("torch", lambda t: lambda: torch.bmm(t["x"], t["w"])),
            Variant(
                "loop", lambda t: lambda: torch.stack([a @ b for a, b in zip(t["x"], t["w"], strict=True)])
            ),
        ),
        reference=lambda t: t["x"] @ t["w"],
        leaves=("x", "w"),
    ),
)
