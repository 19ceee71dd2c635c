"""Flops and bytes of every step: arithmetic that needs no machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "Amount", "ChainRequest", "Form", "Locality", "Matrix", "Request", "Sizes", "Work", "dense_flops",
    "row_flops", "size_of", "sparse_flops",
]  # fmt: skip

Sizes = Mapping[str, int]
Amount = Any  # a number, or a formula of one (ops/symbolic.py): the counts below only add and multiply


class Locality(Protocol):
    """The graph statistics that the cost model needs."""

    def miss_rate(self, cache_rows: int) -> float:
        """The share of gathered rows that miss a cache of this many rows."""


class Form(Protocol):
    """What the cost model needs to know of another form of a 0/1 matrix."""

    @property
    def name(self) -> str:
        """The name of the form."""

    def gain(self, width: int) -> float:
        """How many times faster than the CSR kernel it was measured; 1 where it should not be used."""
        ...

    def because(self, width: int) -> str:
        """Why it is used at this width."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """The locality of a pattern whose columns are drawn uniformly from `columns`."""

    columns: int

    def miss_rate(self, cache_rows: int) -> float:
        """The share of gathered rows that miss a cache of this many rows."""
        return max(0.0, 1.0 - cache_rows / max(1, self.columns))


@dataclass(frozen=True, slots=True)
class Matrix:
    """A sparse matrix as the cost model sees it; `is_weighted` when its non-zeros are not all one."""

    rows: int
    columns: int
    edges: int
    is_weighted: bool
    locality: Locality
    locality_transposed: Locality
    index_bytes: int = 4
    loops: int = 0  # edges from a row to itself: read in order, never gathered
    form: Form | None = None
    form_transposed: Form | None = None
    form_of_extrema: Form | None = None  # of max and min, forward only

    def transposed(self) -> Matrix:
        """What is known of the transposed matrix."""
        return Matrix(
            self.columns,
            self.rows,
            self.edges,
            self.is_weighted,
            self.locality_transposed,
            self.locality,
            self.index_bytes,
            self.loops,
            self.form_transposed,
            self.form,
            self.form_of_extrema,
        )


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, bytes that must move (each operand once), bytes if no gathered row is in cache."""

    flops: float
    bytes_least: float
    bytes_gathered: float


@dataclass(frozen=True, slots=True)
class Request:
    """A step in the cost model's words: operation, output rows and columns, inner width, operands."""

    op: str
    rows: int
    cols: int
    inner: int = 0
    matrix: Matrix | None = None
    has_source: bool = False
    addends: int = 0
    parts: int = 1
    is_sparse_left: bool = False
    kind: str = ""  # which of an operation's variants
    calls: int = 1  # parts that the work is cut into, one after another
    products: tuple[tuple[int, int], ...] = ()  # (inner, columns) of what is multiplied for every edge


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """Products of the same rows in one pass: what is gathered, (inner, columns) of products and sums."""

    rows: int
    cols: int
    gather: Request | None
    is_kept: bool  # the gathered rows are needed afterwards
    products: tuple[tuple[int, int], ...]
    sums: tuple[tuple[int, int], ...]
    beside: int  # columns of all other rows that pass by, read or written


def sparse_flops(edges: Amount, cols: Amount, is_weighted: bool) -> Amount:
    """Operations of a sparse product: an addition per edge and column, and a multiplication where weighted.

    Kernels start every row at zero, so its first addition counts like the others.
    """
    return (2 if is_weighted else 1) * edges * cols


def dense_flops(rows: Amount, inner: Amount, cols: Amount) -> Amount:
    """Operations of a dense product: a multiplication and an addition per row, inner column and column."""
    return 2 * rows * inner * cols


def row_flops(rows: Amount, cols: Amount, passes: int) -> Amount:
    """Operations of `passes` element-wise operations over rows."""
    return passes * rows * cols


def size_of(size: str | int, sizes: Sizes) -> int:
    """A symbolic size as a number; "a+b" is the sum of its parts."""
    if isinstance(size, int):
        return size
    if "+" in size:
        return sum(size_of(part, sizes) for part in size.split("+"))
    return int(size) if size.isdigit() else sizes[size]
