"""Runs a script line by line twice, in PyG and compiled, and compares everything a user could look at.

In the first world `plait.compile` returns the model it is given; nothing of one world is in the other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: F401  scripts say nn.utils.prune
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex

import plait
from tests.fuzz import loops, parts

__all__ = ["Difference", "Tally", "replay"]

# The largest difference allowed, as a share of the largest number compared with.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
SMALLEST = 1e-3  # numbers below are differences of larger ones
AUTOCAST = TOLERANCE[torch.bfloat16]  # the type that scripts ask for
NUDGED = 8  # runs of PyG with its inputs rounded otherwise, where a difference may be rounding
COARSE = torch.finfo(torch.bfloat16).eps  # one rounding under autocast
AS_FAR = 4.0  # how much further from PyG than those runs an answer may be: a plan rounds at other places
_SHARED = {
    **{name: value for name, value in vars(torch_geometric.nn).items() if isinstance(value, type)},
    **{name: getattr(parts, name) for name in parts.__all__},
    **{name: getattr(loops, name) for name in loops.__all__},
    "global_mean_pool": torch_geometric.nn.global_mean_pool,
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
_UNTOUCHED = SimpleNamespace(compile=lambda model, *_, **__: model, explain=lambda *_, **__: None)
# Where PyG refuses for a reason of its own a plan may answer, never the reverse: PyG keeps tensors for its
# gradients that a plan does without, mixes types in half precision, caches matrices nobody can copy.
_PERMITTED = re.compile(
    "modified by an inplace operation|its base has been modified inplace|"
    "have the same dtype|expected scalar type|"
    "Inference tensors cannot be saved|Cannot access storage of Sparse|support the deepcopy protocol|"
    "Inference tensors do not track|Inplace update to inference tensor|"
    "max\\(\\): Expected reduction dim|Could not run 'aten|Cannot set version_counter for inference|"
    "derivative for .* is not implemented|not implemented for '(Half|BFloat16)'|"
    "expand is unsupported for Sparse"
)
# x without its last row or column, with more rows than a matrix has nodes, or edges of nodes that there are
# not, are refused; PyG takes them where it happens not to read that
_CUT = re.compile(r"x\.detach\(\)\[.*:-1\]\)|torch\.cat\(\[x, x\]\)|edge_index = edge_index [+-] 1")
_TOO_SMALL = re.compile(
    "its sparse_size is|holds node \\d+ but num_|check the widths of x|on \\d+ source and \\d+ target rows"
)
# a wrong width is refused; PyG cuts such rows into more or fewer and answers for another number of nodes
_RESHAPED = re.compile(r"PNAConv: x has \d+ columns, the layer takes")
# weights that are not one for each edge are refused; PyG stretches those of a single edge
_UNFIT = re.compile(r"edge_weight: \d+ weights for \d+ edges")
# two calls before one backward pass, and the second writes to what the first was given: PyG may have kept a
# product of it, a plan says that it reads it (docs/coverage.md)
_TWICE = re.compile(r"out = (model\(.*\) \+ (model|original)|in_threads|apart|later|beside_copy)\(")
_WRITTEN = re.compile("modified by an inplace operation.*plait's backward pass reads")
# a plan may say that it cannot be differentiated twice, never be wrong about it
_SECOND = re.compile("second derivative|differentiated twice|once_differentiable", re.IGNORECASE)


_CAST = "x, edge_index, edge_weight, edge_attr = cast('double', x, edge_index, edge_weight, edge_attr)"
_DOUBLE = f"wants = x.requires_grad; model = model.double(); {_CAST}; x.requires_grad_(wants)"
# a limit that no plan meets is refused with the least that one does
_LIMIT = re.compile(r"memory_limit.*?(?:needs|leanest plan's) (\d+)")
# a plan made ahead runs the model ahead, in one of these ways: where PyG refuses that, so may the plan
_AHEAD = (
    "torch.no_grad()(copy.deepcopy(model).eval())(x, edge_index)",
    "copy.deepcopy(model).train()(x, edge_index)",
)
_UNDER = re.compile(r"with .*\): (?=model =)")
_GRADIENTS = re.compile(r"out = (apart|second|batched|hidden|torch\.autograd\.|torch\.func\.jacrev)")
_NEW_GRAPH = re.compile(r"(x, )?edge_index, edge_weight, edge_attr, edge_type = (graph|batch)\(")
_NAN = "float('nan')"
_CALL = re.compile(r"(with .*: )?out =")
_NOTHING: Mapping[str, float] = MappingProxyType({})


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

    A script that writes NaN runs once more with a number in its place. One association spreads the NaN of a
    weight further than another ((A X) W to nodes without edges, A (X W) not), a ReLU hands on the gradient of
    a NaN and not that of a 0, and a step of training then writes both to the weights. So a script is followed
    to the first output of a model with NaN in its parameters, and to its end with a number there.
    """
    _replay(script, tally)
    if _NAN in script:
        _replay(script.replace(_NAN, "3.0"), None)


