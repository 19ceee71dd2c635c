"""The Plan: what was chosen, what lost and by how much, and why; it prints itself."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from plait.cost.price import Price
from plait.ir import Expr, formula
from plait.ops.operation import operation
from plait.ops.program import Program, Step
from plait.ops.work import Matrix, size_of
from plait.plan import printed, words
from plait.plan.dial import Option, Stage, bytes_text, peak_of

__all__ = ["LayerPlan", "Measured", "NotPlanned", "Plan", "PricedStep", "Rejected", "owner", "wrapped"]

_WIDTH = printed.WIDTH
_STEP = 41  # columns of a step's title: the room that the figures leave, those of EXPLAIN ANALYZE included


@dataclass(frozen=True)
class PricedStep:
    """A step with its price and the rows and columns that the price is for."""

    step: Step
    size: tuple[int, int]
    price: Price

    def title(self, made: tuple[int, int] | None = None) -> str:
        """The operation, its matrix and the size of what it makes (by default the size it is priced for)."""
        rows, cols = made or self.size
        if self.step.op == "chain":
            return f"{_chain_title(self.step)} -> {rows}x{cols}"
        name = self.step.op + ("ᵀ" if self.step.is_transposed else "")
        matrix = self.step.get("matrix")
        return f"{name}{f' {matrix}' if matrix else ''} -> {rows}x{cols}"


@dataclass(frozen=True)
class Rejected:
    """A candidate that lost: its price and peak memory where it was priced, and why it lost."""

    candidate: str
    seconds: float | None
    peak_bytes: int | None
    why: str
    words: str = ""  # what it would have done, where that differs from the chosen plan
    kept_bytes: int | None = None  # for the backward pass, hoisted values included
    kept_output: int = 0  # of these, the output's


@dataclass(frozen=True)
class Measured:
    """What a step took when it ran: seconds, and the bytes it allocated at its peak."""

    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one expression of one layer."""

    layer: str
    expr: Expr | None  # None: a program that states no expression (plan/ways.py)
    form: str
    condition: str
    forward: Program
    backward: Program | None
    hoisted: Program
    steps: tuple[PricedStep, ...]
    hoisted_steps: tuple[PricedStep, ...]
    num_forward: int
    seconds: float
    peak_bytes: int
    sparse_values: tuple[str, ...]
    sizes: Mapping[str, int]
    mode: str
    machine: str
    is_default_machine: bool
    wrt: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    because: str = ""
    measured: Mapping[str, Measured] = field(default_factory=dict)
    # seconds of its call ("fwd") and of its gradients' ("bwd") besides the steps, where they were measured
    calling: Mapping[str, float] = field(default_factory=dict)
    gradient_expr: Expr | None = None  # the equal expression whose gradients are computed, where another one
    matrices: Mapping[str, Matrix] = field(default_factory=dict)  # constants and sparse values, as priced
    choice: str = ""  # the name of the chosen way
    text: str = ""  # and its formula
    kept_bytes: int = 0  # of peak_bytes: from the forward to the backward pass, hoisted values included
    kept_output: int = 0  # of kept_bytes: the output's

    def describe(self) -> str:
        """The formula with its graph form, as text."""
        if self.expr is None:
            return self.text
        sparse = ", sparse features" if self.sparse_values else ""
        gradients = "" if self.gradient_expr is None else f", gradients of {formula(self.gradient_expr)}"
        return f"{formula(self.expr)} [{self.form}{sparse}]{gradients}"

    def action(self) -> str:
        """What the layer does, in words."""
        if self.expr is None:
            return words.of_choice(self.choice, self.text)
        return words.order(self.hoisted, self.forward, self.mode == "training")

    def reason(self) -> str:
        """Why that is the cheapest order, in words; empty where there is nothing to say."""
        return self.because if self.expr is None else words.why(self)

    def rows(self) -> list[printed.Row]:
        """The steps in words, those that are done once first."""
        phases = ["once"] * len(self.hoisted_steps)
        phases += ["fwd"] * self.num_forward + ["bwd"] * (len(self.steps) - self.num_forward)
        found = []
        for phase, step in zip(phases, (*self.hoisted_steps, *self.steps), strict=True):
            if operation(step.step.op).is_view:
                continue  # no data moves
            seen = self.measured.get(step.step.out)
            text, size = words.step_text(step.step), self.size_made(step)
            found.append(printed.Row(phase, text, size, step.price, seen.seconds if seen else None))
        return found

    def size_made(self, step: PricedStep) -> tuple[int, int]:
        """Rows and columns of what a step makes; a gradient of weights is priced by the rows it reads."""
        for program in (self.hoisted, self.forward, self.backward):
            if program is not None and step.step.out in program.shapes:
                rows, columns = program.shapes[step.step.out]
                return size_of(rows, self.sizes), size_of(columns, self.sizes)
        return step.size

    def to_dict(self) -> dict[str, Any]:
        """Everything about the layer as plain data: choice, steps, prices, rejected candidates."""
        return {
            "layer": self.layer,
            "expression": self.describe() if self.expr is None else formula(self.expr),
            "form": self.form or self.choice,
            "condition": self.condition,
            "mode": self.mode,
            "sizes": dict(self.sizes),
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "sparse_features": list(self.sparse_values),
            "machine": self.machine,
            "is_default_machine": self.is_default_machine,
            "because": self.because,
            "in_words": printed.sentence(self),
            "hoisted": [self._step_dict(step, "once") for step in self.hoisted_steps],
            "steps": [
                self._step_dict(step, "forward" if k < self.num_forward else "backward")
                for k, step in enumerate(self.steps)
            ],
            "calling": {printed.PHASES[phase]: seconds for phase, seconds in self.calling.items()},
            "rejected": [vars_of(r) for r in self.rejected],
        }

    def _step_dict(self, step: PricedStep, phase: str) -> dict[str, Any]:
        measured = self.measured.get(step.step.out)
        return {
            "phase": phase,
            "op": step.step.op,
            "is_transposed": step.step.is_transposed,
            "reads": dict(step.step.reads),
            "rows": step.size[0],
            "columns": step.size[1],
            "backend": step.price.backend,
            "flops": step.price.work.flops,
            "bytes_least": step.price.work.bytes_least,
            "bytes_gathered": step.price.work.bytes_gathered,
            "seconds": step.price.seconds,
            "share": step.price.seconds / self.seconds if self.seconds else 0.0,
            "because": step.price.because,
            "measured_seconds": measured.seconds if measured else None,
            "measured_peak_bytes": measured.peak_bytes if measured else None,
        }

    def lines(self, most_rejected: int = 6) -> list[str]:
        """The tree of this layer, at most 100 columns wide."""
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        out = wrapped(f"{self.layer}: {self.describe()}", "")
        out += wrapped(
            f"{self.mode}, {sizes}; predicted {_ms(self.seconds)}, peak {_mb(self.peak_bytes)}", "   "
        )
        out += wrapped(f"because {self.because}", "   ")
        has_measured = bool(self.measured)
        head = f"   {'step':<{_STEP}}{'backend':<8}{'Mflop':>9}{'MB':>8}{'predicted':>12}{'share':>7}"
        out.append(head + (f"{'measured':>12}" if has_measured else ""))
        for step in self.hoisted_steps:
            out.append(self._row(step, "once", has_measured))
        for k, step in enumerate(self.steps):
            out.append(self._row(step, "fwd" if k < self.num_forward else "bwd", has_measured))
        for phase, seconds in self.calling.items():
            out.append(f"   {f'{phase:<5}{printed.CALLING}':<{len(head) - 3}}{_ms(seconds):>12}")
        if self.rejected:
            out.append("   rejected:")
        for loser in self.rejected[:most_rejected]:
            price = "" if loser.seconds is None else f"{_ms(loser.seconds)}, {_mb(loser.peak_bytes or 0)}: "
            out += wrapped(f"- {loser.candidate}: {price}{loser.why}", "     ", "       ")
        if len(self.rejected) > most_rejected:
            out.append(f"     (+{len(self.rejected) - most_rejected} more; .to_dict() has them all)")
        if self.condition:
            out += wrapped(f"this candidate is only ever best when {self.condition}", "   ")
        return out

    def _row(self, step: PricedStep, phase: str, has_measured: bool) -> str:
        share = step.price.seconds / self.seconds if self.seconds and phase != "once" else 0.0
        work = step.price.work
        title = printed.cut(f"{phase:<5}{step.title(self.size_made(step))}", _STEP - 1)
        text = (
            f"   {title:<{_STEP}}{step.price.backend:<8}{work.flops / 1e6:>9.1f}"
            f"{work.bytes_gathered / 1e6:>8.1f}{_ms(step.price.seconds):>12}{share:>7.0%}"
        )
        measured = self.measured.get(step.step.out)
        return text + (f"{_ms(measured.seconds):>12}" if measured and has_measured else "")


