"""runtime/deferred: a matrix by rows is the whole one to everything in torch, below it and around it."""

from __future__ import annotations

import io
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import APPNP

import plait
from plait.errors import InputError
from tests.runtime import sweep
from tests.runtime.matrices import KINDS, Function, Pair, gradients, pair


def differences(kind: str, with_grad: bool, is_used: bool) -> list[str]:
    """The calls whose result, effect or gradients differ from the plain matrix's."""
    found = []
    for call in sweep.calls():
        both = Pair(kind, with_grad)
        if is_used:
            both.deferred.relu()
            both.is_refused = kind == "twins"  # what one row of a class adds to a gradient is not known then
        try:
            problem = _difference(call, both, with_grad)
        except Exception as error:  # of the comparison: something read it and failed
            problem = f"broke: {error!r}"
        if problem is not None:
            found.append(f"{call.name}{call.args, call.kwargs}: {problem}")
    return found


def _difference(call: sweep.Call, both: Pair, with_grad: bool) -> str | None:
    with torch.set_grad_enabled(with_grad):
        try:
            expected = sweep.run(call, both.plain)
        except Exception:
            return None
        try:
            out = sweep.run(call, both.deferred)
        except InputError as error:
            is_known = call.func in (Tensor.register_hook, Tensor.retain_grad) and both.is_refused
            return None if is_known else f"raised {error!r}"
        except Exception as error:
            return f"raised {error!r}"
    only_kind = sweep.is_uninitialised(call)
    if not sweep.is_alike(out, expected, only_kind):
        return "another result"
    if isinstance(expected, Tensor) and (expected is both.plain) != (out is both.deferred):
        return "another object"
    if not sweep.is_alike(both.deferred, both.plain, only_kind):
        return "another matrix afterwards"
    return None if only_kind else _gradients_differ(both, out, expected)


def _gradients_differ(both: Pair, out: Any, expected: Any) -> str | None:
    for ours, theirs in ((out, expected), (both.deferred, both.plain)):
        if not isinstance(theirs, Tensor) or not theirs.requires_grad or theirs.layout != torch.strided:
            continue
        try:
            wanted = gradients(theirs, both.plain_leaves)
        except Exception:
            continue
        if any(grad is not None and not bool((grad.abs() < 1e6).all()) for grad in wanted):
            continue  # of a function without one here, such as the condition number of a singular matrix
        if not sweep.is_alike(gradients(ours, both.leaves), wanted):
            return "another gradient"
    return None


@pytest.mark.parametrize(("with_grad", "is_used"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_function_of_torch_gives_what_it_gives_for_the_whole(
    kind: str, with_grad: bool, is_used: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert differences(kind, with_grad, is_used) == []


def test_the_sweep_reaches_most_of_torch() -> None:
    assert len({call.name for call in sweep.calls()}) > 950


# Ways in that torch's functions do not see ------------------------------------------------------------------


class Mix(torch.autograd.Function):
    """Mixes rows below torch's functions, keeping its input and whatever it was given."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.flip(0) * h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return grad * h.flip(0) + (grad * h).flip(0)


class Same(torch.autograd.Function):
    """Hands its input out again."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class Doubled(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.mark_dirty(h)
        return h.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def _with_hooks(h: Tensor) -> Tensor:
    layer = nn.Linear(5, 5).double()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(5))
        layer.bias.zero_()
    layer.register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))
    layer.register_full_backward_hook(lambda module, grads, outs: (grads[0].flip(0),))
    out: Tensor = layer(h)
    return out


def _written(h: Tensor) -> Tensor:
    h[torch.tensor([1, 5])] = 0
    return h * 2


def _written_below(h: Tensor) -> Tensor:
    h.data[2:4] = 7
    return h * 2


def _written_by_numpy(h: Tensor) -> Tensor:
    h.detach().numpy()[1] = 3
    return h + 0


def _written_through_a_view(h: Tensor) -> Tensor:
    h[2:5].mul_(0)
    return h.relu()


def _hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * torch.arange(12.0).unsqueeze(1))
    return h.relu() * 2


def _retained(h: Tensor) -> Tensor:
    h.retain_grad()
    (h.relu() * torch.arange(12.0).unsqueeze(1)).sum().backward(retain_graph=True)
    assert h.grad is not None
    return h.grad + h


def _out(h: Tensor) -> Tensor:
    made = torch.empty(12, 5, dtype=torch.float64)
    with torch.no_grad():
        torch.add(h, 1, out=made)
        torch.exp(made, out=h)
    return h * 1


def _saved(h: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"h": h.detach(), "pair": [h]}, file)
    file.seek(0)
    back = torch.load(file)
    assert type(back["h"]) is Tensor
    return h + back["h"] + back["pair"][0].detach()


