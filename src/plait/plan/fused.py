"""Plans of layers that bring their own passes (attention, gates, relations): steps, prices, the losers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.cost.machine import MachineProfile
from plait.cost.price import Price
from plait.plan import words
from plait.plan.plan import Measured, Rejected, wrapped
from plait.plan.ways import preferred_rank

__all__ = ["FusedCandidate", "FusedPlan", "FusedStep", "choose_among"]


@dataclass(frozen=True)
class FusedStep:
    """One kernel call of such a plan, with its price."""

    title: str
    phase: str
    price: Price

    @property
    def name(self) -> str:
        """What a clock knows it by: the title without sizes and remarks."""
        return f"{self.phase} {self.title.partition(' -> ')[0].partition(',')[0]}"


@dataclass(frozen=True)
class FusedPlan:
    """The plan of one such layer; the same surface as a LayerPlan."""

    layer: str
    kind: str
    choice: str
    text: str
    steps: tuple[FusedStep, ...]
    seconds: float
    peak_bytes: int
    sizes: Mapping[str, int]
    mode: str
    machine: str
    is_default_machine: bool
    rejected: tuple[Rejected, ...] = ()
    because: str = ""
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def describe(self) -> str:
        return self.text

    def action(self) -> str:
        """What the layer does, in words."""
        return words.of_choice(self.choice, self.text)

    def reason(self) -> str:
        """Why it is done so."""
        return self.because

    def rows(self) -> list[words.Row]:
        """The steps in words, the forward ones first."""
        ordered = sorted(self.steps, key=lambda step: step.phase != "fwd")
        seen = [self.measured.get(step.name) for step in ordered]
        return [
            words.Row(step.phase, *words.pass_text(step.title), step.price, found.seconds if found else None)
            for step, found in zip(ordered, seen, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "expression": self.text,
            "form": self.choice,
            "mode": self.mode,
            "sizes": dict(self.sizes),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "machine": self.machine,
            "is_default_machine": self.is_default_machine,
            "because": self.because,
            "in_words": words.sentence(self),
            "hoisted": [],
            "steps": [_step_dict(step, self.seconds, self.measured.get(step.name)) for step in self.steps],
            "rejected": [
                {"candidate": r.candidate, "seconds": r.seconds, "peak_bytes": r.peak_bytes, "why": r.why}
                for r in self.rejected
            ],
        }

    def lines(self, most_rejected: int = 6) -> list[str]:
        """The plan as text, at most 100 columns wide."""
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        out = [f"{self.layer}: {self.text}"]
        out += [
            f"   {self.mode}, {sizes};",
            f"     predicted {_ms(self.seconds)}, peak {_mb(self.peak_bytes)}",
        ]
        out += wrapped(f"because {self.because}", "   ")
        width = 41 if self.measured else 43
        head = f"   {'step':<{width}}{'backend':<8}{'Mflop':>9}{'MB':>8}{'predicted':>12}{'share':>7}"
        out.append(head + (f"{'measured':>12}" if self.measured else ""))
        for step in self.steps:
            share = step.price.seconds / self.seconds if self.seconds else 0.0
            work = step.price.work
            name = f"{step.phase:<5}{step.title}"
            name = name if len(name) < width else name[: width - 2] + "…"
            measured = self.measured.get(step.name)
            out.append(
                f"   {name:<{width}}{step.price.backend:<8}{work.flops / 1e6:>9.1f}"
                f"{work.bytes_gathered / 1e6:>8.1f}"
                f"{_ms(step.price.seconds):>12}{share:>7.0%}"
                + (f"{_ms(measured.seconds):>12}" if measured else "")
            )
        if self.rejected:
            out.append("   rejected:")
        for loser in self.rejected[:most_rejected]:
            price = "" if loser.seconds is None else f" {_ms(loser.seconds)}, {_mb(loser.peak_bytes or 0)}:"
            out += [f"     - {loser.candidate}:{price}", f"       {loser.why}"]
        return out


def _step_dict(step: FusedStep, seconds: float, measured: Measured | None) -> dict[str, Any]:
    work = step.price.work
    return {
        "phase": {"fwd": "forward", "bwd": "backward"}[step.phase],
        "op": step.title,
        "backend": step.price.backend,
        "flops": work.flops,
        "bytes_least": work.bytes_least,
        "bytes_gathered": work.bytes_gathered,
        "seconds": step.price.seconds,
        "share": step.price.seconds / seconds if seconds else 0.0,
        "because": step.price.because,
        "measured_seconds": measured.seconds if measured else None,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


@dataclass(frozen=True)
class FusedCandidate:
    """One legal way to compute a layer: its name, its formula, its steps, what it holds, why one would."""

    name: str
    text: str
    steps: tuple[FusedStep, ...]
    peak_bytes: int
    because: str

    @property
    def seconds(self) -> float:
        return sum(step.price.seconds for step in self.steps)


def choose_among(
    candidates: list[FusedCandidate],
    *,
    layer: str,
    kind: str,
    sizes: Mapping[str, int],
    machine: MachineProfile,
    is_training: bool,
    memory_limit: int | None = None,
) -> FusedPlan:
    """The cheapest candidate that fits the layer's memory limit, with the losers and their prices.

    The leanest where none does: whether the whole model fits is for the dial to say (plan/dial.py).
    """
    ranked = sorted(candidates, key=lambda candidate: candidate.seconds)
    fitting = [c for c in ranked if memory_limit is None or c.peak_bytes <= memory_limit]
    fitting = fitting or [min(ranked, key=lambda candidate: candidate.peak_bytes)]
    best = fitting[min(preferred_rank(), len(fitting) - 1)]
    rejected = tuple(
        Rejected(
            c.text, c.seconds, c.peak_bytes, _why(c, best, memory_limit), words.of_choice(c.name, c.text)
        )
        for c in ranked
        if c is not best
    )
    return FusedPlan(
        layer=layer, kind=kind, choice=best.name, text=best.text, steps=best.steps, seconds=best.seconds,
        peak_bytes=best.peak_bytes, sizes=sizes, mode="training" if is_training else "inference",
        machine=machine.name, is_default_machine=machine.is_default, rejected=rejected, because=best.because,
    )  # fmt: skip


def _why(loser: FusedCandidate, best: FusedCandidate, limit: int | None) -> str:
    if limit is not None and loser.peak_bytes > limit:
        return f"needs {_mb(loser.peak_bytes)}, more than its share of memory_limit, {_mb(limit)}"
    if not best.seconds or loser.seconds <= words.TIE * best.seconds:
        return "a tie with the chosen plan"
    return f"{loser.seconds / best.seconds:.2f} times the price"
