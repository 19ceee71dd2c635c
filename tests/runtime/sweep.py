"""Every function of torch that takes a tensor, called with arguments that a plain matrix accepts."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["MATRIX", "NUM_ROWS", "WIDTH", "Call", "calls", "is_alike", "is_uninitialised", "run"]

NUM_ROWS, WIDTH = 12, 5
MATRIX = object()
"""Stands for the matrix under test in a call's arguments."""

_MOST_TRIES, _MOST_CALLS = 120, 4

# what a function is, not what it computes; or it changes the process for everyone after it
_LEFT_OUT = (
    "set_default", "set_num", "manual_seed", "cudnn", "miopen", "cuda", "mps", "xpu", "hpu", "ipu", "mtia",
    "vulkan", "record_stream", "distributed", "_symint", "quantize", "fake_quant", "q_per", "q_scale",
    "q_zero", "int_repr", "dequantize", "fbgemm", "rnn_", "gru", "lstm", "_make_", "module_load",
    "multi_head_attention", "from_file", "_assert_async", "storage_type", "__torch_", "unsafe_chunk_", "sym_",
    "ctc_loss", "nested",
    "unique_consecutive",  # torch reads its second argument another way for every subclass of Tensor
    "grad_fn", "torch.Tensor.set_",  # a method of its own: test_other_ways_in
    "lstsq",  # of matrices without full rank it has many answers
)  # fmt: skip
_UNINITIALISED = ("empty", "resize", "data_ptr", "_cdata", "__hash__")


_LEAF = nn.Parameter(torch.linspace(0.5, 1.5, NUM_ROWS * WIDTH, dtype=torch.float64).reshape(NUM_ROWS, WIDTH))


class Call(NamedTuple):
    """One call: the function, and its arguments with MATRIX where the matrix goes."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def is_uninitialised(call: Call) -> bool:
    """Whether the result is an address, or whatever memory held."""
    return any(word in call.name for word in _UNINITIALISED)


def run(call: Call, matrix: Tensor) -> Any:
    """The call's result for this matrix; other arguments are made anew, random draws stay the same."""
    torch.default_generator.manual_seed(7)  # torch.manual_seed also asks every other device
    made = functools.partial(_made, matrix)
    return call.func(*map(made, call.args), **{name: made(value) for name, value in call.kwargs.items()})


