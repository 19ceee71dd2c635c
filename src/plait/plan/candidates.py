"""Every legal way to compute a layer: associations from the rules, times ways to apply the matrix."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from plait.ir import Add, Dense, Diagonal, Expr, Fold, MatMul, children, formula, rebuild, sort, walk
from plait.ir.rules import ASSOCIATIONS, RULES, everywhere, sweep
from plait.ops.program import Program
from plait.plan.program import differentiate, schedule

__all__ = ["FORMS", "Candidate", "associations", "candidates", "restrict"]

# most expressions in a closure; beyond it (long polynomials) only sweeps of the given ones are used
_MOST = 20
# most products with a matrix that carries loops, one on top of the other, whose loops are also tried as an
# added term: each further one doubles that expression (SGConv with K=12 took 4 s to plan, K=20 hours), and on
# layers of this depth the form with the loops inside, or in the edge weights, has far fewer steps
_MOST_SPLIT = 4

FORMS = {
    "edges": "scalings and loops precomputed as edge weights",
    "fused": "0/1 matrix, scalings fused into the product, loops as an added term",
    "fused, loops inside": "0/1 matrix with its loops, scalings fused into the product",
    "rows": "0/1 matrix, rows scaled before and after, loops as an added term",
    "plain": "the matrix unchanged",
}


@dataclass(frozen=True)
class Candidate:
    """One legal association and graph form, as the program that runs it."""

    expr: Expr
    form: str
    forward: Program

    @property
    def name(self) -> str:
        """The expression as text."""
        return f"{formula(self.expr)}"

    @functools.lru_cache(maxsize=64)  # noqa: B019  candidates live as long as the process: they are cached by form
    def backward(self, wrt: tuple[str, ...]) -> Program:
        """The program of the gradients of the inputs `wrt`."""
        return differentiate(self.forward, wrt)

    def __hash__(self) -> int:
        return hash((self.expr, self.form))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and (self.expr, self.form) == (other.expr, other.form)


@functools.lru_cache(maxsize=256)
def associations(forms: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The closure of equal expressions under the association rules, breadth first, given ones first."""
    found = dict.fromkeys(forms)
    queue = list(forms)
    while queue and len(found) <= _MOST:
        expr = queue.pop(0)
        for name in ASSOCIATIONS:
            for other in everywhere(RULES[name], expr):
                if other not in found:
                    found[other] = None
                    queue.append(other)
                if len(found) > _MOST:
                    break
    if len(found) > _MOST:
        swept = (sweep(RULES[name], form) for form in forms for name in ("update_first", "aggregate_first"))
        found = dict.fromkeys((*forms, *swept))
    return tuple(found)


def _is_normalised(expr: Expr) -> bool:
    """Whether some matrix of the expression carries scalings or loops."""
    return any(
        isinstance(part, MatMul)
        and sort(part) == "dense"
        and sort(part.left) == "sparse"
        and isinstance(part.left, MatMul | Add)
        for part in walk(expr)
    )


def _has_loops(expr: Expr) -> bool:
    return any(isinstance(part, Add) and sort(part) == "sparse" for part in walk(expr))


def _loops_may_go_inside(expr: Expr) -> bool:
    """Only loops of ones keep a 0/1 matrix 0/1; the leaf's name tells (`l` is general, `i` is ones)."""
    return any(
        isinstance(part, Add)
        and sort(part) == "sparse"
        and any(isinstance(t, Diagonal) and t.name == "i" for t in part.terms)
        for part in walk(expr)
    )


@functools.lru_cache(maxsize=1024)
def _depth(expr: Expr) -> int:
    """How many products with a sparse matrix are applied one on top of the other."""
    below = max(map(_depth, children(expr)), default=0)
    return below + (isinstance(expr, MatMul) and sort(expr.left) == "sparse" and sort(expr) == "dense")


def _split(expr: Expr, loops_inside: bool) -> Expr:
    expr = sweep(RULES["split_product"], expr)
    if loops_inside:
        return sweep(RULES["fold_loops"], expr)
    for name in ("split_loops", "distribute_scaling", "fold_scalings"):
        expr = sweep(RULES[name], expr)
    return expr


def _restricted(expr: Expr) -> bool:
    return any(
        isinstance(part, MatMul) and _is_selection(part.left) and sort(part) == "sparse"
        for part in walk(expr)
    )


def _is_selection(expr: Expr) -> bool:
    return getattr(expr, "name", None) == "E"


@functools.lru_cache(maxsize=256)
def candidates(forms: tuple[Expr, ...]) -> tuple[Candidate, ...]:
    """Associations times graph forms; equal programs appear once."""
    found: dict[tuple[object, ...], Candidate] = {}
    for expr in associations(forms):
        for form, written, fuse in _written(expr):
            program = schedule(written, fuse)
            key = (program.steps, tuple(program.constants))
            found.setdefault(key, Candidate(written, form, program))
    return tuple(found.values())


def _written(expr: Expr) -> list[tuple[str, Expr, bool]]:
    if not _is_normalised(expr):
        return [("plain", expr, True)]
    folded = sweep(RULES["fold_matrix"], expr)
    ways = [("edges", folded, True)]
    if _restricted(expr):
        return ways
    may_split = not _has_loops(expr) or _depth(expr) <= _MOST_SPLIT
    split = _split(expr, False) if may_split else expr
    if may_split:
        ways.append(("fused", split, True))
    if _has_loops(expr) and _loops_may_go_inside(expr):
        ways.append(("fused, loops inside", _split(expr, True), True))
    if may_split:
        ways.append(("rows", split, False))
    return ways


def restrict(expr: Expr, selection: Expr) -> Expr:
    """selection @ expr with the selection pushed inwards: only the selected rows are computed.

    law: E @ (S @ X) == fold(E @ S) @ X, E @ (X @ W) == (E @ X) @ W, E @ (X + Y) == E @ X + E @ Y
    """
    match expr:
        case MatMul(left, right) if sort(left) in ("sparse", "diagonal"):
            return MatMul(Fold(MatMul(selection, left)), right)
        case MatMul(left, right):
            return MatMul(restrict(left, selection), right)
        case Dense(_, rows) if rows == 1:
            return expr
        case Dense():
            return MatMul(selection, expr)
        case Add():
            return rebuild(expr, tuple(restrict(part, selection) for part in children(expr)))
    if type(expr).__name__ == "Scale":
        factor, body = children(expr)
        return rebuild(expr, (factor, restrict(body, selection)))
    if type(expr).__name__ == "Aggregate":
        graph, body = children(expr)
        return rebuild(expr, (Fold(MatMul(selection, graph)), body))
    return rebuild(expr, tuple(restrict(part, selection) for part in children(expr)))
