"""plait.trace: one step of a model as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from plait.errors import InputError
from plait.pyg.call import Call, call_of
from plait.pyg.compile import compile
from plait.pyg.quiet import has_history, quietly
from plait.pyg.view import CompiledModel
from plait.runtime.deferred import held_rows

__all__ = ["trace"]

_WARM_UP = 2  # the first calls plan, bind and compute what is done once


def trace(model: nn.Module, data: Any, path: str | os.PathLike[str], mode: str | None = None) -> profile:
    """One step of the compiled model under the PyTorch profiler, written to `path` as a Chrome trace.

    A step is a forward pass, in training with its backward pass; `mode` is "training" or "inference"
    (default: model.training). Layers and steps of the plan are ranges whose names begin with "plait". The
    profile is returned, for `key_averages()`. Gradients and the random state are left as they were.
    """
    if mode not in (None, "training", "inference"):
        raise InputError(f"mode: {mode!r}; pass 'training' or 'inference'")
    is_training = model.training if mode is None else mode == "training"
    compiled = model if isinstance(model, CompiledModel) else compile(model, data, mode=mode)
    call = call_of(compiled, data)
    if call is None:
        raise InputError(
            "data: the model's arguments are not attributes of it; use torch.profiler around your own step"
        )
    kept = [(parameter, parameter.grad) for parameter in compiled.parameters()]
    try:
        with quietly(compiled, call, is_training):
            for _ in range(_WARM_UP):
                _step(compiled, call, is_training)
            with (seen := profile(activities=[ProfilerActivity.CPU])):
                _step(compiled, call, is_training)
    finally:
        for parameter, grad in kept:
            parameter.grad = grad
    seen.export_chrome_trace(os.fspath(path))
    return seen


def _step(model: nn.Module, call: Call, is_training: bool) -> None:
    with torch.set_grad_enabled(is_training):
        out = call(model)
        if (wanted_rows := held_rows(out)) is not None:
            out = wanted_rows
        if is_training and isinstance(out, Tensor) and out.requires_grad:
            torch.autograd.backward(out, torch.ones_like(out), retain_graph=has_history(model))
