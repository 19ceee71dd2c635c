"""A matrix whose rows are equal on twins, held as one row a class.

`Folded` is a Tensor to everyone: functions that treat every row alone run on the rows kept; any other
function sees the whole matrix, made for it. So a model's own code between two layers needs no change and no
tracing, and what it does to a folded matrix is what it would do to the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import InputError
from plait.graph.twins import Twins
from plait.kernels.spmm import Pattern, spmm
from plait.runtime import pooled

__all__ = ["Classes", "Folded", "unfolded"]


class Classes:
    """Twins ready to be spread: the pattern that gives every node its row, and its transpose."""

    def __init__(self, twins: Twins):
        self.twins = twins
        self.representatives = torch.from_numpy(twins.representatives)
        n = twins.num_nodes
        one_each = torch.arange(n + 1, dtype=torch.int64).numpy().astype(twins.members.dtype)
        self.spread = Pattern(one_each, twins.members, twins.num_classes)
        self.collect = Pattern(*twins.by_class(), n)
        self.groups: dict[Any, tuple[Tensor, pooled.Groups]] = {}


class _Unfold(torch.autograd.Function):
    """P @ rows; the gradient sums over a class."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, classes: Classes) -> Tensor:
        ctx.classes = classes
        return _product(classes.spread, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _product(ctx.classes.collect, grad), None


def _product(pattern: Pattern, x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()
    return spmm(pattern, x, x.new_empty((pattern.num_rows, x.shape[1])))


def _named(*names: str) -> frozenset[Callable[..., Any]]:
    places: tuple[Any, ...] = (torch, functional, Tensor)
    return frozenset(getattr(place, name) for place in places for name in names if hasattr(place, name))


_ROW_WISE = _named(
    "relu", "relu_", "leaky_relu", "leaky_relu_", "elu", "elu_", "celu", "selu", "gelu", "silu", "mish",
    "tanh", "sigmoid", "softplus", "hardtanh", "relu6", "prelu", "exp", "abs", "square", "neg",
    "clone", "contiguous", "detach", "linear",
)  # fmt: skip
_BINARY = _named("add", "sub", "mul", "div", "true_divide", "rsub", "maximum", "minimum") | frozenset(
    getattr(Tensor, f"__{name}__")
    for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg")
)
_LAST_AXIS = _named("softmax", "log_softmax")
_ASKED = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_sparse", "is_cuda", "is_cpu",
        "is_quantized", "is_nested", "is_meta", "is_mkldnn", "is_sparse_csr", "ndim",
    )
    if hasattr(Tensor, name)
) | frozenset((
    Tensor.dim, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device,
    Tensor.is_inference, Tensor.is_contiguous, torch.is_floating_point,
))  # fmt: skip
_ADDRESSES = ("data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_")


class Folded(Tensor):
    """See the module. `rows` and `classes` are what it holds."""

    classes: Classes
    watch: Callable[[str], None] | None

    @staticmethod
    def of(rows: Tensor, classes: Classes, watch: Callable[[str], None] | None = None) -> Folded:
        """The matrix with these rows, one a class; `watch` hears of functions that need the whole of it."""
        folded = rows.as_subclass(Folded)
        folded.classes, folded.watch = classes, watch
        return folded

    def rows(self) -> Tensor:
        """One row a class."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def whole(self) -> Tensor:
        """The matrix itself, a row for every node."""
        return _Unfold.apply(self.rows(), self.classes)  # type: ignore[no-any-return, no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = next(a for a in _flat((args, kwargs)) if isinstance(a, Folded))
        if func in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(first, *args[1:], **kwargs)
        if func in _SIZES:
            return _SIZES[func](first, *args[1:], **kwargs)
        if _keeps_rows(func, first, args, kwargs):
            rows = _map(lambda a: a.rows(), args), _map(lambda a: a.rows(), kwargs)
            return Folded.of(func(*rows[0], **rows[1]), first.classes, first.watch)
        known = _by_rows(func, first, args, kwargs)
        if known is not None:
            return known
        name = getattr(func, "__name__", str(func))
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Folded):
            raise InputError(
                f"{name}: changes in place a matrix that plait holds by classes of twins; "
                'compile with forms=["csr"], or use the function that returns a new tensor'
            )
        if name in _ADDRESSES:
            raise InputError(
                f"{name}: a matrix that plait holds by classes of twins has no memory of its own; "
                'compile with forms=["csr"], or use its value, matrix[:]'
            )
        if first.watch is not None:
            first.watch(name)
        return func(*_map(lambda a: a.whole(), args), **_map(lambda a: a.whole(), kwargs))


def _by_rows(func: Any, first: Folded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Functions that end in a plain tensor without needing the whole matrix, or None."""
    if func in (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full):
        return func(first.rows(), *args[1:], **kwargs)  # type: ignore[no-any-return]
    if func is Tensor.expand_as and not isinstance(args[0], Folded):
        return args[0].expand(first.shape)  # type: ignore[no-any-return]
    if func is torch.segment_reduce and args and isinstance(args[0], Folded):
        return pooled.segment_reduce(*args, **kwargs)
    if (
        func is Tensor.scatter_add_
        and len(args) == 4
        and isinstance(args[3], Folded)
        and args[0] is not first
    ):
        return pooled.scatter_add(*args)
    return None


def unfolded(value: Any) -> Any:
    """Whole matrices in place of folded ones, inside tuples, lists and dictionaries too."""
    return _map(lambda a: a.whole(), value)


def _size(folded: Folded, dim: int | None = None) -> Any:
    shape = torch.Size((folded.classes.twins.num_nodes, *folded.rows().shape[1:]))
    return shape if dim is None else shape[dim]


_SIZES: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.__len__: lambda folded: _size(folded, 0),
    Tensor.numel: lambda folded: _size(folded).numel(),
}


def _keeps_rows(func: Any, first: Folded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the function of the whole matrix is the function of each row kept."""
    if first.rows().dim() != 2:
        return False
    if func in _ROW_WISE:
        return isinstance(args[0], Folded) and not any(isinstance(a, Folded) for a in args[1:])
    if func in _BINARY:
        return all(_fits(a, first) for a in _flat((args, kwargs)))
    if func in _LAST_AXIS:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return dim in (1, -1)
    if func is functional.layer_norm:
        return len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) == 1
    if func is functional.dropout:
        # with p > 0 every node draws for itself, in training; the same then while nothing is dropped
        return bool((args[1] if len(args) > 1 else kwargs.get("p", 0.5)) == 0)
    if func in (torch.cat, torch.concat):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return dim in (1, -1) and all(isinstance(a, Folded) and a.classes is first.classes for a in args[0])
    return False


def _fits(value: Any, first: Folded) -> bool:
    """An operand that is the same for all nodes, or folded alike."""
    if isinstance(value, Folded):
        return value.classes is first.classes and value.rows().dim() == 2
    if isinstance(value, Tensor):
        return value.dim() == 0 or value.dim() == 1 or (value.dim() == 2 and value.shape[0] == 1)
    return True


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _flat(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _flat(part)]
    return [value]


def _map(function: Callable[[Folded], Tensor], value: Any) -> Any:
    if isinstance(value, Folded):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map(function, part) for part in value)
    if type(value) is dict:
        return {key: _map(function, part) for key, part in value.items()}
    return value
