"""Runs a script line by line twice, in PyG and compiled, and compares everything a user could look at."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import plait
from tests.fuzz.compare import AUTOCAST, TOLERANCE, compared, differences, with_nan_of
from tests.fuzz.rounding import DOUBLE, Known, Reference, in_double
from tests.fuzz.worlds import CALL, UNTOUCHED, execute, gradients, has_nan, seen, state, world_of

__all__ = ["Difference", "Tally", "replay"]

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


# a limit that no plan meets is refused with the least that one does
_LIMIT = re.compile(r"memory_limit.*?(?:needs|leanest plan's) (\d+)")
# a plan made ahead runs the model ahead, in one of these ways: where PyG refuses that, so may the plan
_AHEAD = (
    "torch.no_grad()(copy.deepcopy(model).eval())(x, edge_index)",
    "copy.deepcopy(model).train()(x, edge_index)",
)
# one that is measured trains it, too
_MEASURED = (*_AHEAD, "backward(copy.deepcopy(model).train()(x.detach(), edge_index))")
_UNDER = re.compile(r"with .*\): (?=model =)")
_GRADIENTS = re.compile(r"out = (apart|second|batched|hidden|torch\.autograd\.|torch\.func\.jacrev)")
_NAN = "float('nan')"


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


def _replay(script: str, tally: Tally | None) -> None:
    tally = Tally() if tally is None else tally
    lines = [line for line in script.strip().splitlines() if line.strip()]
    theirs, ours, reference = world_of(UNTOUCHED), world_of(plait), Reference(lines)
    has_rounding = False
    for number, line in enumerate(lines):
        expected, result = execute(line, number, theirs), _within_limit(line, number, ours)
        if result and not expected and "plait." in line and "data(" in line:
            expected = _ahead(line, number, theirs)
        if _may_refuse(lines[: number + 1], expected, result):
            break
        if bool(expected) != bool(result):
            what = f"PyG raises {expected}" if expected else f"only the compiled model raises {result}"
            raise Difference(_told(lines, number, what))
        if not CALL.match(line):
            continue
        if expected:
            tally.refused += 1
            held = ((state(world), gradients(world)) for world in (theirs, ours))
            if any(compared("held", *held, 0.0)):
                break  # a batch norm or a gradient came before the refusal: which does is nobody's promise
            continue
        tally.answered += 1
        if _is_lost(lines[:number], theirs, ours):
            _compare_lost(lines, number, theirs, ours, reference)
            break
        has_rounding |= _compare(lines, number, theirs, ours, reference)
        if _is_cast(line, theirs) and "backward(" in line:
            # PyG rounds inside its layers, plait at their ends: a maximum may be another neighbour's from
            # there on, so what follows a backward pass is not compared
            break
    plan = getattr(ours.get("model"), "plan", None)
    tally.planned += bool(plan is not None and plan.layers)
    if has_rounding and DOUBLE not in script:
        # what is rounding in a coarse type is not there in a fine one
        _replay("\n".join(in_double(lines)), None)


def _ahead(line: str, number: int, theirs: dict[str, Any]) -> str:
    """PyG's error in one of the calls that a plan made ahead makes."""
    under = _UNDER.match(line)
    # a plan for training differentiates whatever is on outside
    modes = (under[0] if under else "", "with torch.enable_grad(): ")
    ways = _MEASURED if "analyze=True" in line else _AHEAD
    errors = (execute(f"{mode}{way}", number, theirs) for mode in modes for way in ways)
    return next((error for error in errors if error), "")


def _may_refuse(lines: Sequence[str], expected: str, result: str) -> bool:
    """Whether one of the worlds refuses the last line for a known reason that the other does not have."""
    if expected:
        return expected != result and bool(_PERMITTED.search(expected))
    return (
        any(found.search(result) for found in (_SECOND, _LIMIT, _RESHAPED, _UNFIT))
        or (any(map(_CUT.search, lines)) and bool(_TOO_SMALL.search(result)))
        or (bool(_TWICE.search(lines[-1])) and bool(_WRITTEN.search(result)))
    )


def _is_lost(earlier: Sequence[str], theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether a NaN of the script has reached the weights.

    A weight's gradient may read a row whose gradient is zero: 0 * NaN, where PyG's association does not.
    """
    is_written = any(_NAN in line for line in earlier)
    return is_written and any(has_nan(list(world["model"].parameters())) for world in (theirs, ours))


def _compare_lost(
    lines: Sequence[str], number: int, theirs: dict[str, Any], ours: dict[str, Any], reference: Reference
) -> None:
    ours["out"] = with_nan_of(theirs["out"], ours["out"], True)
    tolerance = _tolerance(lines[number], theirs)

    def found(known: Known | None) -> list[str]:
        return list(compared("out", theirs["out"], ours["out"], tolerance, known=known))

    problems = found(None)
    if problems and all(": off by " in problem for problem in problems):
        # of gradients only types and shapes: a ReLU of the one NaN handed them on, that of the other
        # association's number did not; the same script with a number in place compares the rest
        if _GRADIENTS.search(lines[number]):
            return
        # the weights may be those of a coarser type, trained there
        problems = found(reference.known(number, seen(theirs)))
    if problems:
        raise Difference(_told(lines, number, problems[0]))


def _compare(
    lines: Sequence[str], number: int, theirs: dict[str, Any], ours: dict[str, Any], reference: Reference
) -> bool:
    """Whether the worlds differ by rounding; raises Difference where they differ otherwise."""
    tolerance = _tolerance(lines[number], theirs)
    is_written = any(_NAN in line for line in lines[:number])

    def found(known: Known | None) -> list[str]:
        is_anywhere = is_written or (known is not None and (known.meets_nan or known.overflows))
        if _GRADIENTS.search(lines[number]):
            ours["out"] = with_nan_of(theirs["out"], ours["out"], is_anywhere)
        return list(differences(theirs, ours, tolerance, is_anywhere, known))

    problems = found(None)
    if not problems:
        return False
    if all(": off by " in problem for problem in problems):
        problems = found(reference.known(number, seen(theirs)))
    if problems:
        raise Difference(_told(lines, number, problems[0]))
    return True


def _tolerance(line: str, world: dict[str, Any]) -> float:
    """The share of the largest number that a difference may be, beside that of the type of each result."""
    return max(TOLERANCE[world["x"].dtype], AUTOCAST if _is_cast(line, world) else 0.0)


def _is_cast(line: str, world: dict[str, Any]) -> bool:
    """Whether the line's products are rounded to 16 bits: autocast leaves float64 as it is."""
    return "autocast(" in line and world["x"].dtype != torch.float64


def _within_limit(line: str, number: int, world: dict[str, Any]) -> str:
    """The error the line raised; a memory limit is raised to the least that the refusal names."""
    for _ in range(9):  # once for every layer
        error = execute(line, number, world)
        least = _LIMIT.search(error) if "memory_limit=" in line else None
        if least is None:
            return error
        line = re.sub(r"memory_limit=\d+", f"memory_limit={least[1]}", line)
    return error


def _told(lines: Sequence[str], number: int, what: str) -> str:
    """The script up to the line that shows the difference, ready to be run again."""
    shown = "\n".join(lines[: number + 1])
    return f"{what}\n\nfrom tests.fuzz.replay import replay\n\nreplay('''\n{shown}\n''')"


if __name__ == "__main__":
    replay(sys.stdin.read())