def owner(name: str) -> str:
    """The layer an expression belongs to: "path Kind" for "path Kind#1" and "path Kind piece"."""
    return " ".join(name.partition("#")[0].split(" ")[:2])


def _chain_title(step: Step) -> str:
    """What a chain does to its rows: `A 2 gemm 1 sum`."""
    roles = [role for role, _ in step.reads]
    products = sum(role.startswith("rows") for role in roles)
    sums = sum(role.startswith("right") for role in roles)
    matrix = step.get("matrix")
    parts = [] if matrix is None else [matrix + ("ᵀ" if step.is_transposed else "")]
    parts += [f"{products} gemm"] if products else []
    parts += [f"{sums} sum" + "s" * (sums > 1)] if sums else []
    return "chain " + ", ".join(parts)


def vars_of(rejected: Rejected) -> dict[str, Any]:
    """A rejected candidate as plain data."""
    return {
        "candidate": rejected.candidate,
        "seconds": rejected.seconds,
        "peak_bytes": rejected.peak_bytes,
        "why": rejected.why,
    }


@dataclass(frozen=True)
class NotPlanned:
    """A layer that runs in PyG, and why."""

    layer: str
    reason: str


@dataclass(frozen=True, repr=False)
class Plan:
    """The plan of a model: its layers in the order they run; `print` and notebooks show it in words."""

    layers: tuple[LayerPlan, ...]
    not_planned: tuple[NotPlanned, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # reasons to doubt the prices or times
    model: str = "model"
    other: Plan | None = None  # the plan of the other mode, where the model ran in both
    memory_limit: int | None = None
    model_peak: int | None = None  # most bytes alive in a step, where a run of the model was observed
    measured_seconds: float | None = None  # of a whole step of the model, with a clock on the layers' steps

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step of all planned layers."""
        return sum(layer.seconds for layer in self.layers)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive in one step of the whole model.

        The sum of what all layers keep for their gradients, plus what one of them needs while it runs. For a
        compiled model also parameters, their gradients, arguments, graphs and constants, and what its own
        code between the layers saves.
        """
        if self.model_peak is not None:
            return self.model_peak
        options = [(getattr(layer, "kept_bytes", 0), layer.peak_bytes) for layer in self.layers]
        chosen = [Option(0.0, kept, peak - kept) for kept, peak in options]
        return peak_of([Stage("", (option,)) for option in chosen], chosen)

    @property
    def mode(self) -> str:
        """ "training" where any layer computes gradients, else "inference"."""
        return "training" if any(layer.mode == "training" for layer in self.layers) else "inference"

    @property
    def training(self) -> Plan | None:
        """The plan that trains; None where the model was not planned for training."""
        return self if self.mode == "training" and self.layers else self.other

    @property
    def inference(self) -> Plan | None:
        """The plan without gradients; None where the model was not planned for inference."""
        return self if self.mode == "inference" and self.layers else self.other

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as plain data."""
        return {
            "format": "plait-plan-1",
            "seconds": self.seconds,
            "measured_seconds": self.measured_seconds,
            "peak_bytes": self.peak_bytes,
            "memory_limit": self.memory_limit,
            "layers": [layer.to_dict() for layer in self.layers],
            "not_planned": [{"layer": n.layer, "reason": n.reason} for n in self.not_planned],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def to_json(self) -> str:
        """The whole plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def show(self, formulas: bool = False, file: TextIO | None = None) -> None:
        """Print the plan, in colour where the terminal has it; `formulas` adds formulas and losers."""
        stream = sys.stdout if file is None else file
        if formulas:
            print(self.formulas(), file=stream)
        else:
            text = printed.coloured_text if printed.has_colour(stream) else printed.plain_text
            print(text(*self._parts()), file=stream)

    def formulas(self) -> str:
        """The plan as formulas: every step with its work, every rejected candidate with its price."""
        lines = [line for text in self.warnings for line in wrapped(f"warning: {text}", "")]
        lines.append(f"plan: {len(self.layers)} planned, predicted {_ms(self.seconds)} per step")
        if self.layers:
            lines += [f"machine: {self._machine()}", self._memory()]
        lines += [line for note in self.notes for line in wrapped(note, "")]
        for layer in self.layers:
            lines += ["", *layer.lines()]
        for skipped in self.not_planned:
            lines += ["", *wrapped(f"{skipped.layer}: runs in PyG: {skipped.reason}", "")]
        return "\n".join(lines)

    def __str__(self) -> str:
        return printed.plain_text(*self._parts())

    def __repr__(self) -> str:
        left = f", {len(self.not_planned)} in PyG" if self.not_planned else ""
        return f"<Plan of {self.model}: {self._layers_text()}{left}, {self._cost()}>"

    def _repr_html_(self) -> str:
        return printed.html_text(*self._parts())

    def _parts(self) -> tuple[str, tuple[str, ...], tuple[LayerPlan, ...], list[str]]:
        """What a print shows: title, warnings, layers, and what follows them."""
        title = f"Plan of {self.model}: {self._layers_text()}, {self._cost()}"
        if self.layers:
            title += f"\npredicted for {self._machine()}"
        if self.layers and self.memory_limit is not None:
            title += f"\n{self._memory()}"
        after = [f"{skipped.layer} runs in PyG: {skipped.reason}" for skipped in self.not_planned]
        after += self.notes
        if self.measured_seconds is not None:
            after.append(self._measured(self.measured_seconds))
        if self.layers:
            if any(layer.steps for layer in self.layers):
                after.append(printed.LETTERS)
            after.append(
                "Formulas, kernels and every rejected plan: plan.show(formulas=True), --verbose in a shell."
            )
        if self.other is not None:
            after.append(f"The plan for {self.other.mode}: plan.{self.other.mode}.")
        return title, self.warnings, self.layers, after

    def _layers_text(self) -> str:
        count = len({owner(layer.layer) for layer in self.layers})
        return f"{count} planned layer{'' if count == 1 else 's'}"

    def _cost(self) -> str:
        rows = [row for layer in self.layers for row in layer.rows()]
        once = sum(row.price.seconds for row in rows if row.phase == "once")
        each = sum(row.price.seconds for row in rows if row.phase != "once")
        if not rows:
            return "nothing priced"
        step = "training step" if self.mode == "training" else "call"
        text = f"{printed.milliseconds(each)} per {step}"
        return text + (f" + {printed.milliseconds(once)} once" if once else "")

    def _measured(self, whole: float) -> str:
        """Where the measured time went."""
        seen = [layer.measured.get(one.step.out) for layer in self.layers for one in layer.steps]
        steps = sum(measured.seconds for measured in seen if measured is not None)
        calling = sum(sum(layer.calling.values()) for layer in self.layers)
        step = "training step" if self.mode == "training" else "call"
        taken = [printed.milliseconds(part) for part in (steps, calling, max(0.0, whole - steps - calling))]
        return (
            f"Measured: {printed.milliseconds(whole)} per {step}: {taken[0]} in the steps above, {taken[1]} "
            f"in calling them, {taken[2]} outside the planned layers, in the model's own code and in torch."
        )

    def _memory(self) -> str:
        limit = "" if self.memory_limit is None else f" of {bytes_text(self.memory_limit)} allowed"
        return f"memory: {bytes_text(self.peak_bytes)}{limit}, at the peak of a step of the whole model"

    def _machine(self) -> str:
        first = self.layers[0]
        default = " (built-in default; `plait calibrate` measures yours)"
        return first.machine + (default if first.is_default_machine else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    """The lines of a text, wrapped and indented."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=first + "  " if rest is None else rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
