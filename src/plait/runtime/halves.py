"""Runs a layer over ranks in two halves: rows without remote neighbours are handed out before the halo came.

The result is a matrix that holds those rows (`runtime/deferred.py`); row-wise functions of it are computed
from them at once, and from the other rows when something needs the whole, which then waits for the halo. For
autograd the layer is two nodes. The one of the other rows is made last, so its gradient is computed first,
and it starts sending the gradients of the halo; the rest of the backward pass waits for the other node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import InputError
from plait.plan.halves import Halves
from plait.runtime.chain import Env, turned
from plait.runtime.constants import SparseValue
from plait.runtime.deferred import Deferred, Source
from plait.runtime.executor import Inputs, Run, in_torch, stored
from plait.runtime.twice import differentiable, is_vmapped
from plait.runtime.wanted import Kept

__all__ = ["Ahead", "Cut", "ahead", "rows_ahead"]


class Cut:
    """The rows of a rank: the first `count` of `num_rows` have no remote neighbours."""

    def __init__(self, count: int, num_rows: int):
        self.count, self.num_rows = count, num_rows
        # none is given away alone: the gradients of all rows are needed, on every rank
        self.place = torch.full((num_rows,), -1)

    @classmethod
    def of(cls, remote: SparseValue) -> Cut:
        """The rows before the first with an entry in the product with the halo."""
        pointer = remote.graph.indptr
        return cls(int(np.searchsorted(pointer, 1)) - 1, remote.graph.num_nodes)

    def is_all_of(self, index: Tensor) -> bool:
        """False: see `place`."""
        return False


@dataclass(eq=False)
class _Call:
    """One call of a layer between its two halves, and between those of its backward pass."""

    run: Run
    halves: Halves
    cut: Cut
    layout: Inputs
    let_go: Callable[[Iterable[Any]], None]
    env: Env | None = None  # of the forward pass, until it is over
    came: dict[str, Any] = field(default_factory=dict)  # values of the second half for the backward pass
    back: Env | None = None  # of the backward pass, between its halves
    sources: weakref.WeakSet[Ahead] = field(default_factory=weakref.WeakSet)

    def begin(self, inputs: Sequence[Tensor]) -> Env:
        """The first half, after which the first rows of the result are final."""
        env = self.env = Env(zip(self.layout.names, inputs, strict=True))
        env.update(self.run.hoisted)
        self.run.forward(env, slice(0, self.halves.forward))
        return env

    def finish(self) -> Tensor:
        """The second half, once the halo is here: the result."""
        env, self.env = self.env, None
        assert env is not None
        self.run.forward(env, slice(self.halves.forward, None))
        first = self.saved_first
        self.came = {name: env[name] for name in self.run.outline.held if name not in first}
        result: Tensor = env[self.run.plan.forward.outputs[0]]
        return result

    @property
    def saved_first(self) -> tuple[str, ...]:
        """Values of the first half that the backward pass reads."""
        made = {name for step in self.halves.steps(self.run.plan) for name in (step.out, *step.more)}
        return tuple(name for name in self.run.outline.held if name in made)

    def begin_back(self, grad: Tensor, known: Mapping[str, Any]) -> Env:
        """Given the gradient of the other rows, sends those of the halo."""
        env = self.back = Env(self.layout.blank)
        env.update(self.run.hoisted)
        env.update(known)
        # the rows above are not read yet
        whole = env["grad"] = self.run.buffers.take(self.cut.num_rows, grad.shape[1], grad.dtype)
        whole[self.cut.count :] = grad
        self.run.backward(env, slice(0, self.halves.backward))
        return env

    def finish_back(self, grad: Tensor, other: Tensor, known: Mapping[str, Any]) -> list[Tensor | None]:
        """The gradients of all inputs, given those of the first rows and the others."""
        env = self.back or self.begin_back(other, known)
        self.back = None
        env["grad"][: self.cut.count] = grad
        env.update(known)
        env.update(self.came)
        self.run.backward(env, slice(self.halves.backward, None))
        if not _is_graph_kept():
            self.came = {}
        return self.layout.gradients(env)

    def is_early(self) -> bool:
        """Whether the gradient of the other rows comes at once, in one piece."""
        return all(source.below is None for source in self.sources)

    def __del__(self) -> None:
        for env in (self.env, self.back):
            if env is not None:
                self.let_go(env.values())


def _is_graph_kept() -> bool:
    """Whether another backward pass through the same graph may follow."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


