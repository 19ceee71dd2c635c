"""Matrix expressions as frozen values: what a layer computes, before anyone decides how.

A leaf says what it is (dense, sparse, diagonal, a scalar) and where it comes from: `data` changes with every
call, `constant` stays for the life of a graph, `learnable` changes with every training step. Sizes are
names ("N", "K1") or numbers, so one expression stands for every graph and width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, TypeVar

from plait.errors import PlanError

__all__ = [
    "Add", "Aggregate", "Barrier", "Concat", "Dense", "Diagonal", "Expr", "Fold", "Map", "MatMul", "Scalar",
    "Scale", "Size", "Sparse", "children", "is_constant", "leaves", "rebuild", "shape", "sort", "total",
    "walk",
]  # fmt: skip

Size: TypeAlias = "str | int"
Role = Literal["data", "constant", "learnable"]
_Term = TypeVar("_Term", bound="Expr")


@dataclass(frozen=True, slots=True)
class Expr:
    """A term of the algebra; terms share their parts, so what is found out about one is kept with it."""

    _hash: int = field(default=0, init=False, repr=False, compare=False)
    _same: object = field(default=None, init=False, repr=False, compare=False)  # shared by some equal ones

    def __reduce__(self) -> tuple[type[Expr], tuple[object, ...]]:
        # hashes of strings differ from process to process
        return type(self), tuple(getattr(self, part.name) for part in fields(self) if part.init)

    def __matmul__(self, right: Expr) -> Expr:
        return MatMul(self, right)

    def __add__(self, right: Expr) -> Expr:
        return total(self, right)

    def __str__(self) -> str:
        from plait.ir.text import formula

        return formula(self)


def _hashed_once(cls: type[_Term]) -> type[_Term]:
    """The class with a hash and a comparison that walk what an expression shares once.

    Terms are compared as trees otherwise: those of ChebConv read every part twice, eighteen levels deep.
    """
    compute, compare = cls.__hash__, cls.__eq__

    def equal(self: _Term, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or hash(self) != hash(other):
            return False
        assert isinstance(other, Expr)
        if self._same is not None and self._same is other._same:
            return True
        if not compare(self, other):
            return False
        mark = self._same or other._same or object()
        object.__setattr__(self, "_same", mark)
        object.__setattr__(other, "_same", mark)
        return True

    def hashed(self: _Term) -> int:
        if not self._hash:
            object.__setattr__(self, "_hash", compute(self))
        return self._hash

    cls.__hash__ = hashed  # type: ignore[method-assign, assignment]
    cls.__eq__ = equal  # type: ignore[method-assign, assignment]
    return cls


@_hashed_once
@dataclass(frozen=True, slots=True)
class Dense(Expr):
    """A dense matrix leaf; a row vector (rows == 1) is added to every row."""

    name: str
    rows: Size
    cols: Size
    role: Role = "data"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Sparse(Expr):
    """A sparse matrix leaf: 0/1 with multiplicity, or weighted."""

    name: str
    rows: Size
    cols: Size
    is_weighted: bool = False
    role: Role = "constant"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Diagonal(Expr):
    """A diagonal matrix leaf, kept as the vector on its diagonal."""

    name: str
    size: Size
    role: Role = "constant"


@_hashed_once
@dataclass(frozen=True, slots=True)
class Scalar(Expr):
    """A number leaf: a literal value, or a named (perhaps learnable) one."""

    name: str
    value: float | None = None
    role: Role = "constant"


@_hashed_once
@dataclass(frozen=True, slots=True)
class MatMul(Expr):
    """left @ right; inner sizes agree (`shape` checks it)."""

    left: Expr
    right: Expr


@_hashed_once
@dataclass(frozen=True, slots=True)
class Add(Expr):
    """The sum of its terms; row vectors are broadcast."""

    terms: tuple[Expr, ...]


@_hashed_once
@dataclass(frozen=True, slots=True)
class Scale(Expr):
    """A scalar times a matrix."""

    factor: Scalar
    body: Expr


@_hashed_once
@dataclass(frozen=True, slots=True)
class Map(Expr):
    """An element-wise function, by name."""

    name: str
    body: Expr


@_hashed_once
@dataclass(frozen=True, slots=True)
class Aggregate(Expr):
    """The sum, mean, max or min over the neighbours a sparse pattern lists; 0 where it lists none."""

    reduce: Literal["sum", "mean", "max", "min"]
    graph: Expr
    body: Expr


@_hashed_once
@dataclass(frozen=True, slots=True)
class Barrier(Expr):
    """A non-linear step nothing moves across."""

    name: str
    body: Expr


@_hashed_once
@dataclass(frozen=True, slots=True)
class Concat(Expr):
    """Columns side by side (axis 1) or rows on top of each other (axis 0)."""

    parts: tuple[Expr, ...]
    axis: Literal[0, 1] = 1


@_hashed_once
@dataclass(frozen=True, slots=True)
class Fold(Expr):
    """A constant sparse or diagonal expression computed once per graph: its edge weights are precomputed."""

    body: Expr


_LEAVES = (Dense, Sparse, Diagonal, Scalar)


def total(*terms: Expr) -> Expr:
    """The flat sum of terms, in order; one term is itself."""
    flat: list[Expr] = []
    for term in terms:
        flat.extend(term.terms if isinstance(term, Add) else (term,))
    return flat[0] if len(flat) == 1 else Add(tuple(flat))


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct sub-expressions, in the order `rebuild` takes them."""
    match expr:
        case MatMul(left, right):
            return left, right
        case Add(terms) | Concat(terms):
            return terms
        case Scale(factor, body):
            return factor, body
        case Aggregate(_, graph, body):
            return graph, body
        case Map(_, body) | Barrier(_, body) | Fold(body):
            return (body,)
    return ()


