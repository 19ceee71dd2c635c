"""Whole calls of a layer on a GPU, replayed: its forward pass is one CUDA graph, its backward pass another.

Programs are replayed as they are (runtime/replayed.py), but around them a layer looks at its options, folds
its weights and finds its plan: on the host of an H200 a training step of GATConv took 2.0 ms so, most of it
for small launches of parameter algebra and their gradients. A call that keeps coming back, of a layer that
did not change, on the same edges and at the same addresses, is captured as a whole and replayed. Results lie
in memory of the capture, which is overwritten only when nothing holds it any more. If anything differs from
the capture the call runs normally, and so does a backward pass that is differentiated again.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.dense.linear import Linear

from plait.plan.search import search
from plait.pyg.active import Seat
from plait.pyg.layers.base import has_hooks, is_lazy
from plait.pyg.recall import Layer, call_key
from plait.runtime.edges import Edges
from plait.runtime.executor import Run
from plait.runtime.identity import counts_writes
from plait.runtime.replayed import Captured, at_address, capture_call, side_stream
from plait.runtime.session import Session
from plait.runtime.trace import is_profiling
from plait.runtime.twice import again, differentiable

__all__ = ["Recorder", "is_on_gpu", "replayed"]

is_on_gpu = operator.attrgetter("is_cuda")

_REPEATS = 3  # calls at the same addresses before a capture
_MOST_SEEN = 32
_MOST_PLACES = 4  # addresses of one call; inputs that lie elsewhere each time are not worth it
_MOST_FAILURES = 2
_MOST_STATES = 16  # of one layer; one that keeps changing is not looked at any more
_MOST_EDGES = 1 << 24  # larger graphs take longer to compute than to issue
_MOST_BYTES = 256 << 20  # of a result, as above
_TWICE_BYTES = 32 << 20  # results up to this size are captured twice: loops hold the last one while they run
_PARTS = (Linear, nn.Linear, nn.Sequential, nn.ModuleList, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU,
          nn.Tanh, nn.Sigmoid, nn.Identity)  # fmt: skip
"""Modules inside a layer that compute the same at every call and keep no state."""

Plain = Callable[[Tensor], Any]
"""The call as usual, on these features."""
Capture = Callable[[Callable[[], Sequence[Tensor | None]], Any], tuple[Captured, list[Any]]]
"""(what to capture, stream) -> (it, the programs that ran in it)."""


@dataclass(slots=True)
class Seen:
    """What is known about one layer's calls on a GPU."""

    counts: dict[Any, int] = field(default_factory=dict)
    states: dict[bool, Layer] = field(default_factory=dict)  # of layers that are not matrix expressions
    num_states: int = 0
    failures: dict[Any, int] = field(default_factory=dict)  # by call: capture failed, or is ruled out
    is_off: bool = field(default_factory=lambda: os.environ.get("PLAIT_REPLAY", "") == "0")

    def fail(self, key: Any, times: int = 1) -> None:
        """Note that capturing this call failed; the count towards the next attempt starts again."""
        if len(self.failures) >= _MOST_SEEN:
            self.failures.clear()
        self.failures[key] = self.failures.get(key, 0) + times
        self.counts.clear()


def replayed(
    session: Session, seat: Seat, module: nn.Module, known: Layer | None, args: tuple[Any, ...], plain: Plain
) -> Tensor | None:
    """The result of a layer's call (x, edge_index), replayed; None where it has to run as usual.

    `known`: the layer as it was when it was lowered and still is; None for one that is not lowered so.
    """
    seen = seat.seen_on_gpu
    if seen is None:
        seen = seat.seen_on_gpu = Seen()
    x = args[0]
    if seen.is_off or not _is_usual(session, seat) or not x.numel():
        return None
    state = known if known is not None else _state(seen, module)
    key = None if state is None else call_key(state.token, args, {})
    if state is None or key is None or seen.failures.get(key, 0) >= _MOST_FAILURES:
        return None
    if state.num_scheduled:  # numbers that come from the layer's options are part of what is recorded
        key = (*key, state.num_scheduled)
    recorder: Recorder | _Waiting = session.recall(("recorded", *key)) or _Waiting(seen, key)
    place = _place(x, state)
    found = recorder.recording(place, x)
    if found is not None:
        return found.run(x, plain)
    if recorder.is_off or not recorder.is_due(place):
        return None
    if isinstance(recorder, _Waiting):
        if not may_be_recorded(module, state, args[1]):
            seen.fail(key, _MOST_FAILURES)
            return None
        recorder = Recorder(state.parameters)
    made = recorder.record(place, module, x, plain)
    edges = None if made is None else _edges_of(session, made.runs)
    if made is None or edges is None:
        seen.fail(key)
        return None
    session.keep(("recorded", *key), edges, recorder)
    return made.run(x, plain)