def _in_torch(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    layout: Inputs = ctx.call.layout
    known = dict(zip(layout.keys[: len(layout.saved)], saved, strict=False))
    out, inputs = in_torch(ctx.call.run, layout, known, grad)
    return out, (None, *inputs)


class _First(torch.autograd.Function):
    """The rows without remote neighbours, and what is known of the others."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        env, first = call.begin(inputs), call.saved_first
        ctx.call, ctx.keys = call, (*call.layout.keys[: len(call.layout.saved)], *first)
        ctx.save_for_backward(*(inputs[k] for k in call.layout.saved), *(env[name] for name in first))
        # its writes are counted apart: those to the other rows, later, are none to the first
        own = env[call.halves.own].data
        return own[: call.cut.count], own[call.cut.count :]

    @staticmethod
    @differentiable(_in_torch)
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        known = dict(zip(ctx.keys, ctx.saved_tensors, strict=True))
        return (None, *ctx.call.finish_back(grad, other, known))


class _Other(torch.autograd.Function):
    """The other rows, once the halo is here; their gradient is that of what was known of them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, names: tuple[str, ...], known: Tensor, *weights: Tensor) -> Tensor:
        ctx.call, ctx.names = call, names
        ctx.save_for_backward(*weights)
        return call.finish().data[call.cut.count :]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if not torch.is_grad_enabled() and not is_vmapped(grad) and call.is_early():
            with torch.autocast(grad.device.type, enabled=False):
                call.begin_back(grad, dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
        return (None, None, grad, *(None for _ in ctx.names))


class _Joined(torch.autograd.Function):
    """Both parts in one matrix, to which the first was copied before."""

    @staticmethod
    def forward(ctx: Any, place: list[Tensor], first: Tensor, others: Tensor) -> Tensor:
        whole, ctx.count = place[0], first.shape[0]
        whole[ctx.count :] = others
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, grad[: ctx.count], grad[ctx.count :]


class _Used(Source):
    """Of a matrix that is whole, after functions of some of its rows were computed."""

    def __init__(self, source: Source):
        super().__init__()
        self.is_used, self.version, self.rows = True, source.version, source.rows

    @property
    def held(self) -> Tensor:  # type: ignore[override]
        """Not there any more."""
        return self.spread(torch.empty(0))

    def spread(self, grad: Tensor) -> Tensor:
        """Not known: the gradients of the rows come apart."""
        raise InputError(
            "the gradient with respect to a layer's result over ranks is not known once functions of it were "
            "computed; ask for it (register_hook, retain_grad) right after the layer"
        )


class Ahead(Source):
    """The rows without remote neighbours; `make` gives the others, which wait for the halo."""

    rows: Cut
    watch = None

    def __init__(
        self,
        held: Tensor,
        rows: Cut,
        make: Callable[[], Tensor],
        origins: tuple[Tensor, ...],
        calls: tuple[_Call, ...],
    ):
        super().__init__()
        self.held, self.rows, self.others = held, rows, make
        self.origins, self.calls = origins, calls  # what the other rows' gradients reach, and whose rows
        self.inputs = (*((held,) if held.requires_grad else ()), *origins)
        for call in calls:
            call.sources.add(self)

    def whole(self) -> Tensor:
        """All rows; the halo is awaited."""
        place = self.calls[0].run.buffers.take(self.rows.num_rows, self.held.shape[1], self.held.dtype)
        with torch.no_grad():
            place[: self.rows.count] = self.held
        whole: Tensor = _Joined.apply([place], self.held, self.others())  # type: ignore[no-untyped-call]
        return whole

    def then(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], held: Tensor
    ) -> Ahead:
        """A function's rows; those of the others are computed when they are there."""
        places, named = _kept(args), {name: _kept(value) for name, value in kwargs.items()}

        def make() -> Tensor:
            out: Tensor = func(*_others(places), **{name: _others(value) for name, value in named.items()})
            return out

        parts = [*_parts((places, *named.values()))]
        sources = [part for part in parts if isinstance(part, Ahead)]
        origins = [tensor for source in sources for tensor in source.origins]
        origins += [part.value for part in parts if isinstance(part, Kept) and part.value.requires_grad]
        calls = tuple(dict.fromkeys(call for source in sources for call in source.calls))
        return Ahead(held, self.rows, make, tuple(origins), calls)

    def once_whole(self) -> Source:
        """Nothing but that rows were used: the parts need not stay in memory beside the whole."""
        return _Used(self)

    def spread(self, grad: Tensor) -> Tensor:
        """Not known: the gradient of the other rows comes apart."""
        return _Used(self).spread(grad)

    def special(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dropout may draw for some rows now and for the others later: all of them are used."""
        if func is not functional.dropout or not args or not isinstance(args[0], Deferred):
            return NotImplemented
        held = func(self.held, *args[1:], **kwargs)
        return Deferred.of(self.then(func, args, kwargs, held))


def _kept(value: Any) -> Any:
    """An argument as it is now, for the other rows."""
    if isinstance(value, Deferred):
        return value.source
    if isinstance(value, Tensor):
        return Kept(value)
    return type(value)(map(_kept, value)) if type(value) in (tuple, list) else value


def _parts(value: Any) -> Iterator[Any]:
    """What is kept, out of tuples and lists."""
    if type(value) in (tuple, list):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def _others(value: Any) -> Any:
    if isinstance(value, Ahead):
        return value.others()
    if isinstance(value, Kept):
        return value.again()
    return type(value)(map(_others, value)) if type(value) in (tuple, list) else value


def ahead(
    run: Run,
    halves: Halves,
    cut: Cut,
    inputs: Mapping[str, Tensor],
    let_go: Callable[[Iterable[Any]], None],
) -> Tensor:
    """The value of a planned expression over ranks as a matrix that holds its first rows.

    `let_go` is called with values among which rows may be that are under way and will not be read.
    """
    names, values = stored(inputs)
    layout = run.layouts.get(names) or run.layout(names, values)
    call = _Call(run, halves, cut, layout, let_go)
    held, known = _First.apply(call, *values)  # type: ignore[no-untyped-call]
    known = known.view_as(known)  # gradients asked for by it pass no node that the held rows come from
    read = [k for k, name in enumerate(names) if not halves.reads.isdisjoint((name, turned(name)))]
    made: list[Tensor] = []

    def others() -> Tensor:
        if not made:
            with torch.enable_grad():
                weights = [values[k] for k in read]
                made.append(_Other.apply(call, tuple(names[k] for k in read), known, *weights))  # type: ignore[no-untyped-call]
        return made[0]

    return Deferred.of(Ahead(held, cut, others, (known,), (call,)))


def rows_ahead(value: Any) -> Ahead | None:
    """The rows that a matrix holds before its halo is here, to compute with; None for any other value."""
    if not isinstance(value, Deferred) or not isinstance(value.source, Ahead) or not value.is_held():
        return None
    value.source.is_used = True
    return value.source
