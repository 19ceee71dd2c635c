"""Programs over ranks: exchanges written into a layer's candidates, priced, and agreed on by all ranks.

Every rank holds the rows of its own nodes. A product with the graph needs rows of other ranks' nodes too, and
there are three ways to bring both together. The missing rows are sent before the product ("by nodes") or
while the product with a rank's own rows is computed ("by nodes, overlapped", and with what is sent computed
from few rows "by nodes, overlapped, border first"); or every rank takes some columns of all rows, multiplies
them by the whole graph and sends them back ("by features"). Which values are sent follows from the
association: before the update they are as wide as the input, after it as the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from plait.cost.price import Price, Pricer
from plait.errors import InputError, PlanError
from plait.ir import Barrier, Expr
from plait.ops.exchange import EXCHANGES, meetings, wire_numbers
from plait.ops.operation import Setting
from plait.ops.program import Program, Shape, Step
from plait.ops.work import ChainRequest, Request, Work
from plait.plan.candidates import Candidate
from plait.plan.early import early, early_backward
from plait.plan.halves import Halves
from plait.plan.plan import LayerPlan, Rejected
from plait.plan.program import differentiate
from plait.plan.prune import Survivor, prune
from plait.plan.search import Problem, matrices_of, survey

__all__ = [
    "TIE", "Choice", "Link", "Offer", "by_features", "by_nodes", "checked_split", "choices_of_ranks",
    "choose_over_ranks", "offer", "overlapped", "slowest", "spaced", "wire_bytes",
]  # fmt: skip

TIE = 1.1
"""Prices this close say nothing about which is faster: figures of one network, measured seconds apart, differ
by more."""
_AT_ONCE = ("exchange", "to_columns", "to_rows")

Agree = Callable[[Mapping[str, float]], Mapping[str, float]]
"""This rank's prices, or bytes, by what would be sent -> the largest of all ranks', for what all have."""


@dataclass(frozen=True)
class Link:
    """The network: bytes per second in each direction, latency in seconds, number of other ranks.

    `meeting` is what an exchange costs beside its messages: ranks arrive at different times, and wake up.
    """

    bytes_per_s: float
    latency: float
    peers: int
    meeting: float = 0.0

    def seconds(self, size: float, op: str = "exchange") -> float:
        """An exchange of which this rank sends or receives this many bytes."""
        met = self.meeting * meetings(op) if self.peers else 0.0
        return size / self.bytes_per_s + self.peers * self.latency + met


@dataclass(frozen=True)
class Choice:
    """What one layer exchanges, and the alternatives: seconds of the slowest rank by what would be sent."""

    layer: str
    mode: str
    split: str
    travels: str
    seconds: Mapping[str, float]
    plan: LayerPlan | None
    bytes_each: tuple[int, ...]  # sent by this rank in each exchange of a step, in order
    bytes_once: int = 0
    pass_seconds: float = 0.0  # of a layer's passes, where its exchanges are not steps of a plan
    halves: Halves | None = None  # where rows without remote neighbours are handed out before the halo came


# Rewrites -------------------------------------------------------------------------------------------------


def by_nodes(program: Program) -> Program:
    """The program with the halo of every value fetched before it is multiplied by the graph."""
    writer = _Writer(program)
    for step in program.steps:
        matrix = step.get("matrix")
        if matrix is None or isinstance(program.constants[matrix], Barrier):
            writer.steps.append(step)
            continue
        x = writer.once("exchange", step["x"], f"{step['x']}@halo", "H")
        reads = {**dict(step.reads), "x": x}
        if "source" in reads:
            reads["source"] = writer.constant("halo", reads["source"])
        writer.steps.append(replace(step, reads=tuple(reads.items())))
    return writer.program()


def overlapped(program: Program) -> Program:
    """The program with halos being sent while products with a rank's own rows are computed.

    A @ X is split by columns: own(A) @ X needs nothing from others, and remote(A) @ halo is added to it. A
    maximum is not split this way and waits for its halo.
    """
    writer = _Writer(program)
    for step in program.steps:
        if step.op == "spmm":
            writer.split(step)
        else:
            writer.steps.append(step)
    return by_nodes(writer.program())


def by_features(program: Program) -> Program | None:
    """The program with every product with the graph done by columns; None where a width is a sum."""
    writer = _Writer(program)
    for step in program.steps:
        if step.get("matrix") is None:
            writer.steps.append(step)
            continue
        width = str(program.shapes[step["x"]][1])
        if "+" in width:
            return None
        writer.by_columns(step, f"{width}/P")
    made = writer.program()
    read = {name for step in made.steps for _, name in step.reads} | set(made.outputs)
    return replace(made, steps=tuple(s for s in made.steps if s.op != "to_rows" or s.out in read))


class _Writer:
    """A program while it is rewritten."""

    def __init__(self, program: Program) -> None:
        self.before = program
        self.steps: list[Step] = []
        self.shapes: dict[str, Shape] = dict(program.shapes)
        self.constants: dict[str, Expr] = dict(program.constants)

    def once(self, op: str, x: str, name: str, rows: str, cols: str | None = None) -> str:
        """The exchanged value, created where it is first needed."""
        if name not in self.shapes:
            self.shapes[name] = (rows, self.shapes[x][1] if cols is None else cols)
            self.steps.append(Step(op, name, (("x", x),)))
        return name

    def constant(self, where: str, name: str) -> str:
        """The constant for the rows of the halo too, or of all nodes."""
        other = f"{name}@{where}"
        self.constants[other] = Barrier(where, self.before.constants[name])
        return other

    def split(self, step: Step) -> None:
        """A product split into one with a rank's own rows and one with the halo, which arrives meanwhile."""
        reads, x = dict(step.reads), step["x"]
        sent = self.once("send", x, f"{x}@sent", "B")
        own = {**reads, "matrix": self.constant("own", reads["matrix"])}
        first = f"{step.out}@own"
        self.shapes[first] = self.shapes[step.out]
        self.steps.append(replace(step, out=first, reads=tuple(own.items())))
        halo: dict[str, str] = {role: reads[role] for role in ("target", "factor") if role in reads}
        halo["matrix"] = self.constant("remote", reads["matrix"])
        halo["x"] = self.once("receive", sent, f"{x}@received", "B")
        halo["addend"] = first
        if "source" in reads:
            halo["source"] = self.constant("border", reads["source"])
        self.steps.append(replace(step, reads=tuple(halo.items())))

    def by_columns(self, step: Step, cols: str) -> None:
        """A product of some columns with the whole graph, sent back as rows; fused terms come after."""
        reads = dict(step.reads)
        x = self.once("to_columns", step["x"], f"{step['x']}@columns", "G", cols)
        inner = {"matrix": self.constant("all", reads["matrix"]), "x": x}
        for role in ("source", "target"):
            if role in reads:
                inner[role] = self.constant("all", reads[role])
        if "factor" in reads:
            inner["factor"] = reads["factor"]
        after = [role for role in ("addend", "bias") if role in reads]
        # the next product with the graph can use these columns directly, unless something is added first
        made = f"{step.out}@product" if after else f"{step.out}@columns"
        more = tuple(f"{name}@columns" for name in step.more)
        self.shapes.update(dict.fromkeys((made, *more), ("G", cols)))
        self.steps.append(replace(step, out=made, reads=tuple(inner.items()), more=more))
        if not after:
            self.steps.append(Step("to_rows", step.out, (("x", made),)))
            return
        rows = self.once("to_rows", made, f"{step.out}@rows", *map(str, self.shapes[step.out]))
        terms = [rows, *([self.scaled(reads)] if "addend" in reads else [])]
        joined = [(f"x{k}", name) for k, name in enumerate(terms)]
        joined += [("bias", reads["bias"])] if "bias" in reads else []
        self.steps.append(Step("combine", step.out, tuple(joined), factors=(1.0,) * len(terms)))

    def scaled(self, reads: Mapping[str, str]) -> str:
        """The added term of a product with its scaling."""
        addend, scale = reads["addend"], reads.get("addend_scale")
        if scale is None:
            return addend
        op, role = ("scale_rows", "scale") if scale in self.constants else ("scale", "scalar")
        name = f"{addend}*{scale}"
        if name not in self.shapes:
            self.shapes[name] = self.shapes[addend]
            self.steps.append(Step(op, name, ((role, scale), ("x", addend))))
        return name

    def program(self) -> Program:
        return replace(self.before, steps=tuple(self.steps), shapes=self.shapes, constants=self.constants)


