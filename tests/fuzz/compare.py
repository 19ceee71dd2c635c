"""In what the compiled model's world differs from PyG's after a call, beyond what rounding explains.

The rule has two steps. An answer within TOLERANCE of PyG's, as a share of the largest number of the result,
is right. Any other is right where its distance from the exact answer is at most that tolerance and AS_FAR
times the distance that PyG's own answers have (tests/fuzz/rounding.py). NaN and infinities stand where PyG
has them; elsewhere they are right only where the range of the type is exceeded: PyG meets NaN that it does
not meet in double precision, or it passes there within REACH of the largest number of the type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.rounding import Known
from tests.fuzz.worlds import INPUTS, dense, gradients, largest, leaves, modes, state

__all__ = ["AUTOCAST", "TOLERANCE", "compared", "differences", "with_nan_of"]

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
AUTOCAST = TOLERANCE[torch.bfloat16]  # the type that scripts ask for
SMALLEST = 1e-3  # numbers below are differences of larger ones
AS_FAR = 4.0  # a plan rounds at other places than PyG


def differences(
    theirs: dict[str, Any],
    ours: dict[str, Any],
    tolerance: float,
    has_nan: bool,
    known: Known | None = None,
) -> Iterator[str]:
    """In what the two worlds differ after a call: results, inputs, gradients, state.

    With NaN written by the script, gradients and states are compared where neither world has NaN: see
    `with_nan_of`. Without `known`, the first step of the rule alone.
    """

    def parts(name: str, wanted: Any, given: Any, scale: float = 0.0) -> Iterator[str]:
        return compared(name, wanted, given, tolerance, scale, known)

    several = [largest(value) for _, value in leaves("out", theirs["out"])]
    yield from parts("out", theirs["out"], ours["out"], 0.1 * max(several, default=0.0))
    for name in INPUTS:
        yield from parts(name, theirs.get(name), ours.get(name))
    wanted, given = gradients(theirs), gradients(ours)
    # a gradient that vanishes but for rounding is measured by the largest one
    scale = 0.1 * max([1.0, *(largest(g) for g in wanted.values())])
    if list(wanted) != list(given):
        yield f"parameters are {list(given)}, not {list(wanted)}"
        return
    for name, gradient in wanted.items():
        yield from parts(f"gradient of {name}", gradient, with_nan_of(gradient, given[name], has_nan), scale)
    held = state(theirs)
    yield from parts("state", held, with_nan_of(held, state(ours), has_nan))
    yield from parts("modes", modes(theirs), modes(ours))


def with_nan_of(wanted: Any, given: Any, has_nan: bool) -> Any:
    """What was given, without the NaN that another association of the same product has elsewhere.

    A row or a gradient that is 0 by algebra is 0 * NaN by one association and nothing by another. Where
    nobody wrote a NaN there may be fewer of them than PyG has, never more.
    """
    if isinstance(wanted, Tensor) and isinstance(given, Tensor):
        if wanted.shape != given.shape or not wanted.is_floating_point() or wanted.layout != torch.strided:
            return given
        free = wanted.isnan() | given.isnan() if has_nan else wanted.isnan()
        return given.where(~free, wanted) if free.any() else given
    if isinstance(wanted, dict) and isinstance(given, dict) and list(wanted) == list(given):
        return {name: with_nan_of(part, given[name], has_nan) for name, part in wanted.items()}
    if isinstance(wanted, tuple | list) and isinstance(given, tuple | list) and len(wanted) == len(given):
        return type(wanted)(with_nan_of(*pair, has_nan) for pair in zip(wanted, given, strict=True))
    return given


def compared(
    name: str,
    wanted: Any,
    given: Any,
    tolerance: float,
    scale: float = 0.0,
    known: Known | None = None,
) -> Iterator[str]:
    """In what two values differ, part by part; `scale` is the least magnitude a difference is a share of."""
    expected, found = dict(leaves(name, wanted)), dict(leaves(name, given))
    if list(expected) != list(found):
        yield f"{name} has parts {list(found)}, not {list(expected)}"
        return
    for part, value in expected.items():
        problem = _differs(part, value, found[part], tolerance, scale, known)
        if problem:
            yield f"{part}: {problem}"


def _differs(part: str, wanted: Any, given: Any, tolerance: float, scale: float, known: Known | None) -> str:
    if not isinstance(wanted, Tensor) or not isinstance(given, Tensor):
        is_same = not isinstance(wanted, Tensor) and not isinstance(given, Tensor) and wanted == given
        return "" if is_same else f"{given}, not {wanted}"
    for what in ("requires_grad", "dtype", "shape", "layout"):
        if getattr(wanted, what) != getattr(given, what):
            return f"{what} is {getattr(given, what)}, not {getattr(wanted, what)}"
    wanted, given = dense(wanted), dense(given)
    if not wanted.is_floating_point():
        return "" if wanted.equal(given) else f"{given.tolist()}, not {wanted.tolist()}"
    exact, allowed = wanted.double(), 0.0
    if known is not None:
        exact, allowed = _exact(part, exact, known), AS_FAR * known.apart.get(part, 0.0)
    allowed += max(TOLERANCE[wanted.dtype], tolerance) * max(largest(exact), scale, SMALLEST)
    is_right = torch.isclose(given.double(), exact, rtol=0.0, atol=allowed, equal_nan=True)
    if known is not None:
        is_right |= torch.isclose(given.double(), wanted.double(), rtol=0.0, atol=0.0, equal_nan=True)
        if known.overflows:
            is_right |= ~(wanted.isfinite() & given.isfinite())
    if is_right.all():
        return ""
    off = largest(given.double() - exact)
    return f"off by {off:.2g} where {allowed:.2g} is allowed:\n{given}\nPyG:\n{wanted}"


def _exact(part: str, wanted: Tensor, known: Known) -> Tensor:
    """The exact numbers where they are numbers, PyG's own elsewhere."""
    exact = known.exact.get(part)
    if exact is None or exact.shape != wanted.shape:
        return wanted
    return exact.where(exact.isfinite() & wanted.isfinite(), wanted)
