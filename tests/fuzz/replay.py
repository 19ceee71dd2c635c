"""Runs a script line by line twice, in PyG and compiled, and compares everything a user could look at.

In the first world `plait.compile` returns the model it is given; nothing of one world is in the other.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex

import plait
from tests.fuzz import parts

__all__ = ["Difference", "Tally", "replay"]

# The largest difference allowed, as a share of the largest number compared with; gradients may lose a digit
# more. A batch norm over rows that are nearly equal costs float32 three digits.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
SMALLEST = 1e-3  # numbers below are differences of larger ones
_SHARED = {
    **{name: value for name, value in vars(torch_geometric.nn).items() if isinstance(value, type)},
    **{name: getattr(parts, name) for name in parts.__all__},
    "EdgeIndex": EdgeIndex,
    "F": nn.functional,
    "checkpoint": checkpoint,
    "copy": copy,
    "nn": nn,
    "parametrizations": parametrizations,
    "parametrize": parametrize,
    "pickle": pickle,
    "torch": torch,
}
_UNTOUCHED = SimpleNamespace(compile=lambda model, *_, **__: model)
# Where PyG refuses for a reason of its own a plan may answer, never the reverse: PyG keeps tensors for its
# gradients that a plan does without, mixes types in half precision, caches matrices nobody can copy.
_PERMITTED = re.compile(
    "modified by an inplace operation|have the same dtype|expected scalar type|"
    "Inference tensors cannot be saved|Cannot access storage of Sparse|support the deepcopy protocol|"
    "max\\(\\): Expected reduction dim|Could not run 'aten|Cannot set version_counter for inference|"
    "derivative for .* is not implemented"
)
# a plan may say that it cannot be differentiated twice, never be wrong about it
_SECOND = re.compile("second derivative|differentiated twice|once_differentiable", re.IGNORECASE)


_DOUBLE = (
    "wants = x.requires_grad; model = model.double(); x, edge_index, edge_weight, edge_attr = "
    "cast('double', x, edge_index, edge_weight, edge_attr); x.requires_grad_(wants)"
)
_AHEAD = "with torch.no_grad(): copy.deepcopy(model).eval()(x, edge_index)"
_GRADIENTS = re.compile(r"out = (second|torch\.autograd\.grad)\(")
_NAN_WEIGHT = "next(model.parameters()).data.view(-1)[:1] = float('nan')"
_CALL = re.compile(r"(with .*: )?out =")


class Difference(AssertionError):  # noqa: N818  it is what was found
    """The compiled model did something else than PyG; the message is a script that shows it."""


@dataclass
class Tally:
    """How much of what was run said something: calls that PyG answered, and those it refused."""

    answered: int = 0
    refused: int = 0
    planned: int = 0


def replay(script: str, tally: Tally | None = None) -> None:
    """Run the lines in both worlds; raises Difference at the first line after which they differ.

    What is left of differences of nearly equal rows (norms, `h - mean`) is rounding in the coarser types:
    where a script with one of those agrees in double precision, it agrees.
    """
    try:
        _replay(script, tally)
    except Difference as found:
        is_rounding = ": off by " in str(found) and re.search("[nN]orm|mean|std|var|GENConv", script)
        if not is_rounding or _DOUBLE in script:
            raise
        _replay(_in_double(script), None)


def _in_double(script: str) -> str:
    """The script with everything in double precision from the start."""
    lines = [
        re.sub(r"(model\.)(float|bfloat16|half)\(\)", r"\1double()", line) for line in script.splitlines()
    ]
    lines = [re.sub("cast\\('\\w+'", "cast('double'", line) for line in lines]
    place = next(k for k, line in enumerate(lines) if "plait.compile(" in line)
    return "\n".join([*lines[:place], _DOUBLE, *lines[place:]])


def _replay(script: str, tally: Tally | None) -> None:
    tally = Tally() if tally is None else tally
    lines = [line for line in script.strip().splitlines() if line.strip()]
    theirs, ours = _world(_UNTOUCHED), _world(plait)
    tolerance = 0.0
    for number, line in enumerate(lines):
        expected, result = (_execute(line, number, world) for world in (theirs, ours))
        if result and not expected and "plait.compile(" in line and "data(" in line:
            expected = _execute(_AHEAD, number, theirs)  # a plan made now runs the model now
        if (expected and expected != result and _PERMITTED.search(expected)) or (
            not expected and _SECOND.search(result)
        ):
            return
        if bool(expected) != bool(result):
            what = f"PyG raises {expected}" if expected else f"only the compiled model raises {result}"
            raise Difference(_told(lines, number, what))
        if not _CALL.match(line):
            continue
        if expected:
            tally.refused += 1
            continue
        tally.answered += 1
        # what a coarse type left in gradients and running means stays there when the type is refined
        tolerance = max(tolerance, TOLERANCE[theirs["x"].dtype])
        has_nan = any("float('nan')" in earlier for earlier in lines[:number])
        if _GRADIENTS.search(line) or any(_NAN_WEIGHT in earlier for earlier in lines[:number]):
            ours["out"] = _with_nan_of(theirs["out"], ours["out"], has_nan)
        for problem in _differences(theirs, ours, tolerance, has_nan):
            raise Difference(_told(lines, number, problem))
    plan = getattr(ours.get("model"), "plan", None)
    tally.planned += bool(plan is not None and plan.layers)


def _world(compiler: Any) -> dict[str, Any]:
    return _SHARED | {"plait": compiler, "hook": SimpleNamespace(remove=lambda: None)}


@functools.lru_cache(maxsize=4096)
def _code(line: str) -> Any:
    return compile(line, "<script>", "exec")


def _execute(line: str, number: int, world: dict[str, Any]) -> str:
    """The error the line raised, or nothing."""
    torch.manual_seed(number)
    try:
        exec(_code(line), world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _differences(
    theirs: dict[str, Any], ours: dict[str, Any], tolerance: float, has_nan: bool
) -> Iterator[str]:
    """In what the two worlds differ after a call: results, inputs, gradients, state."""
    several = [_largest(value) for _, value in _leaves("out", theirs["out"])]
    yield from _compared("out", theirs["out"], ours["out"], tolerance, 0.1 * max(several, default=0.0))
    for name in ("x", "edge_index", "edge_weight"):
        yield from _compared(name, theirs.get(name), ours.get(name), tolerance)
    wanted, given = _gradients(theirs), _gradients(ours)
    # a gradient that vanishes but for rounding is measured by the largest one
    scale = 0.1 * max([1.0, *(_largest(g) for g in wanted.values())])
    if list(wanted) != list(given):
        yield f"parameters are {list(given)}, not {list(wanted)}"
        return
    for name, gradient in wanted.items():
        yield from _compared(
            f"gradient of {name}", gradient, _with_nan_of(gradient, given[name], has_nan), tolerance, scale
        )
    state = _state(theirs)
    yield from _compared("state", state, _with_nan_of(state, _state(ours), has_nan), tolerance)
    yield from _compared("modes", _modes(theirs), _modes(ours), tolerance)


def _gradients(world: dict[str, Any]) -> dict[str, Tensor | None]:
    inputs = [(name, world.get(name)) for name in ("x", "edge_weight", "edge_attr")]
    held = [*world["model"].named_parameters(), *((n, v) for n, v in inputs if isinstance(v, Tensor))]
    return {name: value.grad for name, value in held if value.is_leaf}


def _state(world: dict[str, Any]) -> dict[str, Any]:
    # a lazy layer that has not run holds no numbers
    return {k: None if is_lazy(v) else v for k, v in world["model"].state_dict().items()}


def _modes(world: dict[str, Any]) -> dict[str, bool]:
    return {name: module.training for name, module in world["model"].named_modules()}


def _with_nan_of(wanted: Any, given: Any, has_nan: bool) -> Any:
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
        return {name: _with_nan_of(part, given[name], has_nan) for name, part in wanted.items()}
    if isinstance(wanted, tuple | list) and isinstance(given, tuple | list) and len(wanted) == len(given):
        return type(wanted)(_with_nan_of(*pair, has_nan) for pair in zip(wanted, given, strict=True))
    return given


def _compared(name: str, wanted: Any, given: Any, tolerance: float, scale: float = 0.0) -> Iterator[str]:
    """In what two values differ, part by part; `scale` is the least magnitude a difference is a share of."""
    expected, found = dict(_leaves(name, wanted)), dict(_leaves(name, given))
    if list(expected) != list(found):
        yield f"{name} has parts {list(found)}, not {list(expected)}"
        return
    for part, value in expected.items():
        problem = _differs(value, found[part], tolerance, scale)
        if problem:
            yield f"{part}: {problem}"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, tuple, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{name} {key}", part)
    else:
        yield name, value


def _differs(wanted: Any, given: Any, tolerance: float, scale: float) -> str:
    if not isinstance(wanted, Tensor) or not isinstance(given, Tensor):
        is_same = not isinstance(wanted, Tensor) and not isinstance(given, Tensor) and wanted == given
        return "" if is_same else f"{given}, not {wanted}"
    if wanted.requires_grad != given.requires_grad:
        return f"requires_grad is {given.requires_grad}, not {wanted.requires_grad}"
    return _tensor_differs(wanted.detach(), given.detach(), tolerance, scale)


def _tensor_differs(wanted: Tensor, given: Tensor, tolerance: float, scale: float) -> str:
    for what in ("dtype", "shape", "layout"):
        if getattr(wanted, what) != getattr(given, what):
            return f"{what} {getattr(given, what)}, not {getattr(wanted, what)}"
    if wanted.layout != torch.strided:
        wanted, given = wanted.to_dense(), given.to_dense()
    if not wanted.is_floating_point():
        return "" if wanted.equal(given) else f"{given.tolist()}, not {wanted.tolist()}"
    allowed = max(TOLERANCE[wanted.dtype], tolerance) * max(_largest(wanted), scale, SMALLEST)
    if torch.isclose(given.double(), wanted.double(), rtol=0.0, atol=allowed, equal_nan=True).all():
        return ""
    off = _largest(given.double() - wanted.double())
    return f"off by {off:.2g} where {allowed:.2g} is allowed:\n{given}\nPyG:\n{wanted}"


def _largest(value: Any) -> float:
    """The largest finite magnitude."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return float(torch.nan_to_num(value.detach().double(), 0.0, 0.0, 0.0).abs().max())


def _told(lines: Sequence[str], number: int, what: str) -> str:
    """The script up to the line that shows the difference, ready to be run again."""
    shown = "\n".join(lines[: number + 1])
    return f"{what}\n\nfrom tests.fuzz.replay import replay\n\nreplay('''\n{shown}\n''')"


if __name__ == "__main__":
    replay(sys.stdin.read())