def rebuild(expr: Expr, parts: tuple[Expr, ...]) -> Expr:
    """The same operation on other sub-expressions."""
    match expr:
        case MatMul():
            return MatMul(*parts)
        case Add():
            return total(*parts)
        case Concat(_, axis):
            return Concat(parts, axis)
        case Scale():
            factor, body = parts
            assert isinstance(factor, Scalar)
            return Scale(factor, body)
        case Aggregate(reduce):
            return Aggregate(reduce, *parts)
        case Map(name):
            return Map(name, *parts)
        case Barrier(name):
            return Barrier(name, *parts)
        case Fold():
            return Fold(*parts)
    return expr


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything below it, parents first; what is shared comes once."""
    left, seen = [expr], set()
    while left:
        part = left.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            left.extend(reversed(children(part)))


def leaves(expr: Expr) -> dict[str, Expr]:
    """Leaves by name; one name may not mean two things."""
    found: dict[str, Expr] = {}
    for part in walk(expr):
        if isinstance(part, _LEAVES) and found.setdefault(part.name, part) != part:
            raise PlanError(
                f"expression uses the name {part.name!r} for two different leaves; rename one of them"
            )
    return found


def is_constant(expr: Expr, constants: frozenset[str] = frozenset()) -> bool:
    """Whether the value stays from call to call: every leaf is constant or named in `constants`."""
    return all(
        part.role == "constant" or part.name in constants for part in walk(expr) if isinstance(part, _LEAVES)
    )


@functools.lru_cache(maxsize=4096)
def sort(expr: Expr) -> str:
    """What kind of matrix an expression is: dense, sparse, diagonal or scalar."""
    match expr:
        case Dense() | Aggregate() | Map() | Barrier() | Concat():
            return "dense"
        case Sparse():
            return "sparse"
        case Diagonal():
            return "diagonal"
        case Scalar():
            return "scalar"
        case Scale(_, body) | Fold(body):
            return sort(body)
        case MatMul(left, right):
            return _join_sorts((sort(left), sort(right)))
        case Add(terms):
            return _join_sorts(tuple(sort(term) for term in terms))
    raise PlanError(f"{type(expr).__name__} is not an expression plait knows")


def _join_sorts(sorts: tuple[str, ...]) -> str:
    for kind in ("dense", "sparse", "diagonal"):
        if kind in sorts:
            return kind
    return "scalar"


@functools.lru_cache(maxsize=4096)
def shape(expr: Expr) -> tuple[Size, Size]:
    """(rows, columns); raises PlanError where operands do not fit."""
    match expr:
        case Dense(_, rows, cols) | Sparse(_, rows, cols):
            return rows, cols
        case Diagonal(_, size):
            return size, size
        case Scalar():
            return 1, 1
        case Scale(_, body) | Map(_, body) | Barrier(_, body) | Fold(body):
            return shape(body)
        case MatMul(left, right):
            (rows, inner), (other, cols) = shape(left), shape(right)
            if inner != other:
                raise PlanError(f"{expr}: inner sizes {inner} and {other} differ; check the operands' order")
            return rows, cols
        case Aggregate(_, graph, body):
            return shape(graph)[0], shape(body)[1]
        case Add(terms):
            return _sum_shape(expr, [shape(term) for term in terms])
        case Concat(parts, axis):
            return _concat_shape([shape(part) for part in parts], axis)
    raise PlanError(f"{type(expr).__name__} is not an expression plait knows")


def _sum_shape(expr: Expr, shapes: list[tuple[Size, Size]]) -> tuple[Size, Size]:
    whole = [s for s in shapes if s[0] != 1] or shapes
    if any(s != whole[0] for s in whole) or any(s[1] != whole[0][1] for s in shapes):
        raise PlanError(f"{expr}: the terms of a sum have the shapes {shapes}; they must agree")
    return whole[0]


def _concat_shape(shapes: list[tuple[Size, Size]], axis: int) -> tuple[Size, Size]:
    sizes = [s[axis] for s in shapes]
    joined: Size = sum(sizes) if all(isinstance(s, int) for s in sizes) else "+".join(map(str, sizes))  # type: ignore[arg-type]
    return (joined, shapes[0][1]) if axis == 0 else (shapes[0][0], joined)
