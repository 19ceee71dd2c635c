"""kernels/gate against its reference: outputs, slopes, gradients, odd shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plait.kernels import gate as k
from plait.kernels.gate import reference
from plait.kernels.spmm import Pattern

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}
N, M = 23, 19


def patterns(graph: str) -> tuple[Pattern, Pattern]:
    rng = np.random.default_rng(0)
    rows, cols = {
        "random": lambda: (np.sort(rng.integers(0, N - 3, 150)), rng.integers(0, M - 2, 150)),
        "empty": lambda: (np.zeros(0, int), np.zeros(0, int)),
        "hub": lambda: (np.sort(np.r_[[3] * 400, rng.integers(0, N, 100)]), rng.integers(0, M, 500)),
        "repeated": lambda: (np.repeat(np.arange(N), 4), np.repeat(rng.integers(0, M, N), 4)),
    }[graph]()  # fmt: skip
    order = np.argsort(cols, kind="stable")
    forward = Pattern(_pointer(rows, N), cols.astype(np.int32), M)
    return forward, Pattern(_pointer(cols, M), rows[order].astype(np.int32), N)


def _pointer(rows: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))]).astype(np.int32)


def close(actual: torch.Tensor, expected: np.ndarray[Any, Any], what: str) -> None:
    scale = max(1.0, float(np.abs(expected).max())) if expected.size else 1.0
    tolerance = TOLERANCE[actual.dtype] * scale
    np.testing.assert_allclose(actual.numpy(), expected, atol=tolerance, rtol=0, err_msg=what)


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "width"), [("sigmoid", 1), ("sigmoid", 37), ("sigmoid", 85), ("relu", 37)])
def test_outputs_and_gradients_equal_the_reference(
    kind: str, width: int, dtype: torch.dtype, graph: str
) -> None:
    forward, transpose = patterns(graph)
    generator = torch.Generator().manual_seed(width)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=dtype)

    near, far, grad, addend, bias = draw(N) * 3, draw(M), draw(N), draw(N), draw(1)[0]
    value = draw(M) if kind == "sigmoid" else None
    arrays = [None if t is None else t.numpy() for t in (near, far, value)]
    nothing = float("nan")
    out, slopes, alone, again = (torch.full((N, width), nothing, dtype=dtype) for _ in range(4))
    k.gate(forward, kind, near, far, value, out=out, slopes=slopes, addend=addend, bias=bias)
    k.gate(forward, kind, near, far, value, out=again, addend=addend, bias=bias)
    k.gate(forward, kind, near, far, value, slopes=alone)
    expected = reference.gate(forward.indptr, forward.indices, kind, *arrays, addend.numpy(), bias.numpy())
    close(out, expected[0], "output")
    close(slopes, expected[1], "slopes")
    assert torch.equal(out, again)
    assert torch.equal(slopes, alone)
    far_grad, value_grad = (torch.full((M, width), nothing, dtype=dtype) for _ in range(2))
    k.gate_sources(transpose, kind, near, far, value, grad, far_grad, None if value is None else value_grad)
    grads = reference.gate_backward(forward.indptr, forward.indices, kind, *arrays, grad.numpy())
    close(far_grad, grads["far"], "far")
    close(slopes * grad, grads["near"], "near")
    if value is not None:
        close(value_grad, grads["value"], "value")


def test_gates_far_from_zero_are_open_or_shut_and_nan_stays() -> None:
    forward = Pattern(np.array([0, 1, 2, 3, 4], np.int32), np.zeros(4, np.int32), 1)
    near = torch.tensor([[1e4], [-1e4], [float("nan")], [0.0]])
    out, slopes = torch.empty(4, 1), torch.empty(4, 1)
    k.gate(forward, "sigmoid", near, torch.zeros(1, 1), torch.ones(1, 1), out=out, slopes=slopes)
    assert out[0] == 1
    assert 0 <= out[1] < 1e-30
    assert torch.isnan(out[2])
    assert out[3] == 0.5
    assert slopes[0] < 1e-30
    assert slopes[3] == 0.25


def test_the_gradient_of_a_relu_passes_nan_as_torchs_does() -> None:
    forward = Pattern(np.arange(5, dtype=np.int32), np.zeros(4, np.int32), 1)
    backward = Pattern(np.array([0, 4], np.int32), np.arange(4, dtype=np.int32), 4)
    near = torch.tensor([[1.0], [-1.0], [float("nan")], [0.0]])
    far, grad = torch.zeros(1, 1), torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    slopes, to_far = torch.empty(4, 1), torch.empty(1, 1)
    k.gate(forward, "relu", near, far, None, slopes=slopes)
    k.gate_sources(backward, "relu", near, far, None, grad, to_far, None)
    leaf = near.clone().requires_grad_()
    leaf.relu().backward(grad)
    assert torch.equal(slopes * grad, leaf.grad)
    assert to_far.item() == leaf.grad.sum() == 5
