"""A compiled model: a second view of the user's own model, through which its layers run planned.

The view has the model's `__dict__`, the very same object, and so its parameters, children, hooks and flags:
nothing is copied and the two cannot diverge. Its class is derived from the model's; every method of that
class, called on the view, marks the view as the one being called. What the view adds lies in slots.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch_geometric.nn import MessagePassing

from plait.cost.family import processor
from plait.kernels import launch
from plait.plan.plan import NotPlanned, Plan
from plait.plan.printed import closest_ratio
from plait.pyg import exported
from plait.pyg.active import Seats, active, traced
from plait.pyg.checkpoints import in_checkpoint
from plait.pyg.planned import PlannedForward, is_disabled, is_planned
from plait.runtime.aside import RESTS_AFTER
from plait.runtime.folded import unfolded
from plait.runtime.machine import machine_in_use
from plait.runtime.session import Session

__all__ = ["CompiledModel", "never_planned", "plan_of", "view_of"]

_NOT_THE_USERS = {*MessagePassing.__mro__}  # classes whose methods run no layer
_set_class = object.__dict__["__class__"].__set__


class CompiledModel:
    """Mixed in before the class of the model that an object is a view of.

    Without `__slots__`: the classes of all views then have the same layout, and one can take another's place.
    """

    _plait_model: nn.Module
    _plait_seats: Seats
    plait_root: type[nn.Module]  # the model's class, of which the view's is derived

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.plait_root(*args, **kwargs)  # `type(self)(...)` in a model's own code makes a plain model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # torch.compile finds a view's methods on the model's class and then guards those of the view's
            return _enter_traced(self._plait_seats, self._plait_model, args, kwargs)
        if not kwargs and _rests_again(self._plait_seats, args):
            active.is_resting = True
            try:
                return self._plait_model(*args)
            finally:
                active.is_resting = False
        return _enter(self, super().__call__, args, kwargs)  # type: ignore[misc]

    @property
    def __class__(self) -> Any:
        # parametrizations and lazy modules assign another class to an object: it must be the model's
        return type(self._plait_model)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        self._plait_model.__class__ = value
        _follow(self)

    def __getattr__(self, name: str) -> Any:
        if type(self).plait_root is not type(
            self._plait_model
        ):  # the model's class was changed from its own side
            _follow(self)
            return getattr(self, name)
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if not _share_state(self):
                raise
            return getattr(self, name)

    @property
    def _plait_plan_session(self) -> Session:
        return self._plait_seats.session

    def __copy__(self) -> nn.Module:
        return view_of(copy.copy(self._plait_model), copy.deepcopy(self._plait_plan_session))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        model = copy.deepcopy(self._plait_model, memo)
        if id(self) in memo:  # the model holds its own view, as a child's pointer to its parent
            _share_state(memo[id(self)])
            return memo[id(self)]  # type: ignore[no-any-return]
        made = memo[id(self)] = view_of(model, copy.deepcopy(self._plait_plan_session))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _is_packaged():
            return self._plait_model.__reduce_ex__(protocol)
        return view_of, (self._plait_model, self._plait_plan_session)

    def _replicate_for_data_parallel(self) -> nn.Module:
        """What nn.DataParallel runs on a device: the model's replica, made anew for every call."""
        made: nn.Module = self._plait_model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return made

    def __prepare_scriptable__(self) -> nn.Module:
        """What TorchScript compiles: the model, whose layers are PyG's."""
        return self._plait_model


def view_of(model: nn.Module, session: Session) -> nn.Module:
    """The compiled view of a model; a view's is one more view of the same model."""
    model = model._plait_model if isinstance(model, CompiledModel) else model
    view: Any = object.__new__(_view_class(type(model)))
    # `nn.Module.__setattr__` would take the model for a child
    object.__setattr__(view, "__dict__", model.__dict__)
    object.__setattr__(view, "_plait_model", model)
    seats = Seats(session, model)
    object.__setattr__(view, "_plait_seats", seats)
    exported.offer(seats, model)
    return view  # type: ignore[no-any-return]