def _in_double(script: str) -> str:
    """The script with everything in double precision from the start."""
    lines = [
        re.sub(r"(model\.)(float|bfloat16|half)\(\)", r"\1double()", line) for line in script.splitlines()
    ]
    lines = [re.sub(r"\bcast\('\w+'", "cast('double'", line) for line in lines]  # not that of autocast('cpu')
    place = next(k for k, line in enumerate(lines) if "plait.compile(" in line)
    # a new graph comes in float32, and with it its features
    later = [f"{line}; {_CAST}" if _NEW_GRAPH.match(line) else line for line in lines[place:]]
    return "\n".join([*lines[:place], _DOUBLE, *later])


def _replay(script: str, tally: Tally | None) -> None:
    tally = Tally() if tally is None else tally
    lines = [line for line in script.strip().splitlines() if line.strip()]
    theirs, ours = _world(_UNTOUCHED), _world(plait)
    tolerance, has_rounding = 0.0, False
    for number, line in enumerate(lines):
        expected, result = _execute(line, number, theirs), _within_limit(line, number, ours)
        if result and not expected and "plait." in line and "data(" in line:
            under = _UNDER.match(line)
            # a plan for training differentiates whatever is on outside
            modes = (under[0] if under else "", "with torch.enable_grad(): ")
            errors = (_execute(f"{mode}{way}", number, theirs) for mode in modes for way in _AHEAD)
            expected = next((error for error in errors if error), "")
        if expected and expected != result and _PERMITTED.search(expected):
            break
        if not expected and (
            any(found.search(result) for found in (_SECOND, _LIMIT, _RESHAPED, _UNFIT))
            or (any(map(_CUT.search, [line, *lines[:number]])) and _TOO_SMALL.search(result))
            or (_TWICE.search(line) and _WRITTEN.search(result))
        ):
            break
        if bool(expected) != bool(result):
            what = f"PyG raises {expected}" if expected else f"only the compiled model raises {result}"
            raise Difference(_told(lines, number, what))
        if not _CALL.match(line):
            continue
        if expected:
            tally.refused += 1
            held = ((_state(world), _gradients(world)) for world in (theirs, ours))
            if any(_compared("held", *held, 0.0)):
                break  # a batch norm or a gradient came before the refusal: which does is nobody's promise
            continue
        tally.answered += 1
        # what a coarse type left in gradients and running means stays there when the type is refined
        tolerance = max(tolerance, TOLERANCE[theirs["x"].dtype])
        is_cast = _is_cast(line, theirs)
        allowed = max(tolerance, AUTOCAST) if is_cast else tolerance
        has_nan = any(_NAN in earlier for earlier in lines[:number])
        # a weight's gradient may read a row whose gradient is zero: 0 * NaN, where PyG's association does not
        is_lost = has_nan and any(_has_nan(list(world["model"].parameters())) for world in (theirs, ours))
        if _GRADIENTS.search(line) or is_lost:
            ours["out"] = _with_nan_of(theirs["out"], ours["out"], has_nan)
        if is_lost:
            for problem in _compared("out", theirs["out"], ours["out"], allowed):
                # of gradients only types and shapes: a ReLU of the one NaN handed them on, that of the other
                # association's number did not; the same script with a number in place compares the rest
                if ": off by " not in problem or not _GRADIENTS.search(line):
                    raise Difference(_told(lines, number, problem))
            break
        for problem in _differences(theirs, ours, allowed, has_nan):
            if ": off by " not in problem:
                raise Difference(_told(lines, number, problem))
            moved = _moved(lines[: number + 1], theirs)
            # in 16 bits numbers overflow by chance of rounding; the script in double compares the rest
            has_nan = has_nan or _meets_nan(lines[: number + 1]) or _overflows(theirs["out"])
            if _GRADIENTS.search(line):
                ours["out"] = _with_nan_of(theirs["out"], ours["out"], has_nan)
            for unexplained in _differences(theirs, ours, allowed, has_nan, moved):
                raise Difference(_told(lines, number, unexplained))
            has_rounding = True
            break
        if is_cast and "backward(" in line:
            # PyG rounds inside its layers, plait at their ends: a maximum may be another neighbour's from
            # there on, so what follows a backward pass is not compared
            break
    plan = getattr(ours.get("model"), "plan", None)
    tally.planned += bool(plan is not None and plan.layers)
    if has_rounding and _DOUBLE not in script:
        _replay(_in_double(script), None)  # what is rounding in a coarse type is not there in a fine one