def _is_usual(session: Session, seat: Seat) -> bool:
    """Whether a replay is allowed: no clocks, profilers, hooks, limits or enclosing CUDA graphs."""
    is_training = torch.is_grad_enabled()
    return (
        session.trace is None
        and session.options.memory_limit is None
        and session.choose is search
        and not session.may_defer
        and not (is_training and (seat.is_overwritten is not False or torch.is_anomaly_enabled()))
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not is_profiling()
        and not _is_capturing()
    )


def _is_capturing() -> bool:
    """Whether torch records a CUDA graph in this thread."""
    return bool(torch.cuda.is_current_stream_capturing())


def _state(seen: Seen, module: nn.Module) -> Layer | None:
    """The state of the layer now; None for a layer that keeps changing."""
    state = seen.states.get(module.training)
    if state is None or not state.is_as_it_was(module):
        seen.num_states += 1
        if seen.num_states > _MOST_STATES:
            seen.is_off = True
            return None
        state = seen.states[module.training] = Layer(module)
    return state


def may_be_recorded(module: nn.Module, state: Layer, edges: Tensor) -> bool:
    """Whether a call of the layer does the same each time, and all of it on the device."""
    if edges.shape[1] > _MOST_EDGES or is_lazy(module):
        return False
    if module.training and float(getattr(module, "dropout", 0.0) or 0.0) > 0.0:
        return False  # drawn by the host at every call
    parts = [*module.modules()]
    if any(has_hooks(part) for part in parts) or not isinstance(module, MessagePassing):
        return False
    if any(not isinstance(part, (*_PARTS, Aggregation)) for part in parts[1:]):
        return False
    # gradients are asked for inside: hooks would see them, and they are those of the parameters alone
    are_leaves = all(p.is_leaf and p.requires_grad and not p._backward_hooks for p in state.parameters)
    return are_leaves and all(counts_writes(b) and not b.requires_grad for b in state.others())


def _place(x: Tensor, state: Layer) -> tuple[Any, ...]:
    """Where a call's tensors lie, and what else a recording treats as constant."""
    return (
        x.data_ptr(), x.stride(), x.requires_grad, torch.is_grad_enabled(), _settings(x),
        *[(p.data_ptr(), p.requires_grad) for p in state.parameters],
        *[(b.data_ptr(), b.requires_grad, counts_writes(b) and b._version) for b in state.others()],
    )  # fmt: skip


def _settings(x: Tensor) -> tuple[Any, ...]:
    """The stream, and whether products may round to TF32."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()), torch._C._get_cublas_allow_tf32()


def _edges_of(session: Session, runs: Sequence[Run]) -> Edges | None:
    """The graph that these programs ran on: recordings are forgotten with it."""
    own = {id(run) for run in runs}
    for edges in session.edges.values():
        if any(id(run) in own for run in edges.runs.values()):
            return edges
    return None


class _Waiting:
    """Stands for a recorder while the same call is counted."""

    is_off = False

    def __init__(self, seen: Seen, key: tuple[Any, ...]):
        self._counts, self._key = seen.counts, key

    def recording(self, place: Any, x: Tensor) -> None:
        """None yet."""

    def is_due(self, place: Any) -> bool:
        """Whether the call came often enough."""
        return _is_due(self._counts, (self._key, place))


def _is_due(counts: dict[Any, int], key: Any) -> bool:
    if len(counts) >= _MOST_SEEN:
        counts.clear()
    counts[key] = counts.get(key, 0) + 1
    return counts[key] > _REPEATS


class Recorder:
    """The recordings of one layer's calls on one graph, by where their tensors lie."""

    # what tests without a GPU replace
    capture: Capture = staticmethod(capture_call)
    stream: Callable[[torch.device], Any] = staticmethod(side_stream)
    at: Callable[[Tensor], Tensor] = staticmethod(at_address)

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = parameters
        self._places: dict[Any, list[_Recording]] = {}
        self._counts: dict[Any, int] = {}
        self._failures = 0
        self.is_off = False
        self._lock = threading.Lock()

    def recording(self, place: Any, x: Tensor) -> _Recording | None:
        """One that was captured for this place and is free now."""
        if self.is_off:
            self._places.clear()
        for found in self._places.get(place, ()):
            if found.reads(x):
                with self._lock:
                    if found.take():
                        return found
            else:
                self.fail()
                self._places.pop(place, None)
                break
        return None

    def fail(self) -> None:
        """Note a failed capture; after a few of them nothing is captured any more."""
        self._failures += 1
        self.is_off = self._failures >= _MOST_FAILURES

    def is_due(self, place: Any) -> bool:
        """Whether one more should be captured for this place."""
        there = self._places.get(place)
        if there is not None:
            return len(there) < 2 and there[0].nbytes <= _TWICE_BYTES
        return len(self._places) < _MOST_PLACES and _is_due(self._counts, place)

    def record(self, place: Any, module: nn.Module, x: Tensor, plain: Plain) -> _Recording | None:
        """The call captured; None where it cannot be, for now or (is_off) at all."""
        try:
            made = _Recording(self, module, x, plain)
        except (RuntimeError, _CannotRecordError):
            self.fail()
            return None
        self._places.setdefault(place, []).append(made)
        with self._lock:
            made.take()
        return made