def _view_class(root: type[nn.Module]) -> type[nn.Module]:
    """The class of the views of such models, made once and for as long as there are any."""
    for known in root.__subclasses__():
        if vars(known).get("plait_root") is root:
            return known
    members: dict[str, Any] = {
        "__slots__": ("_plait_model", "_plait_seats"),
        "__module__": root.__module__,
        "__qualname__": root.__qualname__,
        "__doc__": root.__doc__,
        "plait_root": root,
    }
    if issubclass(root, GraphModule):
        members["recompile"] = _recompile
    if not hasattr(root, "plan"):
        members["plan"] = property(
            _plan, doc="The plan the model ran by last; .training and .inference are those of one mode."
        )
    made = type(root.__name__, (CompiledModel, root), members)
    for base in reversed(root.__mro__):
        for name, value in () if base in _NOT_THE_USERS else vars(base).items():
            if name in members or (name.startswith("__") and name.endswith("__")):
                continue
            if isinstance(value, FunctionType | PlannedForward):
                setattr(made, name, _method(made, name, value))
            elif isinstance(value, property):
                setattr(made, name, _property(made, name, value))
            elif isinstance(value, _Slot):
                setattr(made, name, _slot(value))
    return made


class _Slotted:
    __slots__ = ("slot",)


_Slot = type(_Slotted.__dict__["slot"])


def _method(owner: type, name: str, original: Any) -> Any:
    """A method of the model that enters it by the view."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _enter_traced(self._plait_seats, getattr(self._plait_model, name), args, kwargs)
        # parametrizing exchanges the class of an object, whose methods may have been taken before
        call = (
            getattr(super(owner, self), name)
            if isinstance(self, owner)
            else original.__get__(self, type(self))
        )
        return (
            call(*args, **kwargs) if active.seats is self._plait_seats else _enter(self, call, args, kwargs)
        )

    if not isinstance(original, PlannedForward):
        return functools.wraps(original)(method)
    # torch.compile's guards look for what the descriptor holds, on the class of the object they are given
    method.original = original.original  # type: ignore[attr-defined]
    return functools.wraps(original.original)(method)


def _property(owner: type, name: str, original: property) -> property:
    """A property of the model whose getter enters it by the view."""

    def getter(self: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(self._plait_model, name)
        return _enter(self, functools.partial(getattr, super(owner, self), name), (), {})

    return property(getter, original.fset, original.fdel, original.__doc__)


def _slot(original: Any) -> property:
    """An attribute that the model's class keeps outside `__dict__`."""
    return property(
        lambda self: original.__get__(self._plait_model),
        lambda self, value: original.__set__(self._plait_model, value),
        lambda self: original.__delete__(self._plait_model),
    )


def _rests_again(seats: Seats, args: tuple[Any, ...]) -> bool:
    """Whether this is the call that was left to PyG last: the same edges, with or without gradients."""
    place, edges, with_grad = seats.rested
    if edges is None or len(args) <= place or args[place] is not edges() or active.seats is not None:
        return False
    if torch.is_grad_enabled() is not with_grad or seats.explained is not None or active.is_resting:
        return False
    aside = seats.session.aside
    if aside.num_left < RESTS_AFTER or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    aside.calls += 1
    return True


