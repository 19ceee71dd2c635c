"""Prices the surviving candidates for one graph, machine and mode, and chooses; losers keep their prices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from plait.cost.machine import MachineProfile
from plait.cost.price import Price, Pricer
from plait.errors import PlanError
from plait.ir import Expr, formula
from plait.ops.operation import Setting, operation
from plait.ops.program import Program
from plait.ops.work import ChainRequest, Matrix, Request, Sizes, size_of
from plait.plan.dial import Allowance
from plait.plan.fuse import fuse
from plait.plan.plan import LayerPlan, PricedStep, Rejected
from plait.plan.printed import TIE
from plait.plan.program import apart, hoist
from plait.plan.prune import Survivor, prune

__all__ = [
    "WITHIN_ERROR", "Problem", "chained", "matrices_of", "memory_of", "price_program",
    "rejected_plan", "search", "step_pricer", "survey", "too_much", "within",
]  # fmt: skip

_SAME_PRICE = 1.03
# Chains are priced more accurately than separate steps. Over 54 layers timed with all their candidates, any
# value from 1.03 on chooses equally well; at 1.1 a chained plan that is 8% slower was taken on real features.
WITHIN_ERROR = 1.05
_WORTH_FUSING = 1.6  # fusing gains less than this: more expensive plans are not considered
_PARTNERS = 2  # cheapest forward and backward passes that are tried with each other


@dataclass(frozen=True)
class Problem:
    """A layer to be planned: equal expressions, sizes, matrices of constants, and what must be computed."""

    forms: tuple[Expr, ...]
    sizes: Sizes
    matrices: Callable[[Expr], Matrix]  # what the cost model knows of a constant
    machine: MachineProfile
    wrt: tuple[str, ...] | None = None  # inputs that need a gradient; None: inference
    constant: frozenset[str] = frozenset()  # inputs that are the same at every call
    # sparse views of constant inputs (and their products)
    features: Mapping[str, Matrix] = field(default_factory=dict)
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None
    allowance: Allowance | None = None  # its share of the model's limit; if nothing fits, the leanest wins
    calls: int = 200  # calls over which the cost of hoisted work is spread
    layer: str = "layer"
    may_chain: bool = True  # there are kernels that keep blocks of rows in cache
    _known: dict[tuple[int, bool], tuple[Expr, Matrix]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def matrix(self, expr: Expr, is_transposed: bool) -> Matrix:
        """What the cost model knows of a constant or its transpose: one object for one expression."""
        found = self._known.get((id(expr), is_transposed))
        if found is None:
            matrix = self.matrices(expr)
            found = (expr, matrix.transposed() if is_transposed else matrix)
            self._known[id(expr), is_transposed] = found
        return found[1]


class _Pricer(Pricer):
    """Prices a step once: candidates of one layer share most of theirs."""

    def __init__(self, problem: Problem):
        super().__init__(problem.machine, problem.float_bytes, problem.threads)
        self._steps: dict[object, Price] = {}

    def price(self, request: Request | ChainRequest | None) -> Price:
        key = None if request is None else _key(request)
        if key not in self._steps:
            self._steps[key] = super().price(request)
        return self._steps[key]


def step_pricer(problem: Problem) -> Pricer:
    """Prices of this problem's steps; equal steps of several candidates are priced once."""
    return _Pricer(problem)


_CHAIN = tuple(part.name for part in fields(ChainRequest) if part.name != "gather")


def _key(request: Request | ChainRequest) -> tuple[object, ...]:
    """Matrices by identity: `Problem.matrix` gives one object for one constant."""
    if isinstance(request, ChainRequest):
        gather = None if request.gather is None else _key(request.gather)
        return (gather, *(getattr(request, name) for name in _CHAIN))
    return (
        request.op, request.rows, request.cols, request.inner, id(request.matrix), request.has_source,
        request.addends, request.parts, request.is_sparse_left, request.kind, request.calls,
        request.products,
    )  # fmt: skip


def survey(
    problem: Problem, survivors: Sequence[Survivor] | None = None, pricer: Pricer | None = None
) -> list[LayerPlan]:
    """Every candidate that no other beats for all inputs, priced for this one; chained ones too.

    Other candidates may be given, and another pricing of their steps.
    """
    if survivors is None:
        survivors, _ = prune(problem.forms, problem.wrt, problem.constant, bool(problem.features))
    pricer = pricer or _Pricer(problem)
    plans = [plan for survivor in survivors for plan in _priced(survivor, problem, pricer)]
    return _with_chains(plans, problem, pricer) if problem.may_chain else plans