class _CannotRecordError(Exception):
    """The call cannot be replayed."""


class _Turn:
    """Held by the autograd node of a replayed call: while it is there, its backward pass may come."""

    __slots__ = ("__weakref__",)


class _Recording:
    """A call captured: two graphs, the memory they write to, and the programs they were made of."""

    def __init__(self, owner: Recorder, module: nn.Module, x: Tensor, plain: Plain):
        self._owner, self._stream = owner, owner.stream(x.device)
        is_training = torch.is_grad_enabled()
        self._wants_x = is_training and x.requires_grad
        # an input that needs no gradient may be treated as constant: products of it are made once
        self._seen = None if self._wants_x else (weakref.ref(x), x._version)
        # leaves of the capture's own: those of the model belong to the stream that trains it
        self._buffers = [*module.buffers()]  # read at their addresses, where nothing else may come to lie
        self._x: Tensor | None = owner.at(x).requires_grad_() if self._wants_x else x
        self._leaves = {id(p): nn.Parameter(p.detach()) for p in owner.parameters} if is_training else {}
        self._result: Tensor | None = None
        given = self._x

        def body() -> list[Tensor]:
            with _replaced(module, self._leaves):
                out = plain(given)
            if type(out) is not Tensor:
                raise _CannotRecordError
            self._result = out
            return [out]

        self._forward, self.runs = owner.capture(body, self._stream)
        result = cast(Tensor, self._result)
        self._is_trained, self.nbytes = is_training and result.requires_grad, result.nbytes
        del result
        # what a backward pass needs of the graph must not be made inside a capture
        is_known = _ran_before(self.runs, is_training)
        is_apart = self._forward.is_apart_from([x, *owner.parameters])
        if not (is_known and is_apart) or self.nbytes > _MOST_BYTES:
            raise _CannotRecordError
        if not self._is_trained:
            self._result = self._x = None
        self._forward.settle()
        self._backward: dict[Any, Captured | None] = {}
        self._turn: Any = None
        self._number = 0
        self._buffer: Tensor | None = None
        self.hands_copies = False

    def reads(self, x: Tensor) -> bool:
        """Whether it was made for this very input, where that may have been treated as constant."""
        return self._seen is None or (self._seen[0]() is x and self._seen[1] == x._version)

    def take(self) -> bool:
        """Takes the memory if the results of the last call are no longer needed; whether it did."""
        if (self._turn is not None and self._turn() is not None) or not self._forward.is_free():
            return False
        self._number += 1
        return True

    def run(self, x: Tensor, plain: Plain) -> Tensor:
        """The result of the call, recorded by autograd where gradients are wanted; `take` it first."""
        if not self._is_trained:
            return self.forward()
        return _Replay.apply(self, plain, x, *self._owner.parameters)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self) -> Tensor:
        """The result, computed now."""
        place = self._forward.made[0]
        assert place is not None
        made = place.tensor()
        self._forward.replay()
        return made.clone() if self.hands_copies else made

    def begin(self) -> tuple[_Turn, int]:
        """(held until the backward pass, the number of the call)."""
        turn = _Turn()
        self._turn = weakref.ref(turn)
        return turn, self._number

    def backward(self, number: int, grad: Tensor) -> Sequence[Tensor | None] | None:
        """The gradients of x and the parameters; None where a later call has overwritten what they need."""
        if number != self._number:
            return None
        found = self._captured(grad)
        self._turn = None
        if found is None or not found.is_free():
            return self._gradients(grad)
        made = [None if place is None else place.tensor() for place in found.made]
        found.replay()
        return made

    def _captured(self, grad: Tensor) -> Captured | None:
        """The backward pass of a gradient that lies there, or of a copy where it lies elsewhere each time."""
        key = (grad.data_ptr(), grad.stride(), _settings(grad))
        found = self._backward.get(key)
        if found is None and not self._backward:
            found = self._backward[key] = self._capture(grad)
        if found is not None:
            return found
        copied = (None, _settings(grad))
        if self._buffer is None:
            self._buffer = torch.empty_like(grad, memory_format=torch.contiguous_format)
        self._buffer.copy_(grad)
        if copied not in self._backward:
            self._backward[copied] = self._capture(self._buffer)
        return self._backward[copied]

    def _capture(self, grad: Tensor) -> Captured | None:
        try:
            captured, _ = self._owner.capture(lambda: self._gradients(grad), self._stream)
        except RuntimeError:
            self._owner.is_off = True
            return None
        others = [value for value in (grad, self._x, self._result) if value is not None]
        if not captured.is_apart_from([*others, *self._owner.parameters]):
            self._owner.is_off = True
            return None
        captured.settle()
        return captured

    def _gradients(self, grad: Tensor) -> Sequence[Tensor | None]:
        """The same by autograd, from what the forward pass left."""
        assert self._result is not None
        leaves: list[Tensor] = [self._leaves[id(p)] for p in self._owner.parameters]
        wanted = leaves if self._x is None or not self._wants_x else [self._x, *leaves]
        found = torch.autograd.grad(self._result, wanted, grad, retain_graph=True, allow_unused=True)
        return found if self._wants_x else (None, *found)


