"""Pruning before any graph is seen: a candidate that another one beats for every input is dropped.

A candidate's cost is a multiset of primitives with symbolic sizes. One beats another under an ordering of the
widths (K1 <= K2, say) if each of its primitives can be paired with one of the other's of the same kind and no
smaller size. A candidate beaten under every ordering is dropped; the orderings under which a survivor is
unbeaten are its condition.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from plait.ir.expr import Add, Expr, Fold, Size, Sparse
from plait.ops.program import Program, Step
from plait.plan.candidates import Candidate, candidates
from plait.plan.program import hoist

__all__ = ["Pruned", "Survivor", "prune"]


@dataclass(frozen=True)
class Survivor:
    """A candidate and the ordering of widths under which nothing beats it ("" when always)."""

    candidate: Candidate
    condition: str


@dataclass(frozen=True)
class Pruned:
    """A candidate that is beaten whatever the input, and by which one."""

    candidate: Candidate
    beaten_by: Candidate


Primitive = tuple[str, tuple[Size, ...]]
# A primitive of the first kind does the work of the second and no more, at equal sizes.
_NO_DEARER = {("spmm", "spmm source"), ("spmm", "spmm edge")}


def _primitives(program: Program, fixed: Mapping[str, str]) -> list[Primitive]:
    """The primitives of a program; `fixed` names constant operands that may be sparse, priced separately."""
    found: list[Primitive] = []
    for step in program.steps:
        rows, cols = program.shapes[step.out]
        if step.op == "spmm":
            found.append((_spmm_kind(step, program.constants[step["matrix"]]), (rows, cols)))
        elif step.op == "gemm":
            inner = program.shapes[step["x"]][1]
            found.append((f"gemm{fixed.get(step['x'], '')}", (rows, *sorted((inner, cols), key=str))))
        elif step.op == "gemm_transposed":
            kind = f"gemm_transposed{fixed.get(step['left'], '')}"
            found.append((kind, (program.shapes[step["left"]][0], *sorted((rows, cols), key=str))))
        else:
            found.append((step.op, (rows, cols)))
    return found


def _spmm_kind(step: Step, matrix: Expr) -> str:
    """Folded scalings are edge weights; folded loops of ones leave a 0/1 matrix, with more edges."""
    scaling = " source" if step.get("source") else ""
    match matrix:
        case Fold(Add(terms)) if all(isinstance(t, Sparse) or getattr(t, "name", "") == "i" for t in terms):
            return f"spmm{scaling} loops"
        case Fold():
            return "spmm edge"
    return f"spmm{scaling}"


def _no_larger(a: Size, b: Size, order: tuple[str, ...]) -> bool:
    """a <= b for every input that satisfies the ordering."""
    if a == b:
        return True
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    if isinstance(b, str) and "+" in b and str(a) in b.split("+"):
        return True
    return str(a) in order and str(b) in order and order.index(str(a)) <= order.index(str(b))


def _covers(cheap: list[Primitive], dear: list[Primitive], order: tuple[str, ...]) -> bool:
    """Whether every primitive of `cheap` has a partner of its own in `dear` that is no smaller."""
    left = list(dear)
    for kind, sizes in sorted(cheap, key=lambda p: _weight(p[1], order), reverse=True):
        for k, (other, large) in enumerate(left):
            same = other == kind or (kind, other) in _NO_DEARER
            if (
                same
                and len(large) == len(sizes)
                and all(_no_larger(a, b, order) for a, b in zip(sizes, large, strict=True))
            ):
                del left[k]
                break
        else:
            return False
    return True


def _weight(sizes: tuple[Size, ...], order: tuple[str, ...]) -> int:
    return sum(order.index(str(s)) for s in sizes if str(s) in order)


@functools.lru_cache(maxsize=256)
def prune(
    forms: tuple[Expr, ...], wrt: tuple[str, ...] | None, constant: frozenset[str], is_sparse: bool = False
) -> tuple[tuple[Survivor, ...], tuple[Pruned, ...]]:
    """(survivors with their conditions, dropped with who beats them); wrt None: inference.

    `is_sparse`: constant inputs have a sparse view, so a product with one is priced by its non-zeros.
    """
    options = candidates(forms)
    costs = [_all_primitives(option, wrt, constant, is_sparse) for option in options]
    widths = sorted({str(s) for cost in costs for _, sizes in cost for s in sizes if str(s).startswith("K")})
    simple = [w for w in widths if "+" not in w]
    # beyond three widths only what holds without any ordering is used
    orders = list(itertools.permutations(simple)) if len(simple) <= 3 else [()]
    beaten: dict[int, dict[tuple[str, ...], int]] = {i: {} for i in range(len(options))}
    for order in orders:
        for i, mine in enumerate(costs):
            beater = _first_beater(i, mine, costs, order)
            if beater is not None:
                beaten[i][order] = beater
    survivors, dropped = [], []
    for i, option in enumerate(options):
        alive = [order for order in orders if order not in beaten[i]]
        if alive:
            survivors.append(Survivor(option, "" if len(alive) == len(orders) else _condition(alive)))
        else:
            dropped.append(Pruned(option, options[next(iter(beaten[i].values()))]))
    return tuple(survivors), tuple(dropped)


def _first_beater(
    i: int, mine: list[Primitive], costs: list[list[Primitive]], order: tuple[str, ...]
) -> int | None:
    for j, other in enumerate(costs):
        if j == i or len(other) > len(mine) or not _covers(other, mine, order):
            continue
        # equal costs beat each other: the earlier candidate stays
        if j < i or not (len(other) == len(mine) and _covers(mine, other, order)):
            return j
    return None


def _all_primitives(
    option: Candidate, wrt: tuple[str, ...] | None, constant: frozenset[str], is_sparse: bool
) -> list[Primitive]:
    once, each = hoist(option.forward, constant)  # what is hoisted is not part of a step
    fixed: dict[str, str] = {}
    if is_sparse:
        fixed = {**{name: f" of {name}" for name in constant}, **dict.fromkeys(once.outputs, " of hoisted")}
    cost = _primitives(each, fixed)
    return cost if wrt is None else cost + _primitives(option.backward(wrt), fixed)


def _condition(orders: list[tuple[str, ...]]) -> str:
    return " or ".join(" <= ".join(order) for order in orders)