def _is_cast(line: str, world: dict[str, Any]) -> bool:
    """Whether the line's products are rounded to 16 bits: autocast leaves float64 as it is."""
    return "autocast(" in line and world["x"].dtype != torch.float64


def _within_limit(line: str, number: int, world: dict[str, Any]) -> str:
    """The error the line raised; a memory limit is raised to the least that the refusal names."""
    for _ in range(9):  # once for every layer
        error = _execute(line, number, world)
        least = _LIMIT.search(error) if "memory_limit=" in line else None
        if least is None:
            return error
        line = re.sub(r"memory_limit=\d+", f"memory_limit={least[1]}", line)
    return error


def _moved(lines: Sequence[str], theirs: dict[str, Any]) -> dict[str, float]:
    """How far each part of PyG's answer moves when its inputs are rounded otherwise, and in double precision.

    A step of the size of one rounding, up or down, in every parameter and feature of every call. Where
    numbers cancel (norms of nearly equal rows, variances, a maximum of nearly equal messages, a ReLU at 0)
    PyG's own answer is no better known than that, and another order of the same sums is as right. Under
    autocast the rounding is that of 16 bits, and the run in double precision is one without autocast: a
    gradient that vanishes (that of a bias before a norm over nodes) is rounding in PyG too, and a plan, which
    rounds at the ends of its layers alone, may be as far from PyG as PyG is from the exact answer.
    """
    script = "\n".join(lines)
    runs = [(lines, seed) for seed in range(1, NUDGED + 1)]
    if _DOUBLE not in script:
        runs.append((_in_double(script).splitlines(), 0))
    moved: dict[str, float] = {}
    known = _seen(theirs)
    for run, seed in runs:
        world = _world(_UNTOUCHED)
        shift = len(lines) - len(run)  # random numbers are seeded by the number of a line
        for number, line in enumerate(run):
            is_called = _CALL.match(line) is not None
            least = COARSE if seed and is_called and _is_cast(line, world) else 0.0
            with _nudged(world, seed * (number + 1) if is_called else 0, least):
                _execute(line, number + (shift if number > 0 else 0), world)
        for name, value in _seen(world).items():
            if isinstance(value, Tensor) and value.shape == getattr(known.get(name), "shape", None):
                moved[name] = max(moved.get(name, 0.0), _distance(value, known[name]))
    return moved


def _meets_nan(lines: Sequence[str]) -> bool:
    """Whether a module of PyG's makes NaN by itself: ChebConv divides 0 by 0 where there are no edges."""
    world, met = _world(_UNTOUCHED), False

    def look(module: nn.Module, given: Any, out: Any) -> None:
        nonlocal met
        met = met or _has_nan(out)

    hook = register_module_forward_hook(look)
    try:
        for number, line in enumerate(lines):
            _execute(line, number, world)
    finally:
        hook.remove()
    return met


