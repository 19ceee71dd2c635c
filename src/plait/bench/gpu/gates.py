"""Gated sums and the gradient of edge weights at width 128, against float64 over the edge list."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from plait.bench.gpu.clock import milliseconds, relative_error
from plait.kernels.csr.gpu import rows_of, transposed
from plait.kernels.gate.gpu import gate, gate_sources
from plait.kernels.spmm.gpu import weight_gradient

__all__ = ["measure"]

_CHECKED_COLUMNS, _CHECKED_EDGES = 2, 1 << 20


def measure(
    name: str, edge_index: torch.Tensor, num_nodes: int, width: int = 128
) -> Iterator[dict[str, Any]]:
    """One record per kernel."""
    rows = rows_of(edge_index, num_nodes)
    turned = transposed(rows)
    near, far, value, grad = (torch.randn(num_nodes, width, device="cuda") for _ in range(4))
    out, slopes, far_grad, value_grad = (torch.full_like(near, float("nan")) for _ in range(4))
    forward = functools.partial(gate, rows, "sigmoid", near, far, value, out=out, slopes=slopes)
    sources = functools.partial(gate_sources, turned, "sigmoid", near, far, value, grad, far_grad, value_grad)
    forward()
    sources()
    source, target = rows.indices.long(), torch.repeat_interleave(rows.degrees.long())
    a, b, v, g = (t[:, :_CHECKED_COLUMNS].double() for t in (near, far, value, grad))
    act = torch.sigmoid(a[target] + b[source])
    errors = (
        relative_error(out[:, :_CHECKED_COLUMNS], torch.zeros_like(a).index_add(0, target, act * v[source])),
        relative_error(
            value_grad[:, :_CHECKED_COLUMNS], torch.zeros_like(a).index_add(0, source, act * g[target])
        ),
    )
    del act
    for kernel, call, error in (("gate", forward, errors[0]), ("gate sources", sources, errors[1])):
        yield {"kernel": kernel, "graph": name, "width": width, "ms": milliseconds(call), "error": error}
    dots = torch.full((rows.num_edges,), float("nan"), device="cuda")
    weigh = functools.partial(weight_gradient, rows, far, grad, dots)
    weigh()
    some = slice(0, _CHECKED_EDGES)
    error = relative_error(dots[some], (grad[target[some]].double() * far[source[some]]).sum(1))
    yield {
        "kernel": "weight gradient",
        "graph": name,
        "width": width,
        "ms": milliseconds(weigh),
        "error": error,
    }