def search(problem: Problem) -> LayerPlan:
    """The cheapest plan that fits the memory limit, with every rejected candidate and its price."""
    _, pruned = prune(problem.forms, problem.wrt, problem.constant, bool(problem.features))
    priced = survey(problem)
    limit = problem.memory_limit
    fitting = within(problem, priced)
    if not fitting:
        least = min(plan.peak_bytes for plan in priced)
        raise PlanError(
            f"memory_limit={limit}: the leanest plan of {problem.layer} needs {least} bytes; "
            "raise the limit to that, or train on mini-batches"
        )
    ranked = sorted(fitting, key=lambda plan: plan.seconds)
    best = _preferred(ranked, is_limited=limit is not None or problem.allowance is not None)
    ranked.remove(best)
    ranked.insert(0, best)
    too_large = [plan for plan in priced if plan not in fitting]
    rejected = tuple(
        [
            rejected_plan(p, p.describe(), _ratio(p, best), said)
            for p, said in _said(ranked)
        ]
        + [
            rejected_plan(p, p.describe(), too_much(p, problem))
            for p in too_large
        ]
        + [
            Rejected(f"{formula(p.candidate.expr)} [{p.candidate.form}]", None, None,
                     f"beaten for every input by {formula(p.beaten_by.expr)} [{p.beaten_by.form}]")
            for p in pruned
        ]
    )  # fmt: skip
    return replace(
        best, rejected=rejected, because=_reason(best, ranked), matrices=matrices_of(best, problem)
    )


def rejected_plan(plan: LayerPlan, candidate: str, why: str, said: str = "") -> Rejected:
    """A priced plan as one that lost."""
    return Rejected(candidate, plan.seconds, plan.peak_bytes, why, said, plan.kept_bytes, plan.kept_output)


