"""What rounding alone may do to an answer of PyG's: the exact answer, and PyG's own with other roundings.

The exact answer is PyG's in double precision. How far PyG itself may be from it is seen in runs that round
every number they compute otherwise, as another order of the same sums does (Monte Carlo arithmetic: D. S.
Parker, 1997). Where numbers cancel, a ReLU stands at 0 or a training diverges, these runs lie apart.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.fuzz.worlds import CALL, INPUTS, UNTOUCHED, dense, execute, largest, seen, world_of

__all__ = ["DOUBLE", "Known", "Reference", "in_double", "rounded"]

RUNS = 8  # runs of PyG that round otherwise
# A number on the way of another association is at most so many times the largest on PyG's: the edges of a
# target and the columns of a product, in the small graphs and models of a script.
REACH = 64.0
_CAST = "x, edge_index, edge_weight, edge_attr = cast('double', x, edge_index, edge_weight, edge_attr)"
DOUBLE = f"wants = x.requires_grad; model = model.double(); {_CAST}; x.requires_grad_(wants)"
_NEW_GRAPH = re.compile(r"(x, )?edge_index, edge_weight, edge_attr, edge_type = (graph|batch)\(")
# Numbers of so few bits are exact in every order; float32's numbers are not among those of float64.
_SHORT = {torch.float64: 20, torch.float32: 12, torch.float16: 5, torch.bfloat16: 4}
# PyG compares the root of a constant with the same root (PNAConv's deviations): it is one number everywhere.
_CORRECTLY_ROUNDED = (torch.ops.aten.sqrt.default,)
_MANTISSA = (1 << 52) - 1
_MIX = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd numbers with their bits anywhere


def in_double(lines: Sequence[str]) -> list[str]:
    """The script with everything in double precision from the start, line by line."""
    lines = [re.sub(r"(model\.)(float|bfloat16|half)\(\)", r"\1double()", line) for line in lines]
    lines = [re.sub(r"\bcast\('\w+'", "cast('double'", line) for line in lines]  # not that of autocast('cpu')
    place = next(k for k, line in enumerate(lines) if "plait.compile(" in line)
    lines[place] = f"{DOUBLE}; {lines[place]}"
    # a new graph comes in float32, and with it its features
    later = [f"{line}; {_CAST}" if _NEW_GRAPH.match(line) else line for line in lines[place:]]
    return [*lines[:place], *later]


def rounded(value: Tensor, seed: int) -> Tensor:
    """The numbers, each one rounding up, down or as it was.

    Which of them depends on the mantissa and the seed alone: ties stay ties, 2 x stays twice x, and -x stays
    minus x. Numbers with short mantissas (degrees, zeros, multiples of 1/8) are sums and products of such
    numbers, and exact in every order.
    """
    exact = dense(value).double()
    mantissa = exact.abs().view(torch.int64) & _MANTISSA
    mixed = (mantissa ^ (seed * _MIX[1] % 2**52)) * _MIX[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIX[1]
    step = ((mixed >> 40) % 3 - 1).double() * torch.finfo(value.dtype).eps
    is_short = mantissa & ((1 << (53 - _SHORT[value.dtype])) - 1) == 0
    return (exact * (1 + step)).where(~is_short, exact).to(value.dtype)


def _has_numbers(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.dtype in _SHORT
        and not is_lazy(value)
        and value.device.type == "cpu"
        and not value._is_zerotensor()  # a tangent of forward mode that holds no numbers
    )


class _Rounds(TorchDispatchMode):
    """Inside, every number that torch computes is rounded otherwise; seed 0 only watches.

    A number that was there before (a maximum, a gathered row) is not computed.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.peak, self.limit, self.meets_nan = 0.0, float("inf"), False

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        held = [v.double().flatten() for v in tree_iter((given, named)) if _has_numbers(v)]
        scalars = [v for v in tree_iter((given, named)) if isinstance(v, float)]
        before = torch.cat([*held, torch.tensor(scalars, dtype=torch.float64)])
        out = function(*given, **(named or {}))
        if function in _CORRECTLY_ROUNDED or "empty" in function.__name__:  # whose numbers are nobody's
            return out
        aliases = [one.alias_info for one in function._schema.returns]
        if not isinstance(out, tuple | list):
            return self._seen(out, before, aliases[0]) if aliases else out
        if len(aliases) < len(out):  # a list of results is one of the schema's
            aliases *= len(out)
        return type(out)(self._seen(value, before, alias) for value, alias in zip(out, aliases, strict=True))

    def _seen(self, value: Any, before: Tensor, alias: Any) -> Any:
        if not _has_numbers(value) or (alias is not None and not alias.is_write):
            return value
        self.peak = max(self.peak, largest(value))
        self.limit = min(self.limit, torch.finfo(value.dtype).max)
        self.meets_nan |= bool(value.isnan().any())
        is_old = torch.isin(value.double(), before)
        if not self.seed or is_old.all():
            return value
        found = value.where(is_old, rounded(value, self.seed))
        return found if alias is None else _written(value, found)


