"""The algebra: matrix expressions, the laws that rewrite them, their text and their value."""

from plait.ir.expr import (
    Add,
    Aggregate,
    Barrier,
    Concat,
    Dense,
    Diagonal,
    Expr,
    Fold,
    Map,
    MatMul,
    Scalar,
    Scale,
    Sparse,
    children,
    is_constant,
    leaves,
    rebuild,
    shape,
    sort,
    total,
    walk,
)
from plait.ir.text import formula

__all__ = [
    "Add", "Aggregate", "Barrier", "Concat", "Dense", "Diagonal", "Expr", "Fold", "Map", "MatMul", "Scalar",
    "Scale", "Sparse", "children", "formula", "is_constant", "leaves", "rebuild", "shape", "sort", "total",
    "walk",
]  # fmt: skip