def within(problem: Problem, plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """The plans that fit what the layer may hold; if none does and a share was given, the leanest."""
    limit, share = problem.memory_limit, problem.allowance
    fitting = [plan for plan in plans if limit is None or plan.peak_bytes <= limit]
    if share is None:
        return fitting
    inside = [plan for plan in fitting if share.admits(plan.kept_bytes, plan.peak_bytes)]
    if inside or not fitting:
        return inside
    return [min(fitting, key=lambda plan: (plan.kept_bytes + plan.peak_bytes, plan.seconds))]


def too_much(plan: LayerPlan, problem: Problem) -> str:
    """The reason against a plan that does not fit into the memory."""
    limit, needs = problem.memory_limit, f"needs {plan.peak_bytes / 1e6:.1f} MB"
    if limit is not None and plan.peak_bytes > limit:
        return f"{needs}, more than memory_limit={limit}"
    return f"{needs} and keeps {plan.kept_bytes / 1e6:.1f}, more than its share of memory_limit"


def _said(ranked: list[LayerPlan]) -> list[tuple[LayerPlan, str]]:
    """The rejected plans; the nearest ones that do something else also say what they do.

    Only the nearest tie and the nearest that is slower are ever named, so the others are left without words.
    """
    best, found = ranked[0], []
    action, left = best.action(), {True, False}
    for plan in ranked[1:]:
        text, is_tied = "", plan.seconds <= TIE * best.seconds
        if is_tied in left:
            text = plan.action()
            if text == action:
                text = ""
            else:
                left.discard(is_tied)
        found.append((plan, text))
    return found


def matrices_of(plan: LayerPlan, problem: Problem) -> dict[str, Matrix]:
    """The sparse matrices a plan multiplies by, by name; their forms belong to the graph."""
    found = {name: problem.features[_origin(name, plan.hoisted)] for name in plan.sparse_values}
    for program in (plan.hoisted, plan.forward, plan.backward):
        for step in () if program is None else program.steps:
            name = step.get("matrix")
            if program is not None and name is not None and name not in found:
                found[name] = problem.matrix(program.constants[name], False)
    bare = {"form": None, "form_transposed": None, "form_of_extrema": None}
    return {name: replace(matrix, **bare) for name, matrix in found.items()}  # type: ignore[arg-type]


def _preferred(ranked: list[LayerPlan], is_limited: bool) -> LayerPlan:
    """The cheapest plan; among near-equal prices a chained one that moves the fewest bytes,
    or, where memory is limited, the leanest.

    Over layers timed with all their candidates: of two near-equal prices, the plan whose rows stay in cache
    was mostly the faster one, and of two chained plans the one with less traffic: other load on the machine
    makes memory slower, never faster.
    """
    near = [plan for plan in ranked if plan.seconds <= WITHIN_ERROR * ranked[0].seconds]
    near = [plan for plan in near if plan.form.endswith("chained")] or near
    close = [plan for plan in near if plan.seconds <= _SAME_PRICE * near[0].seconds]
    if is_limited:
        return min(close, key=lambda plan: (plan.peak_bytes, plan.seconds))
    return min(close, key=lambda plan: (_bytes_moved(plan), plan.peak_bytes, plan.seconds))


def _bytes_moved(plan: LayerPlan) -> float:
    return sum(step.price.work.bytes_least for step in plan.steps)


def _with_chains(plans: list[LayerPlan], problem: Problem, pricer: Pricer) -> list[LayerPlan]:
    """The plans, fused where they may win, and the best forward pass with the best backward pass.

    All candidates compute the same values, so the gradients may follow another association than the values,
    as long as they read nothing but inputs.
    """
    most = _WORTH_FUSING * min(plan.seconds for plan in plans)
    near = [plan for plan in plans if plan.seconds <= most]
    fused = [found for plan in near if (found := chained(plan, plan, problem, pricer)) is not None]
    if problem.wrt is None:
        return plans + fused
    dense = [plan for plan in plans if not plan.sparse_values]
    free = [plan for plan in dense if _reads_inputs_only(plan)]
    mixed = []
    for backward in sorted(free, key=_backward_seconds)[:_PARTNERS]:
        for forward in sorted(dense, key=_forward_seconds)[:_PARTNERS]:
            if forward is not backward:
                mixed.append(chained(forward, backward, problem, pricer))
    return plans + fused + [plan for plan in mixed if plan is not None]


def _forward_seconds(plan: LayerPlan) -> float:
    return sum(step.price.seconds for step in plan.steps[: plan.num_forward])


def _backward_seconds(plan: LayerPlan) -> float:
    return sum(step.price.seconds for step in plan.steps[plan.num_forward :])


def _reads_inputs_only(plan: LayerPlan) -> bool:
    made = {step.out for step in (*plan.forward.steps, *plan.hoisted.steps)}
    assert plan.backward is not None
    return not any(name in made for step in plan.backward.steps for _, name in step.reads)


def chained(forward: LayerPlan, backward: LayerPlan, problem: Problem, pricer: Pricer) -> LayerPlan | None:
    """The forward pass of one plan and the backward pass of another, chained; None where nothing changes."""
    is_mixed = forward is not backward
    each, after = forward.forward, backward.backward
    read = set() if after is None else {name for step in after.steps for _, name in step.reads}
    each = fuse(each, (*each.outputs, *read), _apart(forward, forward.steps[: forward.num_forward]))
    if after is not None:
        after = fuse(after, after.outputs, _apart(backward, backward.steps[backward.num_forward :]))
    is_fused = each is not forward.forward and each.steps != forward.forward.steps
    is_fused |= after is not None and after.steps != (backward.backward or after).steps
    if not is_fused and not is_mixed:
        return None
    sparse = {name: problem.features[_origin(name, forward.hoisted)] for name in forward.sparse_values}
    memory = memory_of(forward.hoisted, each, after, problem, sparse)
    forward_steps = price_program(each, problem, pricer, sparse)
    backward_steps = () if after is None else price_program(after, problem, pricer, sparse)
    once = sum(step.price.seconds for step in forward.hoisted_steps) / max(1, problem.calls)
    steps = (*forward_steps, *backward_steps)
    return replace(
        forward, forward=each, backward=after, steps=steps, num_forward=len(forward_steps),
        form=f"{forward.form}, chained" if is_fused else forward.form,
        seconds=once + sum(step.price.seconds for step in steps),
        peak_bytes=memory.peak, kept_bytes=memory.kept, kept_output=memory.kept_output,
        gradient_expr=backward.expr if is_mixed else None, condition="" if is_mixed else forward.condition,
    )  # fmt: skip


def _apart(plan: LayerPlan, steps: tuple[PricedStep, ...]) -> set[str]:
    """Values whose steps run on kernels that do not chain: sparse features, graph forms, torch, slabs."""
    other = {
        s.step.out for s in steps if s.step.op == "spmm" and (s.price.backend != "plait" or s.price.slab)
    }
    return other | set(plan.sparse_values)


def _ratio(loser: LayerPlan, best: LayerPlan) -> str:
    ratio = loser.seconds / max(best.seconds, 1e-12)
    return "a tie with the chosen plan" if ratio <= TIE else f"{ratio:.2f} x the chosen plan"


def _reason(best: LayerPlan, ranked: list[LayerPlan]) -> str:
    """Why the winner won, in words: the step where the runner-up of another association pays more."""
    others = [plan for plan in ranked[1:] if plan.expr != best.expr] or ranked[1:]
    if not others:
        return "every other candidate is beaten on any graph"
    rival = others[0]
    heavy = max(rival.steps, key=lambda s: s.price.seconds, default=None)
    own = max(best.steps, key=lambda s: s.price.seconds, default=None)
    if heavy is None or own is None:
        return "everything is hoisted: nothing is left to do per call"
    ratio = rival.seconds / max(best.seconds, 1e-12)
    theirs, ours = heavy.price.seconds * 1e3, own.price.seconds * 1e3
    their_step, own_step = heavy.title(rival.size_made(heavy)), own.title(best.size_made(own))
    worth = f"{ratio:.2f} x cheaper than" if ratio > TIE else "a tie with"
    return (
        f"{worth} {rival.describe()}: its longest step is {their_step} "
        f"({theirs:.3g} ms), here it is {own_step} ({ours:.3g} ms)"
    )


def _priced(survivor: Survivor, problem: Problem, pricer: Pricer) -> list[LayerPlan]:
    """The candidate with dense features and, where a constant operand has a sparse view, with sparse ones.

    Each also with products that never change apart from what is added to them, where that makes a difference.
    """
    plans = []
    for option in (survivor, _with_products_apart(survivor, problem.constant)):
        if option is None:
            continue
        plans.append(_plan(option, problem, pricer, use_sparse=False))
        if problem.features:
            sparse = _plan(option, problem, pricer, use_sparse=True)
            if sparse.sparse_values:
                plans.append(sparse)
    return plans


def _with_products_apart(survivor: Survivor, constant: frozenset[str]) -> Survivor | None:
    """The candidate in which constant products are computed once; None where it is the same."""
    candidate = survivor.candidate
    program = apart(candidate.forward, constant) if constant else None
    if program is None:
        return None
    form = f"product once, {candidate.form}"
    return replace(survivor, candidate=replace(candidate, form=form, forward=program))


def _plan(survivor: Survivor, problem: Problem, pricer: Pricer, use_sparse: bool) -> LayerPlan:
    candidate = survivor.candidate
    once, each = hoist(candidate.forward, problem.constant)
    backward = None if problem.wrt is None else candidate.backward(problem.wrt)
    sparse = _sparse_values(once, each, problem) if use_sparse else {}
    forward_steps = price_program(each, problem, pricer, sparse)
    backward_steps = () if backward is None else price_program(backward, problem, pricer, sparse)
    hoisted_steps = price_program(once, problem, pricer, sparse)
    per_call = sum(step.price.seconds for step in (*forward_steps, *backward_steps))
    once_seconds = sum(step.price.seconds for step in hoisted_steps)
    memory = memory_of(once, each, backward, problem, sparse)
    return LayerPlan(
        layer=problem.layer,
        expr=candidate.expr,
        form=candidate.form,
        condition=survivor.condition,
        forward=each,
        backward=backward,
        hoisted=once,
        steps=(*forward_steps, *backward_steps),
        hoisted_steps=hoisted_steps,
        num_forward=len(forward_steps),
        seconds=per_call + once_seconds / max(1, problem.calls),
        peak_bytes=memory.peak,
        kept_bytes=memory.kept,
        kept_output=memory.kept_output,
        sparse_values=tuple(sparse),
        sizes=dict(problem.sizes),
        mode="inference" if problem.wrt is None else "training",
        machine=problem.machine.name,
        is_default_machine=problem.machine.is_default,
        wrt=problem.wrt or (),
    )


def _sparse_values(once: Program, each: Program, problem: Problem) -> dict[str, Matrix]:
    """Constant left operands of dense products with a sparse view: the input, or a hoisted product."""
    found = {}
    for step in each.steps:
        if step.op == "gemm" and not step.is_transposed:
            key = _origin(step["x"], once)
            if key in problem.features:
                found[step["x"]] = problem.features[key]
    return found


def _origin(value: str, once: Program) -> str:
    """What a hoisted value is: `X`, or the power of the propagation applied to it, `S^k X`."""
    hops = 0
    while True:
        step = next((s for s in once.steps if s.out == value), None)
        if step is None:
            return value if hops == 0 else f"S^{hops} {value}"
        if step.op != "spmm" or step.get("addend"):
            return "?"
        value, hops = step["x"], hops + 1


# Pricing -------------------------------------------------------------------------------------------


def price_program(
    program: Program, problem: Problem, pricer: Pricer, sparse: Mapping[str, Matrix]
) -> tuple[PricedStep, ...]:
    """Every step with its price."""

    def matrix(name: str, is_transposed: bool) -> Matrix:
        return problem.matrix(program.constants[name], is_transposed)

    setting = Setting(program, problem.sizes, matrix, sparse)
    result = []
    for step in program.steps:
        request = operation(step.op).request(step, setting)
        size = setting.size(step.out) if request is None else (request.rows, request.cols)
        result.append(PricedStep(step, size, pricer.price(request)))
    return tuple(result)


def _size(program: Program, name: str, sizes: Sizes) -> tuple[int, int]:
    rows, cols = program.shapes[name]
    return size_of(rows, sizes), size_of(cols, sizes)


# Memory --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of a plan: kept from the forward to the backward pass, and most alive at once."""

    kept: int
    peak: int
    kept_output: int = 0  # of kept: the output, which its reader may hold anyway


def memory_of(
    once: Program, each: Program, backward: Program | None, problem: Problem, sparse: Mapping[str, Matrix]
) -> Memory:
    """What a plan keeps, hoisted values included, and its peak: values live from birth to last use.

    What the backward pass reads stays until its end (autograd holds it), as does the incoming gradient. The
    inputs are not counted, because they belong to the caller.
    """
    hoisted = sum(_bytes(once, v, problem, sparse) for v in once.outputs)
    size = functools.partial(_bytes, problem=problem, sparse=sparse)
    if backward is None:
        return Memory(hoisted, hoisted + _most_alive(each, each.outputs, size))
    read = {name for step in backward.steps for _, name in step.reads}
    lies_in = _memory(each, (*read, *each.outputs))
    made = {name for step in each.steps for name in (step.out, *step.more)}
    kept = sum(size(each, name) for name in {lies_in.get(name, name) for name in made & read})
    gradient = size(each, each.outputs[0]) if backward.steps else 0
    forward_peak = _most_alive(each, (*read, *each.outputs), size)
    backward_peak = kept + gradient + _most_alive(backward, backward.outputs, size)
    kept_output = gradient if each.outputs[0] in made & read else 0
    return Memory(hoisted + kept, hoisted + max(forward_peak, backward_peak), kept_output)


def _most_alive(program: Program, keep: Iterable[str], size: Callable[[Program, str], int]) -> int:
    """Most bytes of a program's values that are alive at once; those in `keep` stay to its end."""
    steps, lies_in = program.steps, _memory(program, keep)
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    for k, step in enumerate(steps):
        for name in (step.out, *step.more):
            born.setdefault(lies_in.get(name, name), k)
        for name in (*(name for _, name in step.reads), step.out, *step.more):
            last[lies_in.get(name, name)] = k
    last |= {lies_in.get(name, name): len(steps) for name in keep}
    change = [0] * (len(steps) + 2)
    for name, k in born.items():
        bytes_made = size(program, name)
        change[k] += bytes_made
        change[last[name] + 1] -= bytes_made
    return max(accumulate(change))


def _memory(program: Program, keep: Iterable[str]) -> dict[str, str]:
    """Value -> the one in whose memory it lies: a view in what it shows, a part in what it is joined to, a
    result in the operand that its step overwrites, where nothing reads that afterwards."""
    made = {name for step in program.steps for name in (step.out, *step.more)}
    last = {name: k for k, step in enumerate(program.steps) for _, name in step.reads}
    stays = set(keep)
    views = {step.out for step in program.steps if operation(step.op).is_view}
    found: dict[str, str] = {}
    for k, step in enumerate(program.steps):
        row = operation(step.op)
        over = step.get(row.overwrites) if row.overwrites else None
        if row.is_view:
            found[step.out] = found.get(step["x"], step["x"])
        elif step.op == "join":
            found |= {name: step.out for _, name in step.reads if name in made and name not in found}
        elif over in made and over not in stays | views and last[over] == k:
            is_alone = [name for _, name in step.reads].count(over) == 1
            if is_alone and program.shapes[over] == program.shapes[step.out]:
                found[step.out] = found.get(over, over)
    return found


def _bytes(program: Program, name: str, problem: Problem, sparse: Mapping[str, Matrix]) -> int:
    if name in sparse:
        matrix = sparse[name]
        # the sparse view and its transpose, both with values
        return 2 * (matrix.edges * (problem.float_bytes + matrix.index_bytes) + matrix.rows * 4)
    rows, cols = _size(program, name, problem.sizes)
    return rows * cols * problem.float_bytes
