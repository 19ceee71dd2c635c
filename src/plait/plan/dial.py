"""The memory dial: picks one variant of every layer, so that a step fits a limit in the least time.

A training step holds what every layer keeps for its backward pass, all at once when the last layer has run,
and in addition what one layer needs while it works. Gradients are computed last layer first and what a layer
kept is dropped after it, so while layer k works, in either pass, only layers up to k hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import InputError, PlanError

__all__ = [
    "Allowance", "Dialled", "Option", "Stage", "bytes_text", "least_peak", "parse_bytes", "peak_of",
    "refusal", "turn",
]  # fmt: skip

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Allowance:
    """What one layer may hold: for its backward pass, and at its peak (including the former)."""

    kept_bytes: int
    peak_bytes: int

    def admits(self, kept_bytes: int, peak_bytes: int) -> bool:
        """Whether an option that keeps and needs these bytes fits."""
        return kept_bytes <= self.kept_bytes and peak_bytes <= self.peak_bytes


@dataclass(frozen=True)
class Option:
    """One variant of a layer: its price, what it keeps, and what it needs in addition while it runs."""

    seconds: float
    kept_bytes: int
    transient_bytes: int


@dataclass(frozen=True)
class Stage:
    """A layer in the order of the forward pass, with what is alive during it whatever is chosen."""

    layer: str
    options: tuple[Option, ...]
    other_bytes: int = 0


@dataclass(frozen=True)
class Dialled:
    """The option of every stage, and what the model then takes."""

    options: tuple[Option, ...]
    seconds: float
    peak_bytes: int


def turn(stages: Sequence[Stage], limit: int) -> Dialled:
    """The fastest choice of options whose peak is within the limit; PlanError where there is none.

    Exact: of the choices for the first k layers, only those are followed that no other one beats in both
    seconds and bytes kept, because nothing else affects the layers after them.
    """
    front: list[_Partial] = [_Partial(0.0, 0, 0, ())]
    for stage in stages:
        grown = [partial.then(stage, option) for partial in front for option in stage.options]
        front = _unbeaten([partial for partial in grown if partial.peak <= limit], by_peak=False)
    if not front:
        raise refusal(limit, least_peak(stages))
    best = min(front, key=lambda partial: (partial.seconds, partial.peak))
    return Dialled(best.chosen, best.seconds, best.peak)


def refusal(limit: int, least: int) -> PlanError:
    """The error for a limit that no choice meets; `least` is one that can be met."""
    return PlanError(
        f"memory_limit: {bytes_text(limit)} is too small; the leanest way to run all layers needs {least} "
        f"bytes ({bytes_text(least)}): raise the limit to that, or train on mini-batches"
    )


def least_peak(stages: Sequence[Stage]) -> int:
    """The smallest limit that some choice of options meets."""
    front: list[_Partial] = [_Partial(0.0, 0, 0, ())]
    for stage in stages:
        front = _unbeaten([p.then(stage, option) for p in front for option in stage.options], by_peak=True)
    return min(partial.peak for partial in front)


def peak_of(stages: Sequence[Stage], chosen: Sequence[Option]) -> int:
    """Most bytes alive at once if every stage takes the option given for it."""
    partial = _Partial(0.0, 0, 0, ())
    for stage, option in zip(stages, chosen, strict=True):
        partial = partial.then(stage, option)
    return partial.peak


@dataclass(frozen=True)
class _Partial:
    """Options of the first few stages: their seconds, what they keep, the peak so far."""

    seconds: float
    kept: int
    peak: int
    chosen: tuple[Option, ...]

    def then(self, stage: Stage, option: Option) -> _Partial:
        kept = self.kept + option.kept_bytes
        peak = max(self.peak, kept + option.transient_bytes + stage.other_bytes)
        return _Partial(self.seconds + option.seconds, kept, peak, (*self.chosen, option))


def _unbeaten(partials: list[_Partial], by_peak: bool) -> list[_Partial]:
    """The choices that no other one equals or beats in bytes kept, seconds and peak together."""
    found: list[_Partial] = []

    def cost(partial: _Partial) -> float:
        return partial.peak if by_peak else partial.seconds

    for partial in sorted(partials, key=lambda p: (p.kept, cost(p), p.peak)):
        if not found or cost(partial) < cost(found[-1]):
            found.append(partial)
    return found


# Amounts of memory ----------------------------------------------------------------------------------------


def parse_bytes(limit: int | str, argument: str = "memory_limit") -> int:
    """A number of bytes from one, or from text: "8GB" is 8e9, "2GiB" is 2 * 2**30, "512 MB" is 512e6."""
    found = _bytes_in(limit)
    if found is None or found < 1:
        raise InputError(
            f"{argument}: {limit!r} is not an amount of memory; pass bytes as a positive int, or text "
            'such as "8GB", "512 MB" or "2GiB"'
        )
    return found


def _bytes_in(limit: object) -> int | None:
    if isinstance(limit, int) and not isinstance(limit, bool):
        return limit
    match = _AMOUNT.fullmatch(limit) if isinstance(limit, str) else None
    unit = None if match is None else _UNITS.get(match[2].lower())
    return None if match is None or unit is None else int(float(match[1]) * unit)


def bytes_text(count: int) -> str:
    """An amount of memory for people: "8.00 GB", "12.3 MB", "640 bytes"."""
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            value = count / size
            return f"{value:.2f} {name}" if value < 10 else f"{value:.1f} {name}"
    return f"{count} bytes"