@dataclass(frozen=True, eq=False)
class _Spread(Candidate):
    """A candidate with its exchanges, those of gradients included."""

    def backward(self, wrt: tuple[str, ...]) -> Program:  # type: ignore[override]
        return differentiate(self.forward, wrt)


@dataclass(frozen=True, eq=False)
class _Early(Candidate):
    """An overlapped candidate with what is sent computed first."""

    whole: Program

    def backward(self, wrt: tuple[str, ...]) -> Program:  # type: ignore[override]
        return early_backward(differentiate(self.whole, wrt), self.whole, self.forward)


_WAYS: Mapping[str, Callable[[Program], Program | None]] = {
    "by nodes": by_nodes, "by nodes, overlapped": overlapped, "by features": by_features
}  # fmt: skip
_SPLITS: Mapping[str | None, tuple[str, ...]] = {
    None: tuple(_WAYS), "nodes": ("by nodes", "by nodes, overlapped"), "features": ("by features",),
    "nodes, at once": ("by nodes",), "nodes, overlapped": ("by nodes, overlapped",),
}  # fmt: skip


def checked_split(split: str | None) -> str | None:
    """The given split; InputError if it is unknown."""
    if split not in _SPLITS:
        raise InputError(f"split: {split!r}; give one of {', '.join(filter(None, _SPLITS))}, or None for any")
    return split


