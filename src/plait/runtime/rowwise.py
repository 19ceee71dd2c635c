"""Which of torch's functions are row-wise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ASKED", "BY_TYPE", "IN_PLACE", "MAKES", "SELECTS", "keeps_rows", "without_inplace"]

_PLACES: tuple[Any, ...] = (torch, functional, Tensor)

_ACTIVATIONS = (
    "relu", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh", "sigmoid", "softplus",
    "hardtanh", "relu6", "prelu", "exp", "abs", "square", "neg",
)  # fmt: skip
_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "rsub", "maximum", "minimum")
_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg")


def _named(*names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(place, name) for place in _PLACES for name in names if hasattr(place, name))


_UNARY = _named(*_ACTIVATIONS, "clone", "contiguous", "linear") | frozenset(
    (Tensor.float, Tensor.double, Tensor.bfloat16, Tensor.half)
)
_BINARY = _named(*_ARITHMETIC) | frozenset(getattr(Tensor, f"__{name}__") for name in _OPERATORS)
_LAST_AXIS = _named("softmax", "log_softmax")
_JOINS = (torch.cat, torch.concat)

IN_PLACE: dict[Any, Callable[..., Any]] = {
    getattr(place, f"{name}_"): getattr(place, name)
    for place in _PLACES
    for name in (*_ACTIVATIONS, *_ARITHMETIC)
    if hasattr(place, f"{name}_") and hasattr(place, name)
} | {
    getattr(Tensor, f"__i{name}__"): getattr(Tensor, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv")
}
"""Functions that change their first argument, and those that compute the same."""

_INPLACE_AT: dict[Any, int] = {
    functional.relu: 1, functional.leaky_relu: 2, functional.elu: 2, functional.celu: 2, functional.selu: 1,
    functional.hardtanh: 3, functional.relu6: 1, functional.silu: 1, functional.mish: 1,
    functional.dropout: 3,
}  # fmt: skip
"""Where functions with an argument `inplace` have it."""

SELECTS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: lambda matrix, index: index,
    Tensor.index_select: lambda matrix, dim, index: index if dim == 0 else None,
    torch.index_select: lambda matrix, dim, index: index if dim == 0 else None,
}
"""Functions that pick rows, and the index in their arguments; None where they pick something else."""

MAKES = frozenset((Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full))
"""Functions that read nothing of their first argument but its type."""

BY_TYPE = frozenset((Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__))
"""Functions whose answer names the type of their argument."""

ASKED = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_sparse", "is_cuda", "is_cpu",
        "is_quantized", "is_nested", "is_meta", "is_mkldnn", "is_sparse_csr", "ndim", "itemsize", "nbytes",
    )
    if hasattr(Tensor, name)
) | frozenset((
    Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.is_inference,
    Tensor.is_contiguous, Tensor.storage_offset, Tensor.__hash__, torch.is_floating_point, torch.is_complex,
    torch.numel,
))  # fmt: skip
"""Properties of a matrix that do not depend on its values."""


def keeps_rows(func: Any, deferred: type[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function's rows are functions of its arguments' rows; `deferred` is the type of those."""
    if func in _BINARY:
        return all(_fits(a, deferred) for a in (*args, *kwargs.values()))
    if not args:
        return False
    if func in _JOINS:
        return _argument("dim", 1, 0, args, kwargs) in (1, -1) and _are_all(args[0], deferred)
    if not isinstance(args[0], deferred) or not all(map(_is_plain, (*args[1:], *kwargs.values()))):
        return False
    if func in _UNARY:
        return not _is_inplace(func, args, kwargs)
    if func in _LAST_AXIS:
        return _argument("dim", 1, None, args, kwargs) in (1, -1)
    if func is functional.normalize:
        return _argument("dim", 2, 1, args, kwargs) in (1, -1)
    if func is functional.layer_norm:
        return len(_argument("normalized_shape", 1, (), args, kwargs)) == 1
    if func is functional.dropout:
        # active dropout draws for every row; the rows held would draw different numbers
        drops = _argument("p", 1, 0.5, args, kwargs) != 0 and _argument("training", 2, True, args, kwargs)
        return not drops and not _is_inplace(func, args, kwargs)
    return func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs


def without_inplace(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call with inplace=True as one that returns a new tensor; None and the call as it is for any other."""
    if not _is_inplace(func, args, kwargs):
        return None, args, kwargs
    at = _INPLACE_AT[func]
    return (
        func,
        (*args[:at], *(False for _ in args[at : at + 1])),
        {**kwargs, "inplace": False} if len(args) <= at else kwargs,
    )


def _argument(name: str, at: int, default: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _is_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    at = _INPLACE_AT.get(func)
    return at is not None and bool(_argument("inplace", at, False, args, kwargs))


def _are_all(values: Any, deferred: type[Tensor]) -> bool:
    return isinstance(values, tuple | list) and all(isinstance(value, deferred) for value in values)


def _is_plain(value: Any) -> bool:
    """Not a matrix by rows, nor another kind of tensor with rules of its own."""
    return not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter)


def _fits(value: Any, deferred: type[Tensor]) -> bool:
    """An operand that is the same for all rows, or a matrix by rows itself."""
    if isinstance(value, deferred):
        return True
    if type(value) in (Tensor, nn.Parameter):
        return value.dim() < 2 or (value.dim() == 2 and value.shape[0] == 1)  # type: ignore[no-any-return]
    return value is None or isinstance(value, int | float | complex | str)
