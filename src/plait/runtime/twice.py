"""Backward passes that can be differentiated again, or run for a batch of directions at once.

A hand-written backward pass gives numbers; a derivative of it (create_graph=True, Hessians, MAML) or a vmap
over it (is_grads_batched=True) needs operations torch knows. Then, and only then, the function is computed
again from its inputs in such operations and torch differentiates that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

__all__ = ["Again", "added", "again", "differentiable", "is_vmapped"]

# asked at every backward pass: bound once
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_any_autocast_on = torch._C._is_any_autocast_enabled
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # is_grads_batched=True hands over such gradients

_IN_PLACE = (
    "plait's backward pass reads what this layer was given, also where PyG's keeps a product of it instead: "
    "write h = h + conv(h) for h += conv(h), or set PLAIT_DISABLE=1."
)
Again = Callable[[Any, Tensor, Sequence[Any]], tuple[Tensor, tuple[Any, ...]]]
"""(ctx, gradient, saved tensors) -> (the output in torch operations, the inputs of forward in their order).

Inputs that are not tensors, or that are not needed, may be None.
"""


def is_vmapped(x: Tensor) -> bool:
    """Whether x is a batch under vmap, which only torch's own operations can read."""
    return bool(_are_transforms_active() or _is_batched(x))


def differentiable(compute: Again) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a backward pass: if it is differentiated itself, `compute` is differentiated instead.

    A backward pass of several gradients is that of a matrix handed out in as many parts, one below the other.

    It runs in the types of the forward pass, which ran without autocast: a loss.backward() inside of a
    torch.autocast would have it compute messages again in 16 bits, which kernels do not take.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, grad: Tensor, *below: Tensor) -> Any:
            if _is_any_autocast_on() and torch.is_autocast_enabled(grad.device.type):
                with torch.autocast(grad.device.type, enabled=False):
                    return run(ctx, grad, *below)
            try:
                if is_grad_enabled() or _are_transforms_active() or _is_batched(grad):  # is_vmapped, inline
                    return again(ctx, torch.cat((grad, *below)) if below else grad, compute)
                return backward(ctx, grad, *below)
            except RuntimeError as error:
                if "inplace operation" not in str(error):
                    raise
                raise RuntimeError(f"{error} {_IN_PLACE}") from error

        return run

    return decorate


def again(ctx: Any, grad: Tensor, compute: Again) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of forward, recorded where gradients are."""
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # an alias of each: where one input was computed from another, the way through it is not ours
        saved = [_alias(value) for value in ctx.saved_tensors]
        out, inputs = compute(ctx, grad, saved)
    places = [k for k, wanted in enumerate(ctx.needs_input_grad) if wanted and inputs[k] is not None]
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if places and out.requires_grad:
        by = [inputs[k] for k in places]
        made = torch.autograd.grad(
            out, by, grad, create_graph=is_recorded, allow_unused=True, materialize_grads=True
        )
        for k, value in zip(places, made, strict=True):
            found[k] = value
    return tuple(found)


def _alias(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def added(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros that need a gradient: they stand for an input that no gradient depends on and nobody saved."""
    return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device, requires_grad=True)