@contextlib.contextmanager
def _nudged(world: dict[str, Any], seed: int, least: float) -> Iterator[None]:
    """Parameters and features one rounding off inside, as they were outside; seed 0 leaves them.

    `least` is what the rounding is at least, whatever the type.
    """
    held = [*world["model"].parameters(), world["x"]] if seed else []
    held = [v for v in held if not is_lazy(v) and v.layout == torch.strided and v.is_floating_point()]
    before = [value.detach().clone() for value in held]
    draw = torch.Generator().manual_seed(seed)
    with torch.inference_mode():  # the one mode that writes to tensors of every kind
        for value, exact in zip(held, before, strict=True):
            size = max(torch.finfo(value.dtype).eps, least)
            step = torch.randint(-1, 2, value.shape, generator=draw) * size
            _write(value, exact * (1 + step.to(value.dtype)))
    yield
    with torch.inference_mode():
        for value, exact in zip(held, before, strict=True):
            _write(value, exact)


def _write(value: Tensor, numbers: Tensor) -> None:
    """In place; a tensor that is one number many times over is left alone."""
    if all(stride or size < 2 for stride, size in zip(value.stride(), value.shape, strict=True)):
        value.copy_(numbers)


def _distance(value: Tensor, other: Tensor) -> float:
    return _largest(_dense(value).double() - _dense(other).double())


def _dense(value: Tensor) -> Tensor:
    if value.layout == torch.strided:
        return value.detach()
    with torch.inference_mode():  # which takes sparse tensors made there, too
        return value.to_dense()


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


def _seen(world: dict[str, Any]) -> dict[str, Any]:
    """Every number a user can look at after a call, by the name it has in a message."""
    gradients = {f"gradient of {name}": value for name, value in _gradients(world).items()}
    inputs = {name: world.get(name) for name in ("x", "edge_index", "edge_weight")}
    parts = {"out": world.get("out"), **inputs, **gradients, "state": _state(world)}
    return {name: value for key, part in parts.items() for name, value in _leaves(key, part)}


def _differences(
    theirs: dict[str, Any],
    ours: dict[str, Any],
    tolerance: float,
    has_nan: bool,
    moved: Mapping[str, float] = _NOTHING,
) -> Iterator[str]:
    """In what the two worlds differ after a call: results, inputs, gradients, state."""

    def compared(name: str, wanted: Any, given: Any, scale: float = 0.0) -> Iterator[str]:
        return _compared(name, wanted, given, tolerance, scale, moved)

    several = [_largest(value) for _, value in _leaves("out", theirs["out"])]
    yield from compared("out", theirs["out"], ours["out"], 0.1 * max(several, default=0.0))
    for name in ("x", "edge_index", "edge_weight"):
        yield from compared(name, theirs.get(name), ours.get(name))
    wanted, given = _gradients(theirs), _gradients(ours)
    # a gradient that vanishes but for rounding is measured by the largest one
    scale = 0.1 * max([1.0, *(_largest(g) for g in wanted.values())])
    if list(wanted) != list(given):
        yield f"parameters are {list(given)}, not {list(wanted)}"
        return
    for name, gradient in wanted.items():
        yield from compared(
            f"gradient of {name}", gradient, _with_nan_of(gradient, given[name], has_nan), scale
        )
    state = _state(theirs)
    yield from compared("state", state, _with_nan_of(state, _state(ours), has_nan))
    yield from compared("modes", _modes(theirs), _modes(ours))


def _gradients(world: dict[str, Any]) -> dict[str, Tensor | None]:
    inputs = [(name, world.get(name)) for name in ("x", "edge_weight", "edge_attr")]
    model = world.get("model", nn.Module())  # none was made where its options do not go together
    held = [*model.named_parameters(), *((n, v) for n, v in inputs if isinstance(v, Tensor))]
    return {name: value.grad for name, value in held if value.is_leaf}