def _rest(
    view: Any, seats: Seats, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What the call gives in PyG."""
    active.is_resting = True
    try:
        if getattr(call, "__func__", None) is nn.Module.__call__:
            seats.note_rest(args)
            return view._plait_model(*args, **kwargs)  # the same, and its attributes are nearer
        return call(*args, **kwargs)
    finally:
        active.is_resting = False


def _enter(view: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the call gives, its layers planned; matrices held in part are whole when they leave the model."""
    seats: Seats = view._plait_seats
    before = active.seats
    if before is seats or active.is_resting or is_disabled():
        return call(*args, **kwargs)
    session = seats.session
    session.aside.calls += 1
    is_left = seats.are_explained() or session.aside.rests((*args, *kwargs.values()))
    if before is None and is_left and not in_checkpoint():
        return _rest(view, seats, call, args, kwargs)
    if session.dial.is_late:  # the call before had to wait for its backward pass
        session.dial.settle(session, view._plait_model, (*args, *kwargs.values()))
    active.seats = seats
    session.num_calls += 1
    try:
        out = call(*args, **kwargs)
    finally:
        active.seats = before
        if session.shared:
            session.shared.clear()
    if session.dial.limit is not None:
        session.dial.settle(session, view._plait_model, (*args, *kwargs.values()))
    return unfolded(out) if session.has_twins else out


def _enter_traced(
    seats: Seats, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    before = traced.seats
    traced.seats = seats
    out = call(*args, **kwargs)
    traced.seats = before
    return out


def _recompile(view: Any) -> Any:
    """fx writes `forward` on the class of the object that is recompiled: it must be the model's."""
    return view._plait_model.recompile()


def _follow(view: Any) -> None:
    """Take the view class that belongs to the model's present class."""
    _set_class(view, _view_class(type(view._plait_model)))


def _share_state(view: Any) -> bool:
    """Give a view its model's `__dict__` where that is another object by now; whether it was.

    A `__deepcopy__` may give a copy its `__dict__` last, as torch's for parametrized models does: a view that
    the model itself holds, in a method bound to it, is copied before.
    """
    if vars(view) is vars(view._plait_model):
        return False
    object.__setattr__(view, "__dict__", vars(view._plait_model))
    return True


def _is_packaged() -> bool:
    """True while torch.package pickles: it takes the plain model along, which needs no plait to be loaded."""
    exporter = sys.modules.get("torch.package.package_exporter")
    frame: Any = sys._getframe() if exporter is not None else None
    while frame is not None:
        if frame.f_globals is vars(exporter):
            return True
        frame = frame.f_back
    return False


def _plan(view: Any) -> Any:
    own = vars(view)
    for place in (own, own["_modules"], own["_parameters"], own["_buffers"]):
        if "plan" in place:  # a model may call something of its own so
            return place["plan"]
    return plan_of(view)


def plan_of(view: Any, mode: str | None = None) -> Plan:
    """The plan of a compiled model in a mode (default: the one it ran in last); `other` is the other's."""
    session: Session = view._plait_plan_session
    mode = mode or session.plans.mode
    plan = _plan_in(view, mode)
    other = "inference" if mode == "training" else "training"
    return replace(plan, other=_plan_in(view, other)) if session.plans.of(other) else plan


def _plan_in(view: Any, mode: str) -> Plan:
    session: Session = view._plait_plan_session
    skipped = {**never_planned(view), **session.not_planned}
    layers = session.plans.of(mode)
    notes = [] if layers or skipped else ["no plan yet: it is made at the first call"]
    if is_disabled():
        notes = ["PLAIT_DISABLE is set: everything runs in PyG"]
    notes += [*session.notes, *session.forms.notes]
    return Plan(
        layers,
        tuple(NotPlanned(layer, reason) for layer, reason in skipped.items()),
        tuple(notes),
        tuple(_warnings(session)) if layers else (),
        type(view._plait_model).__name__,
        memory_limit=session.options.memory_limit,
        model_peak=session.dial.peak_bytes(session, mode) if layers else None,
    )


def _warnings(session: Session) -> list[str]:
    """Reasons to doubt the prices: another machine's profile, settings that have changed."""
    found = _about_machine(session)
    then, now = session.plans.threads, launch.num_threads()
    if then is not None and then != now:
        found.append(f"planned for {then} threads, now there are {now}: the next call makes a new plan")
    return found


_SCALING_ERROR = 1.3  # how far scaled prices of two plans may be off relative to each other


def _about_machine(session: Session) -> list[str]:
    """A one-line warning about the profile: calibrated elsewhere, or scaled from another family."""
    machine, (name, _) = machine_in_use(), processor()
    if not machine.is_default:
        elsewhere = machine.measured.get("environment", {}).get("cpu", name)
        return [] if elsewhere == name else [
            f"predicted by a calibration of {elsewhere}, but this is {name}: run `plait calibrate`"
        ]  # fmt: skip
    family = machine.measured.get("scaled_to")
    if family is None:
        return []
    text = f"times are predicted for {machine.measured.get('family')}, scaled to this processor ({family})"
    close = [plan.layer for plan in session.plans.values() if closest_ratio(plan) < _SCALING_ERROR]
    change = f" and may change the plan of {', '.join(close)}" if close else ""
    return [f"{text} by a probe; `plait calibrate` measures it{change}"]


def never_planned(view: Any) -> dict[str, str]:
    """The layers of the model that plait has no rule for."""
    found = {}
    for path, module in view.named_modules():
        cls = module.__class__
        if isinstance(module, MessagePassing) and not is_planned(cls):
            kind = cls.__name__
            has_base = any(is_planned(base) for base in cls.__mro__)
            reason = "forward is its own" if has_base else "plait has no rule for this layer"
            name = f"{path or 'model'} {kind}"
            if name not in view._plait_plan_session.plans:
                found[name] = f"{kind}: {reason}"
    return found