@contextmanager
def _replaced(module: nn.Module, leaves: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """The layer with other leaves in the same memory for its parameters."""
    owners = [
        (part._parameters, name, p) for part in module.modules() for name, p in part._parameters.items()
    ]
    swapped = [(own, name, p) for own, name, p in owners if id(p) in leaves]
    try:
        for own, name, p in swapped:
            own[name] = leaves[id(p)]
        yield
    finally:
        for own, name, p in swapped:
            own[name] = p


def _ran_before(runs: Sequence[Run], is_training: bool) -> bool:
    """Whether these programs, and those of their gradients, ran on this graph outside a capture."""
    return bool(runs) and all(
        not is_training or run.plan.backward is None or run._backward is not None for run in runs
    )


def _matrices(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parameters that gradients depend on: no bias, which may change before the backward pass."""
    return (p for p in parameters if p.dim() > 1)


class _Replay(torch.autograd.Function):
    """A replayed call as one node of torch's graph."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, plain: Plain, x: Tensor, *parameters: Tensor) -> Tensor:
        out = recording.forward()
        ctx.recording, ctx.plain, ctx.parameters = recording, plain, parameters
        ctx.turn, ctx.number = recording.begin()
        ctx.out = None if recording.hands_copies else (out.detach(), out._version)
        ctx.save_for_backward(x, *_matrices(parameters))
        return out

    @staticmethod
    @differentiable(lambda ctx, grad, saved: _in_torch(ctx, grad, saved))
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018  says so where one of them was written to since
        recording, made = ctx.recording, None
        if ctx.out is None or ctx.out[0]._version == ctx.out[1]:
            ctx.out = None
            made = recording.backward(ctx.number, grad)
        else:  # callers write to the result before the backward pass reads it: from now on they get copies
            recording.hands_copies, ctx.out = True, None
        ctx.turn, ctx.number = None, -1  # a second backward pass finds the result unguarded
        return again(ctx, grad, _in_torch) if made is None else (None, None, *made)


def _in_torch(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """The call as usual on the same inputs, for gradients that a replay does not give."""
    return ctx.plain(saved[0]), (None, None, saved[0], *ctx.parameters)