def _spread(
    survivors: Sequence[Survivor],
    is_alone: bool,
    split: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[Survivor]:
    """Every candidate with its exchanges, under this split; under any split where this one is impossible.

    With `sizes` a split that was not requested and cannot pay is left out.
    """
    found = []
    for survivor in survivors:
        option = survivor.candidate
        seen: list[tuple[Step, ...]] = []
        for name in _SPLITS[split]:
            if name == "by features" and split is None and sizes and not _columns_may_pay(option, sizes):
                continue
            program = _WAYS[name](option.forward)
            if program is not None and program.steps not in seen and not (is_alone and seen):
                seen.append(program.steps)
                made: Candidate = _Spread(option.expr, f"{option.form}, {name}", program)
                found.append(Survivor(made, survivor.condition))
                if any(step.op == "send" for step in program.steps) and not is_alone:
                    made = _Early(option.expr, f"{made.form}, border first", early(program), program)
                    found.append(Survivor(made, survivor.condition))
    return found if found or split is None else _spread(survivors, is_alone)


def _columns_may_pay(option: Candidate, sizes: Mapping[str, int]) -> bool:
    """Whether a split by features sends fewer numbers than one by nodes.

    By features a rank's rows go to columns and back, (P - 1) / P of them each time, however many products
    with the graph lie between; by nodes every product has its halo. Its price takes the whole graph, which a
    rank does not hold otherwise.
    """
    products = sum(step.get("matrix") is not None for step in option.forward.steps)
    ranks = sizes["P"]
    return products * max(sizes["S"], sizes["B"]) * ranks * ranks > 2 * sizes["G"] * (ranks - 1)


# Prices ---------------------------------------------------------------------------------------------------


class _Pricer(Pricer):
    """Prices steps on this machine and exchanges on the network."""

    def __init__(self, problem: Problem, link: Link) -> None:
        super().__init__(problem.machine, problem.float_bytes, problem.threads)
        self.link = link

    def price(self, request: Request | ChainRequest | None) -> Price:
        if not isinstance(request, Request) or request.op not in EXCHANGES:
            return super().price(request)
        size = float(request.rows * request.cols * self.float_bytes)
        copied = self.copy_seconds(request.inner) if self.link.peers else 0.0
        seconds = self.link.seconds(size, request.op) + copied
        said = f"{size / 1e6:.3g} MB sent"
        return Price(seconds, Work(0.0, size, size), "network", said, copy_seconds=copied)


@dataclass(frozen=True)
class Offer:
    """One rank's options for a layer: its best plan for each set of values that could be sent."""

    problem: Problem
    link: Link
    plans: Mapping[str, LayerPlan]

    @property
    def prices(self) -> dict[str, float]:
        """Seconds by what would be sent."""
        known = {key: plan.seconds for key, plan in self.plans.items()}
        return {**known, **_replicated(self.plans.values(), self.problem, self.link)}

    @property
    def sent(self) -> dict[str, float]:
        """Bytes of this rank in the exchanges of a step, by what would be sent."""
        return {key: float(sum(wire_bytes(plan, self.problem)[1])) for key, plan in self.plans.items()}

    def settled(self, seconds: Mapping[str, float], sent: Mapping[str, float]) -> tuple[LayerPlan, Choice]:
        """This rank's plan in the group that all choose, by the slowest rank's price and the busiest's bytes.

        Of groups that cost about as much as the cheapest, the one that sends the fewest bytes: priced with a
        network measured a moment before or after it is still chosen, and it loses less where the network
        turns out to be slower. The same on every rank.
        """
        problem, best = self.problem, self.plans
        known = [key for key in seconds if key in best]
        cheapest = min(known, key=lambda key: (seconds[key], key))
        ties = [key for key in known if seconds[key] <= TIE * seconds[cheapest]]
        chosen = min(ties, key=lambda key: (sent[key], seconds[key], key))
        plan = best[chosen]
        rejected = tuple(
            _lost(key, best.get(key), value, seconds[chosen])
            for key, value in sorted(seconds.items(), key=lambda item: item[1])
            if key != chosen
        )
        because = f"of all possible exchanges this costs the slowest rank least: {chosen}"
        if chosen != cheapest:
            because = (
                f"of exchanges that cost the slowest rank at most {TIE - 1:.0%} more than the cheapest this "
                f"sends the fewest bytes: {chosen}"
            )
        plan = replace(plan, rejected=rejected, because=because, matrices=matrices_of(plan, problem))
        once, each = wire_bytes(plan, problem)
        split = "by " + plan.form.partition(", by ")[2].removesuffix(", chained")
        choice = Choice(problem.layer, plan.mode, split if each or once else "rows alone", chosen, seconds,
                        plan, each, sum(once))  # fmt: skip
        return plan, choice


def offer(problem: Problem, link: Link, split: str | None = None) -> Offer:
    """A rank's options for a layer; `split`: only "nodes" or "features", where the layer allows it."""
    survivors, _ = prune(problem.forms, problem.wrt, problem.constant, False)
    known = {**problem.sizes, "P": link.peers + 1}
    spread = _spread(survivors, link.peers == 0, split, known if "S" in known else None)
    plans = [_with_overlap(spaced(plan)) for plan in survey(problem, spread, _Pricer(problem, link))]
    best: dict[str, LayerPlan] = {}
    for plan in sorted(plans, key=lambda plan: plan.seconds):
        best.setdefault(_travels(plan), plan)
    return Offer(problem, link, best)


def slowest(prices: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest of each group's prices, or bytes, for groups that every rank has one for."""
    common = [key for key in prices[0] if all(key in other for other in prices)]
    if not common:
        raise PlanError(
            "the ranks have no plan in common; call the model the same way on all, with one version of plait"
        )
    return {key: max(float(other[key]) for other in prices) for key in common}


def choose_over_ranks(
    problem: Problem, link: Link, agree: Agree, split: str | None = None
) -> tuple[LayerPlan, Choice]:
    """The cheapest plan all ranks can take part in; prices are those of the slowest rank.

    Ranks plan for their own nodes and machines. They must agree on what is sent and when: plans are grouped
    by that, every rank gives the price of its best plan of each group and the bytes it sends, and the group
    whose largest price is smallest is chosen, or one that is about as cheap and sends less.
    """
    own = offer(problem, link, split)
    return own.settled(agree(own.prices), agree(own.sent))


def choices_of_ranks(problems: Sequence[Problem], link: Link, split: str | None = None) -> tuple[Choice, ...]:
    """What all ranks would choose together, computed in one process from the problem of each."""
    offers = [offer(problem, link, split) for problem in problems]
    seconds, sent = (slowest(said) for said in ([o.prices for o in offers], [o.sent for o in offers]))
    return tuple(one.settled(seconds, sent)[1] for one in offers)


def _replicated(plans: Iterable[LayerPlan], problem: Problem, link: Link) -> dict[str, float]:
    """The price of sending all rows to all ranks instead of halos: shown only, since it is never less."""
    halos = [plan for plan in plans if "halo" in _travels(plan) and "columns" not in _travels(plan)]
    if not halos:
        return {}
    plan, rest = halos[0], (problem.sizes["G"] - problem.sizes["N"]) * problem.float_bytes
    more = 0.0
    for program, calls in ((plan.hoisted, problem.calls), (plan.forward, 1), (plan.backward, 1)):
        setting = Setting(program or plan.forward, problem.sizes, problem.matrix, {})  # type: ignore[arg-type]
        for step in () if program is None else program.steps:
            if step.op in EXCHANGES:
                sent = max(wire_numbers(step, setting)) * problem.float_bytes
                more += (link.seconds(rest * setting.size(step.out)[1]) - link.seconds(sent)) / calls
    return {_travels(plan).replace("halo", "all rows"): plan.seconds + more}


def _lost(travels: str, plan: LayerPlan | None, seconds: float, best: float) -> Rejected:
    """The groups that lost, with this rank's plan in each."""
    why = f"{seconds / max(best, 1e-12):.2f} x the chosen plan over ranks; sends: {travels}"
    if plan is None:
        return Rejected(travels, seconds, None, why)
    return Rejected(plan.describe(), seconds, plan.peak_bytes, why)


def spaced(plan: LayerPlan) -> LayerPlan:
    """The plan with rows sent as early and awaited as late as possible.

    Exchanges keep their relative order, on which all ranks rely whether they overlap or not.
    """
    forward, backward = plan.forward, plan.backward
    first = _order(forward.steps)
    priced = [plan.steps[k] for k in first]
    forward = replace(forward, steps=tuple(forward.steps[k] for k in first))
    if backward is not None:
        second = _order(backward.steps)
        priced += [plan.steps[plan.num_forward + k] for k in second]
        backward = replace(backward, steps=tuple(backward.steps[k] for k in second))
    return replace(plan, forward=forward, backward=backward, steps=tuple(priced))


def _order(steps: Sequence[Step]) -> list[int]:
    """The order of the steps: what leads to a `send` first, a `receive` only when nothing else can run."""
    made = {name: k for k, step in enumerate(steps) for name in (step.out, *step.more)}
    needs = [{made[name] for _, name in step.reads if name in made} - {k} for k, step in enumerate(steps)]
    for one_end in ("send", "receive"):
        ordered = [k for k, step in enumerate(steps) if step.op == one_end or step.op in _AT_ONCE]
        for before, after in itertools.pairwise(ordered):
            needs[after].add(before)
    is_urgent = [step.op == "send" for step in steps]
    for k in reversed(range(len(steps))):
        for before in needs[k] if is_urgent[k] else ():
            is_urgent[before] = True
    urgency = [2 if step.op == "receive" else 1 - int(is_urgent[k]) for k, step in enumerate(steps)]
    order: list[int] = []
    left = set(range(len(steps)))
    while left:
        ready = [k for k in left if not needs[k] & left]
        order.append(min(ready, key=lambda k: (urgency[k], k)))
        left.remove(order[-1])
    return order


def _with_overlap(plan: LayerPlan) -> LayerPlan:
    """The plan with what runs between sending and receiving subtracted from the price of receiving."""
    steps = list(plan.steps)
    sent: dict[str, int] = {}
    for k, priced in enumerate(steps):
        if priced.step.op == "send":
            sent[priced.step.out] = k
        elif priced.step.op == "receive" and priced.step["x"] in sent:
            meanwhile = sum(s.price.seconds for s in steps[sent[priced.step["x"]] + 1 : k])
            left = max(priced.price.copy_seconds, priced.price.seconds - meanwhile)
            steps[k] = replace(priced, price=replace(priced.price, seconds=left))
    saved = sum(
        before.price.seconds - after.price.seconds for before, after in zip(plan.steps, steps, strict=True)
    )
    return replace(plan, steps=tuple(steps), seconds=plan.seconds - saved)


class _Exchanged(NamedTuple):
    """One exchange of a plan: in which phase, of what, how wide."""

    phase: str
    name: str
    width: int


def _travels(plan: LayerPlan) -> str:
    """What the plan exchanges, in order; it is the same on all ranks that take part."""
    return ", ".join(f"{one.phase} {one.name} x {one.width}" for one in _exchanged(plan)) or "nothing"


def _exchanged(plan: LayerPlan) -> list[_Exchanged]:
    programs = [("once", plan.hoisted), ("fwd", plan.forward), ("bwd", plan.backward)]
    found = []
    for phase, program in programs:
        for step in () if program is None else program.steps:
            if step.op in EXCHANGES:
                assert program is not None
                # whether to wait for rows at once is each rank's own choice
                name = {"to_columns": "columns", "to_rows": "rows"}.get(step.op, "halo")
                # of columns the width of the whole: a rank's own share differs
                of = step.out if step.op == "to_rows" else step["x"]
                width = str(program.shapes[of][1])
                size = plan.sizes[width.removesuffix("/P")] if not width.isdigit() else int(width)
                found.append(_Exchanged(phase, name + "ᵀ" * step.is_transposed, size))
    return found


def wire_bytes(plan: LayerPlan, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes this rank sends once, and in each exchange of a step."""

    def sent(*programs: Program | None) -> tuple[int, ...]:
        found = []
        for program in programs:
            if program is not None:
                setting = Setting(program, problem.sizes, problem.matrix, {})  # type: ignore[arg-type]
                found += [
                    wire_numbers(step, setting)[0] * problem.float_bytes
                    for step in program.steps
                    if step.op in EXCHANGES
                ]
        return tuple(found)

    return sent(plan.hoisted), sent(plan.forward, plan.backward)