def _state(world: dict[str, Any]) -> dict[str, Any]:
    try:
        # PyG's Linear reads its weight for this: looking must not make spectral_norm go a step on
        before = [(buffer, buffer.detach().clone()) for buffer in world["model"].buffers()]
        held = world["model"].state_dict()
        for buffer, value in before:
            buffer.data.copy_(value)
    except Exception as error:  # no model was made, or a parametrization of its weights does not work
        return {"error": type(error).__name__}
    # a lazy layer that has not run holds no numbers
    return {k: None if is_lazy(v) else v for k, v in held.items()}


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


def _overflows(value: Any) -> bool:
    """Whether PyG's own result, in 16 bits, holds NaN."""
    parts = [part for _, part in _leaves("out", value) if isinstance(part, Tensor)]
    return any(p.dtype in (torch.float16, torch.bfloat16) and bool(p.isnan().any()) for p in parts)


def _has_nan(value: Any) -> bool:
    parts = (part for _, part in _leaves("", value) if isinstance(part, Tensor) and not is_lazy(part))
    return any(p.is_floating_point() and bool(p.isnan().any()) for p in parts)


def _compared(
    name: str,
    wanted: Any,
    given: Any,
    tolerance: float,
    scale: float = 0.0,
    moved: Mapping[str, float] = _NOTHING,
) -> Iterator[str]:
    """In what two values differ, part by part; `scale` is the least magnitude a difference is a share of."""
    expected, found = dict(_leaves(name, wanted)), dict(_leaves(name, given))
    if list(expected) != list(found):
        yield f"{name} has parts {list(found)}, not {list(expected)}"
        return
    for part, value in expected.items():
        problem = _differs(value, found[part], tolerance, scale, AS_FAR * moved.get(part, 0.0))
        if problem:
            yield f"{part}: {problem}"


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, tuple, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{name} {key}", part)
    else:
        yield name, value


def _differs(wanted: Any, given: Any, tolerance: float, scale: float, rounding: float) -> str:
    if not isinstance(wanted, Tensor) or not isinstance(given, Tensor):
        is_same = not isinstance(wanted, Tensor) and not isinstance(given, Tensor) and wanted == given
        return "" if is_same else f"{given}, not {wanted}"
    if wanted.requires_grad != given.requires_grad:
        return f"requires_grad is {given.requires_grad}, not {wanted.requires_grad}"
    return _tensor_differs(wanted.detach(), given.detach(), tolerance, scale, rounding)


def _tensor_differs(wanted: Tensor, given: Tensor, tolerance: float, scale: float, rounding: float) -> str:
    for what in ("dtype", "shape", "layout"):
        if getattr(wanted, what) != getattr(given, what):
            return f"{what} {getattr(given, what)}, not {getattr(wanted, what)}"
    wanted, given = _dense(wanted), _dense(given)
    if not wanted.is_floating_point():
        return "" if wanted.equal(given) else f"{given.tolist()}, not {wanted.tolist()}"
    allowed = max(TOLERANCE[wanted.dtype], tolerance) * max(_largest(wanted), scale, SMALLEST) + rounding
    if torch.isclose(given.double(), wanted.double(), rtol=0.0, atol=allowed, equal_nan=True).all():
        return ""
    off = _largest(given.double() - wanted.double())
    return f"off by {off:.2g} where {allowed:.2g} is allowed:\n{given}\nPyG:\n{wanted}"


def _largest(value: Any) -> float:
    """The largest finite magnitude."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return float(torch.nan_to_num(_dense(value).double(), 0.0, 0.0, 0.0).abs().max())


def _told(lines: Sequence[str], number: int, what: str) -> str:
    """The script up to the line that shows the difference, ready to be run again."""
    shown = "\n".join(lines[: number + 1])
    return f"{what}\n\nfrom tests.fuzz.replay import replay\n\nreplay('''\n{shown}\n''')"


if __name__ == "__main__":
    replay(sys.stdin.read())
