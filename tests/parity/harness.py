"""One model in PyG and compiled, side by side: outputs, gradients, buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.pyg import edges
from plait.runtime import bind, forms, twins

OUTPUT = {torch.float32: 1e-5, torch.float64: 1e-10}
GRADIENT = {torch.float32: 1e-4, torch.float64: 1e-10}

Features = Any  # a tensor, or a pair of them


def as_on_a_gpu(monkeypatch: Any) -> None:
    """Graphs of edge lists are placed ones, and steps are bound to the kernels entered for CUDA.

    On a CPU these run in Triton's interpreter: everything but the device itself.
    """
    made = bind.Binding.__init__

    def on_device(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.device = "cuda"

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(edges, "is_placed", lambda edge_index: True)
    monkeypatch.setattr(bind.Binding, "__init__", on_device)
    monkeypatch.setattr(forms, "adopt", lambda *_: False)
    monkeypatch.setattr(twins, "find_twins", lambda *_: None)


def largest(*values: Tensor) -> float:
    """The largest finite entry."""
    with torch.no_grad():
        return max(
            (float(v[torch.isfinite(v)].abs().amax()) for v in values if torch.isfinite(v).any()), default=0.0
        )


def close(result: Tensor, expected: Tensor, tolerance: float, what: str, scale: float = 0.0) -> None:
    """Same shape and dtype, no entry further off than `tolerance` times the largest entry (or `scale`)."""
    atol = tolerance * max(largest(expected), scale)
    torch.testing.assert_close(
        result, expected, rtol=tolerance, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def leaf(x: Features, wants_grad: bool) -> Features:
    """Fresh copies that stand at the beginning of a graph of gradients."""
    if isinstance(x, tuple):
        return tuple(None if part is None else leaf(part, wants_grad) for part in x)
    return x.detach().clone().requires_grad_(wants_grad)


def parts(x: Features) -> list[Tensor]:
    return [part for part in (x if isinstance(x, tuple) else (x,)) if part is not None]


def agree(
    module: nn.Module,
    x: Features,
    *rest: Any,
    wants_grad: bool = True,
    calls: int = 1,
    must_plan: bool = True,
) -> nn.Module:
    """The compiled module, after it answered like PyG `calls` times, forward and backward."""
    twin = copy.deepcopy(module)
    compiled = plait.compile(module)
    ours, theirs = leaf(x, wants_grad), leaf(x, wants_grad)
    # the first call of a layer with cached=True fills PyG's cache and runs there
    for _ in range(calls + bool(getattr(module, "cached", False))):
        _one_call(twin, compiled, theirs, ours, rest)
    if must_plan:
        assert not compiled.plan.not_planned, compiled.plan.not_planned
        gives_x = getattr(module, "K", None) == 0  # no power of the matrix: nothing to plan
        assert compiled.plan.layers or gives_x, "no layer was asked: the module ran in PyG"
    _same_state(twin, compiled)
    return compiled


def _one_call(
    twin: nn.Module, compiled: nn.Module, theirs: Features, ours: Features, rest: Sequence[Any]
) -> None:
    torch.manual_seed(0)
    expected = twin(theirs, *rest)
    torch.manual_seed(0)
    result = compiled(ours, *rest)
    dtype = expected.dtype
    close(result, expected, OUTPUT[dtype], "output")
    assert result.requires_grad == expected.requires_grad
    if not expected.requires_grad:
        return
    direction = torch.randn(expected.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for model, features, out in ((twin, theirs, expected), (compiled, ours, result)):
        model.zero_grad()
        for part in parts(features):
            part.grad = None
        out.backward(direction)
    named = dict(twin.named_parameters())
    pairs = [
        (f"x[{k}]", mine, other)
        for k, (mine, other) in enumerate(zip(parts(ours), parts(theirs), strict=True))
    ]
    pairs += [(name, parameter, named[name]) for name, parameter in compiled.named_parameters()]
    # a gradient that is zero but for rounding (a bias before a batch norm) is measured by the others, or by
    # the direction, whose entries are about 1
    scale = 0.01 * max(1.0, largest(*(other.grad for _, _, other in pairs if other.grad is not None)))
    for name, mine, other in pairs:
        assert (mine.grad is None) == (other.grad is None), f"gradient of {name}"
        if other.grad is not None and mine.grad is not None:
            close(mine.grad, other.grad, GRADIENT[dtype], f"gradient of {name}", scale)


def _same_state(twin: nn.Module, compiled: nn.Module) -> None:
    expected, result = twin.state_dict(), compiled.state_dict()
    assert list(result) == list(expected)
    for name, value in expected.items():
        tolerance = OUTPUT.get(value.dtype, 0.0)
        close(result[name], value, tolerance, f"state {name}")