def _written(value: Tensor, numbers: Tensor) -> Tensor:
    """In place; a tensor that is one number many times over is left alone."""
    if all(stride or size < 2 for stride, size in zip(value.stride(), value.shape, strict=True)):
        value.copy_(numbers)
    return value


class _Run:
    """A world of PyG's that follows a script with roundings of its own; seed 0: with none."""

    def __init__(self, lines: Sequence[str], seed: int) -> None:
        self.lines, self.seed, self.done = lines, seed, 0
        self.world, self.mode, self.error = world_of(UNTOUCHED), _Rounds(seed), ""

    def advance(self, number: int) -> dict[str, Any]:
        """What can be seen in it after the line of this number."""
        for place in range(self.done, number + 1):
            line = self.lines[place]
            if CALL.match(line):
                with self._given_rounded(), self.mode:
                    self.error = execute(line, place, self.world)
            else:
                self.error = execute(line, place, self.world)
        self.done = max(self.done, number + 1)
        if self.error and self.seed:
            raise RuntimeError(f"PyG raises {self.error} where it rounds otherwise")
        return {} if self.error else seen(self.world)

    @contextlib.contextmanager
    def _given_rounded(self) -> Iterator[None]:
        """Parameters and inputs rounded otherwise inside; what the call leaves as it was comes back."""
        model = self.world.get("model")
        held = [*(model.parameters() if model else ()), *(self.world.get(name) for name in INPUTS)]
        held = [value for value in held if self.seed and _has_numbers(value)]
        before = [value.detach().clone() for value in held]
        given = [rounded(value, self.seed) for value in before]
        with torch.inference_mode():  # the one mode that writes to tensors of every kind
            for value, numbers in zip(held, given, strict=True):
                _written(value, numbers)
        yield
        with torch.inference_mode():
            for value, exact, numbers in zip(held, before, given, strict=True):
                if value.shape == exact.shape and value.dtype == exact.dtype:
                    _written(value, exact.where(value == numbers, value))


@dataclass(frozen=True)
class Known:
    """What is known of PyG's answer to a line: the exact numbers, and how far its own are from them."""

    exact: Mapping[str, Tensor]
    apart: Mapping[str, float]
    meets_nan: bool
    overflows: bool


class Reference:
    """Follows a script in runs of PyG, from the first line on that something has to be known of."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._exact = _Run(lines if any(DOUBLE in line for line in lines) else in_double(lines), 0)
        self._runs = [_Run(lines, seed) for seed in range(1, RUNS + 1)]

    def known(self, number: int, own: Mapping[str, Any]) -> Known:
        """Of the answer to the line of this number; `own` is what is seen in PyG's own world."""
        found = self._exact.advance(number) or own  # PyG may refuse what it is given in double precision
        exact = {name: dense(value).double() for name, value in found.items() if _is_real(value)}
        apart: dict[str, float] = {}
        for found in (own, *(run.advance(number) for run in self._runs)):
            for name, value in found.items():
                if _is_real(value) and value.shape == getattr(exact.get(name), "shape", None):
                    apart[name] = max(apart.get(name, 0.0), largest(dense(value).double() - exact[name]))
        meets = any(run.mode.meets_nan for run in self._runs)
        limit = min(run.mode.limit for run in self._runs)
        return Known(
            exact,
            apart,
            meets or self._exact.mode.meets_nan,
            (meets and not self._exact.mode.meets_nan) or self._exact.mode.peak * REACH > limit,
        )


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value) and value.is_floating_point()