def _shaped(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.unsqueeze_(0).transpose_(0, 1)
    return h.detach()


def _set(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.set_(torch.ones(2, 3, dtype=torch.float64))  # type: ignore[call-overload]
    return h.detach()


def _again(h: Tensor) -> Tensor:
    out: Tensor = Same.apply(h)  # type: ignore[no-untyped-call]
    return out.relu() + h


def _checkpointed(is_reentrant: bool, function: Function) -> Function:
    def run(h: Tensor) -> Tensor:
        out: Tensor = checkpoint(function, h, use_reentrant=is_reentrant)
        return out * 2

    return run


WAYS: dict[str, Function] = {
    "a function of its own": Mix.apply,
    "a function that changes nothing": lambda h: Same.apply(h).relu(),  # type: ignore[no-untyped-call]
    "that, and the matrix": _again,
    "a function in place": lambda h: Doubled.apply(h) + h,  # type: ignore[no-untyped-call]
    "backward hooks of modules": _with_hooks,
    "written": _written,
    "written by .data": _written_below,
    "written by numpy": _written_by_numpy,
    "written through a view": _written_through_a_view,
    "masked": lambda h: h.masked_fill_(h > 0.7, 0.0) * 2,
    "activated in place": lambda h: functional.relu(h - 0.5, inplace=True) + h.relu_(),
    "added to in place": lambda h: h.mul_(2).add_(torch.arange(5.0)).sub_(torch.ones(12, 5)),
    "hook": _hooked,
    "retained gradient": _retained,
    "out=": _out,
    "saved": _saved,
    "new shape in place": _shaped,
    "set_": _set,
    "keyword": lambda h: functional.linear(input=h, weight=torch.ones(3, 5).double()),
    "keyword, other": lambda h: torch.mul(other=h, input=torch.rand(12, 5, generator=rng())),
    "reentrant checkpoint": _checkpointed(True, lambda h: (h.softmax(0) * h).relu()),
    "checkpoint": _checkpointed(False, lambda h: (h.softmax(0) * h).relu()),
    "reentrant checkpoint by rows": _checkpointed(True, torch.relu),
    "dlpack": lambda h: torch.from_dlpack(h.detach()) + h,
    "numpy": lambda h: torch.from_numpy(np.asarray(h.detach())) * h,
    "collated": lambda h: torch.utils.data.default_collate([h, h])[1],
    "compiled": lambda h: torch.compile(lambda a: a.relu() + a.mean(0), backend="eager")(h),
    "traced": lambda h: torch.jit.trace(lambda a: a.relu() + a.mean(0), h.detach())(h),
    "vmap": lambda h: torch.func.vmap(lambda row: row * row.sum())(h),
    "jacobian": lambda h: torch.func.vjp(lambda a: a * a.sum(0), h)[1](torch.ones(12, 5).double())[0] + h,
    "weak": lambda h: weakref.ref(h)().mul_(2) + h,  # type: ignore[misc]
    "saved tensor hooks": lambda h: _packed(h),
}


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def _packed(h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        return h * h.exp()


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WAYS)
def test_other_ways_in(name: str, kind: str, is_used: bool) -> None:
    both = pair(kind)
    if is_used and name in ("hook", "retained gradient") and kind == "twins":
        pytest.skip("refused, with the reason: test_folded")
    first = both.deferred.tanh() if is_used else None
    other = both.plain.tanh() if is_used else None
    expected, out = WAYS[name](both.plain), WAYS[name](both.deferred)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(both.deferred, both.plain)
    if first is not None and other is not None:
        torch.testing.assert_close(first, other)
        out, expected = out.sum() + first.sum(), expected.sum() + other.sum()
    if expected.requires_grad:
        ours, theirs = gradients(out, both.leaves), gradients(expected, both.plain_leaves)
        for mine, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, their)


def test_gradients_of_the_whole_may_be_differentiated_again() -> None:
    """A hook on the layer's output reaches the whole matrix; its second derivatives had been 0, unsaid."""
    edge_index, x = torch.randint(0, 5, (2, 9)), torch.randn(5, 4)
    model = nn.ModuleDict({"conv": APPNP(2, 0.1)})
    model.forward = lambda x, edge_index: model["conv"](x, edge_index[:, ::2])  # type: ignore[method-assign]
    model["conv"].register_full_backward_pre_hook(lambda module, grads: tuple(2 * g for g in grads))
    rows = torch.arange(5) % 2 == 1
    compiled = plait.compile(model, Data(x=x, edge_index=edge_index), rows=rows, mode="training")

    def curvature(called: Any) -> Tensor:
        loss = lambda x: called(x, edge_index).tanh().sum()  # noqa: E731
        return torch.autograd.functional.hvp(loss, x, torch.ones_like(x))[1]

    expected = curvature(model)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(curvature(compiled), expected)
