"""A run of the model before its first call, which plans its layers and looks for faster graph forms."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from plait.pyg.call import Call
from plait.pyg.quiet import gradients, quietly, recorded
from plait.runtime.deferred import held_rows
from plait.runtime.dial import follow
from plait.runtime.identity import counts_writes
from plait.runtime.session import Session
from plait.runtime.twins import find_twins

__all__ = ["is_for_inference", "look_ahead"]


def look_ahead(model: nn.Module, session: Session, call: Call | None, mode: str) -> None:
    """Run the model once to plan it, in the mode the plan is for, and leave everything as it was."""
    if mode == "training" and is_for_inference(model, call):
        session.notes.append("planned for inference: tensors made in inference_mode have no gradients")
        mode = "inference"
    session.dial.is_paused = True
    try:
        with torch.inference_mode(torch.is_inference_mode_enabled() and mode == "inference"):
            _plan_ahead(model, session, call, mode)
    finally:
        session.dial.is_paused = False


def is_for_inference(model: nn.Module, call: Call | None) -> bool:
    """Whether a tensor of the model or the call was made in inference_mode: autograd does not take those."""
    values = () if call is None else call.tensors()
    return any(not counts_writes(t) for t in (*model.parameters(), *values) if not is_lazy(t))


def _plan_ahead(model: nn.Module, session: Session, call: Call | None, mode: str) -> None:
    """Run the model as it will be run, then look for faster forms of its graphs.

    Dropout in front of a layer makes its input another tensor at every step: only a run in training mode
    shows that, and nothing is hoisted then that training would never use.
    """
    if call is None:
        session.notes += ["the model's arguments are not attributes of data: planned at the first call"]
        return
    if call.features is not None:
        session.constant_input = weakref.ref(call.features)
    ran: list[nn.Module] = []
    has_layers = any(isinstance(m, MessagePassing) for m in model.modules())
    silently = functools.partial(quietly, model, call, mode == "training")
    try:
        if mode == "training" and not _runs_in_training(model, session, call, ran):
            silently = functools.partial(quietly, model, call, False)
        if not ran:
            with silently(), recorded(ran), torch.set_grad_enabled(mode == "training"):
                _follow(model, session, call, call(model), mode)
        if any(getattr(m, "cached", False) for m in ran):
            with silently(), torch.set_grad_enabled(mode == "training"):
                call(model)
                call(model)  # the first call fills PyG's cache
    except Exception:
        if call.is_guessed:
            session.notes += ["the model's arguments are not named like attributes of data: "
                             "planned at the first call"]  # fmt: skip
            return
        if has_layers:
            raise  # no warning for a model that has nothing to do with graphs
    if not any(isinstance(m, MessagePassing) for m in ran):
        session.notes += ["no PyG layer was found in the model: nothing to plan"]
        return
    run = functools.partial(_run_once, model, call, silently, mode == "training")
    if mode == "training" and session.options.rows is not None:
        _restrict_last(model, session, ran, call.num_nodes, run)
    find_twins(session, run)
    if session.find_forms():
        run()
    _turn_dial(model, session, call, silently, mode)


_MOST_TURNS = 5  # what others save may depend a little on the ways that were chosen


def _turn_dial(
    model: nn.Module,
    session: Session,
    call: Call,
    silently: Callable[[], AbstractContextManager[None]],
    mode: str,
) -> None:
    """Under memory_limit: observe what a step holds, choose variants that fit, and repeat until they stay."""
    if session.options.memory_limit is None:
        return
    for turns in range(_MOST_TURNS):
        with silently(), torch.set_grad_enabled(mode == "training"):
            out = call(model)
            _follow(model, session, call, out, mode)
            if mode == "training" and isinstance(out, Tensor) and out.requires_grad:
                gradients(model, call, out)  # what a graph's gradients need is made now, and counts
        # the first step differs from the others: inputs are copied (overwritten.py)
        if turns and not session.dial.turn(session, mode):
            return


def _follow(model: nn.Module, session: Session, call: Call, out: Any, mode: str) -> None:
    """Note which layer or code between layers saved which tensors in the run that gave `out`."""
    outputs = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)]
    given = [*model.parameters(), *model.buffers(), *call.tensors()]
    try:
        session.dial.trails[mode] = follow(outputs, [t for t in given if not is_lazy(t)])
    except RuntimeError:  # a foreign tensor subclass
        if session.options.memory_limit is not None:
            raise  # without a limit it is only a prediction, not worth an error


def _runs_in_training(model: nn.Module, session: Session, call: Call, ran: list[nn.Module]) -> bool:
    """Whether the model could be run in training mode; what ran is then in `ran`.

    It cannot where, say, a normalisation needs more than one row; then the run without dropout is used.
    """
    try:
        with quietly(model, call, True), recorded(ran), torch.enable_grad():
            _follow(model, session, call, call(model), "training")
    except Exception:
        ran.clear()
        session.plans.clear()
        return False
    return True


def _run_once(
    model: nn.Module,
    call: Call,
    silently: Callable[[], AbstractContextManager[None]],
    with_grad: bool,
    backward: bool = False,
) -> Any:
    """The model's output, with gradients computed if asked for; no .grad is touched."""
    with silently(), torch.set_grad_enabled(with_grad):
        out = call(model)
        if backward and (wanted_rows := held_rows(out)) is not None:
            out = wanted_rows  # a training step with rows= reads no others
        if not backward or not isinstance(out, Tensor) or not out.requires_grad:
            return out
        try:
            return out, gradients(model, call, out)
        except NotImplementedError:  # a function of the model's own that torch cannot differentiate
            return out


def _restrict_last(
    model: Any, session: Session, ran: list[nn.Module], num_nodes: int, run: Callable[[], object]
) -> None:
    """Let the last layer compute the requested rows first, where nothing after it needs all of them."""
    layers = [m for m in ran if isinstance(m, MessagePassing)]
    if not layers:
        return
    if any(p.is_cuda for p in layers[-1].parameters()):
        session.notes.append("rows= is not used: it is for models on a CPU so far")
        return
    if not num_nodes:  # several feature matrices as one tensor: which rows are meant is not known
        session.notes.append("rows= is not used: x is no matrix with a row for every node")
        return
    name = model._plait_seats.of(layers[-1]).name
    session.restrict(name, num_nodes)
    session.forget(name)
    run()
    if session.asked_by is not None:
        session.stop_restricting(f"{session.asked_by} asks for all rows")
        session.forget(name)
        run()