def _made(matrix: Tensor, value: Any) -> Any:
    if value is MATRIX:
        return matrix
    if isinstance(value, list) and any(part is MATRIX for part in value):
        return [_made(matrix, part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value


def is_alike(ours: Any, theirs: Any, only_kind: bool = False) -> bool:
    """Whether two results are the same for a user; `only_kind` leaves values out."""
    if isinstance(theirs, Tensor):
        if not isinstance(ours, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        if ours.layout != theirs.layout or ours.requires_grad != theirs.requires_grad:
            return False
        if ours.layout == torch.strided and ours.stride() != theirs.stride():
            return False
        if only_kind or ours.device.type == "meta":
            return True
        ours, theirs = ours.detach(), theirs.detach()
        if ours.layout != torch.strided:
            ours, theirs = ours.to_dense(), theirs.to_dense()
        return bool(torch.allclose(ours.to(torch.complex128), theirs.to(torch.complex128), 1e-9, 1e-9, True))
    if isinstance(theirs, tuple | list):
        return len(ours) == len(theirs) and all(map(is_alike, ours, theirs, itertools.repeat(only_kind)))
    if isinstance(theirs, np.ndarray):
        return bool(np.allclose(ours, theirs))
    if isinstance(theirs, float):
        return bool(np.isclose(ours, theirs, equal_nan=True))
    if isinstance(theirs, torch.UntypedStorage | torch.TypedStorage):
        return type(ours) is type(theirs) and ours.nbytes() == theirs.nbytes()
    if only_kind and isinstance(theirs, int):
        return isinstance(ours, int)
    if isinstance(theirs, str):
        return bool(ours.partition("grad_fn")[0] == theirs.partition("grad_fn")[0])
    if isinstance(theirs, int | torch.dtype | torch.device | torch.layout | torch.Size | type(None)):
        return bool(ours == theirs)
    return type(ours) is type(theirs)


@functools.cache
def calls() -> tuple[Call, ...]:
    """All calls that a plain matrix with gradients, or without, answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(call for name, func, like in _functions() for call in _accepted(name, func, like))


def _functions() -> Iterator[tuple[str, Any, Any]]:
    # all of them, also those that torch's own list of tests has no arguments for
    like = torch.overrides.get_testing_overrides()
    known = {
        func: place for place, many in torch.overrides.get_overridable_functions().items() for func in many
    }
    for func in {**like, **known}:
        name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
        if not any(word in f"{name} {getattr(func, '__module__', '')}" for word in _LEFT_OUT):
            yield name, func, like.get(func)


@functools.cache
def _pool(name: str) -> list[Any]:
    """Values for an argument of this name, the likely ones first."""
    rng = torch.Generator().manual_seed(3)
    same = torch.rand(NUM_ROWS, WIDTH, generator=rng, dtype=torch.float64) + 0.5
    numbers = torch.tensor([3, 0, 7])
    likely: dict[str, list[Any]] = {
        "dim": [1, 0, (0,)], "dim0": [0], "dim1": [1], "axis": [0, 1], "p": [2, 0.5], "k": [1, 2], "n": [3],
        "index": [numbers, torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int64), 1], "mask": [same > 1],
        "condition": [same > 1], "size": [(NUM_ROWS * WIDTH,), (2,)], "shape": [(WIDTH, NUM_ROWS)],
        "target": [torch.arange(NUM_ROWS) % WIDTH, same], "source": [same, same[:3]], "src": [same],
        "repeats": [2, (2, 1)], "sections": [2], "split_size_or_sections": [3],
        "weight": [same[:3], same[0], None],
        "normalized_shape": [(WIDTH,)], "dims": [(1, 0), (0,)], "mat2": [same.t().contiguous()],
        "vec": [same[0]], "running_mean": [torch.zeros(WIDTH).double(), None],
        "running_var": [torch.ones(WIDTH).double(), None],
        "dtype": [torch.float32], "equation": ["ij->ji", "ij->j"], "value": [0.5, same[0]], "min": [0.1],
        "max": [0.9], "reduce": ["sum", "mean"], "hook": [lambda grad: grad * 2],
        "callable": [lambda a, b: a],
        "function": [torch.relu], "key": [numbers, 1, (slice(None), 0)], "kernel_size": [(2,), 2],
        "tensor2": [same], "num_groups": [5, 1], "offsets": [torch.tensor([0, 4, 12])], "axes": [(1, 0)],
        "device": ["cpu"], "memory_format": [torch.contiguous_format], "protocol": [2], "proto": [2],
        "lambd": [0.2], "training": [True], "momentum": [0.1], "eps": [1e-5], "output_size": [(2,), 2],
        "inputs": [None], "gradient": [same],
    }  # fmt: skip
    usual: list[Any] = [
        same, 1, 0, 0.5, same[0], numbers, (WIDTH, NUM_ROWS), (0,), same.t().contiguous(), True, "sum", None,
        same > 1, torch.arange(NUM_ROWS), (1, 1), torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int64),
        torch.float32, torch.rand(3, WIDTH, generator=rng).double(), [same, same],
    ]  # fmt: skip
    return [*likely.get(name, []), *usual]


def _parameters(func: Any, like: Any) -> list[str]:
    """Names of the arguments without defaults, two where nothing is known."""
    try:
        given = inspect.signature(like if like is not None else func).parameters.values()
    except (ValueError, TypeError):
        return ["input", "other"]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in given if p.kind in kinds and p.default is p.empty]


def _tries(func: Any, like: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments worth trying: the matrix in each place, by keyword, in a list, beside one more argument."""
    names = _parameters(func, like)
    for count in sorted(
        {len(names), max(1, len(names) - 1), len(names) + 1, 1}, key=lambda c: abs(c - len(names))
    ):
        pools = [_pool(names[k] if k < len(names) else "") for k in range(count)]
        for place in range(min(count, 3)):
            others = [[MATRIX] if k == place else pool for k, pool in enumerate(pools)]
            for args in itertools.islice(itertools.product(*others), _MOST_TRIES // 3):
                yield args, {}
        if count == len(names) and names:
            rest = [pool[:3] for pool in pools[1:]]
            for args in itertools.islice(itertools.product(*rest), 9):
                yield ([MATRIX, MATRIX], *args), {}
                yield (), dict(zip(names, (MATRIX, *args), strict=True))
                yield (MATRIX, *args), {"out": torch.empty(0, dtype=torch.float64)}
                yield (MATRIX, *args), {"inplace": True}


def _accepted(name: str, func: Any, like: Any) -> Iterator[Call]:
    found: dict[Any, int] = {}
    for args, kwargs in itertools.islice(_tries(func, like), _MOST_TRIES):
        place = next((k for k, value in enumerate(args) if value is MATRIX or isinstance(value, list)), -1)
        kind = (place, *sorted(kwargs))  # a few calls of each kind
        if found.get(kind, 0) >= 2 or sum(found.values()) >= 2 * _MOST_CALLS:
            continue
        call = Call(name, func, args, kwargs)
        if _answers(call):
            found[kind] = found.get(kind, 0) + 1
            yield call


def _answers(call: Call) -> bool:
    """Whether a plain matrix with gradients takes this call, or one without where gradients are refused."""
    try:
        run(call, _LEAF * 1)
    except RuntimeError as error:
        if "grad" not in str(error) and "deriv" not in str(error):
            return False
    except Exception:
        return False
    else:
        return True
    try:
        with torch.no_grad():
            run(call, _LEAF * 1)
    except Exception:
        return False
    return True
