"""Runs of a model that leave no trace: modes, buffers, inputs, gradients and random states are restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch_geometric.nn import MessagePassing

from plait.pyg.call import Call
from plait.pyg.listening import in_this_thread
from plait.runtime.identity import counts_writes

__all__ = ["gradients", "has_history", "quietly", "recorded"]

# what layers with cached=True keep of their first call, and SuperGATConv of its last
_CACHES = ("_cached_", "att_x", "att_y")


@contextmanager
def quietly(model: nn.Module, call: Call, is_training: bool) -> Iterator[None]:
    """Runs in the requested mode; afterwards random states, buffers, inputs and layer caches are restored.

    In training the modules' own modes stay where the model is in training already: a part that was put in
    evaluation mode trains so. Modules that no tree of children leads to (in lists, closures) are found when
    they are called.
    """
    # by `__dict__`, which a module and its compiled view share
    was: dict[int, tuple[nn.Module, bool, dict[str, Any], list[_Kept]]] = {}
    keeps_modes = is_training and model.training

    def quiet(module: nn.Module, _: Any = None) -> None:
        if id(vars(module)) not in was:
            own = [_Kept(b, False) for b in module._buffers.values() if b is not None] if is_training else []
            was[id(vars(module))] = (module, module.training, {**vars(module)}, own)
            if not keeps_modes:
                module.training = is_training

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    given = call.tensors() if is_training else ()
    inputs = [_Kept(t, True) for t in given if t.is_floating_point() and counts_writes(t)]
    for module in model.modules():
        quiet(module)
    handle = register_module_forward_pre_hook(in_this_thread(quiet))
    try:
        yield
    finally:
        handle.remove()
        for module, training, before, own in was.values():
            module.training = training
            _put_back(module.__dict__, before)
            inputs += own
        for tensor in inputs:
            tensor.restore()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _put_back(now: dict[str, Any], before: dict[str, Any]) -> None:
    """A module's attributes as they were, where they are caches of PyG's or tensors.

    Such as a weight that weight_norm computes at every call: nobody can copy one that has a history.
    """
    for name in [name for name, value in now.items() if _is_kept(name, value) and name not in before]:
        del now[name]
    for name, value in before.items():
        if _is_kept(name, value) or isinstance(now.get(name), Tensor):
            now[name] = value


def _is_kept(name: str, value: Any) -> bool:
    return name.startswith(_CACHES) or isinstance(value, Tensor)


class _Kept:
    """A tensor as it was, to be put back where a run in training mode changed it."""

    def __init__(self, tensor: Tensor, counts_changes: bool):
        self._tensor, self._copy = tensor, tensor.detach().clone()
        self._version = tensor._version if counts_changes else None

    def restore(self) -> None:
        """Put it back; what batch_norm does to its statistics is not counted, so values are compared."""
        if self._version is None:
            is_same = torch.equal(self._tensor, self._copy)
        else:
            is_same = self._tensor._version == self._version
        if not is_same:
            with torch.no_grad():
                self._tensor.copy_(self._copy)


@contextmanager
def recorded(ran: list[nn.Module]) -> Iterator[None]:
    """Append every module to `ran` when it has run; what is inside a layer counts as the layer."""

    def record(module: nn.Module, _: Any, __: Any) -> None:
        if isinstance(module, MessagePassing):
            inside = {id(m) for m in module.modules()}
            ran[:] = [m for m in ran if id(m) not in inside]
        ran.append(module)

    handle = register_module_forward_hook(in_this_thread(record))
    try:
        yield
    finally:
        handle.remove()


def gradients(model: nn.Module, call: Call, out: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients a training step computes; nothing is added to any .grad."""
    wanted: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    wanted += [tensor for tensor in call.tensors() if tensor.requires_grad]
    if not wanted:
        return ()
    if _has_reentrant_checkpoint(
        out
    ):  # it allows nothing but `backward`, and fails only when half the graph is freed
        return _by_backward(wanted, out, has_history(model))
    return torch.autograd.grad(
        out, wanted, torch.ones_like(out), retain_graph=has_history(model), allow_unused=True
    )


def has_history(model: nn.Module) -> bool:
    """Whether a module holds a tensor that was computed, as from a network that makes weights.

    What it was computed from is the caller's graph, which must stay for the caller's own backward pass.
    """
    held = (value for m in model.modules() for value in (*vars(m).values(), *m._buffers.values()))
    return any(isinstance(value, Tensor) and value.grad_fn is not None for value in held)


def _has_reentrant_checkpoint(out: Tensor) -> bool:
    """Whether a checkpoint with use_reentrant=True is behind `out`."""
    seen: set[Any] = set()
    nodes: list[Any] = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def _by_backward(wanted: list[Tensor], out: Tensor, retain: bool) -> tuple[Tensor | None, ...]:
    """The same by `backward`, with every .grad restored."""
    before = [tensor.grad for tensor in wanted]
    try:
        for tensor in wanted:
            tensor.grad = None
        out.backward(torch.ones_like(out), retain_graph=retain)  # type: ignore[no-untyped-call]
        return tuple(tensor.grad for tensor in wanted)
    finally:
        for tensor, grad in zip(wanted, before, strict=True):
            tensor.grad = grad
