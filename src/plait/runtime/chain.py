"""A chain step bound to its constants: what stays the same from call to call is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from plait.kernels import chain as kernel
from plait.kernels.chain import Chain, Gathered, ones
from plait.kernels.operands import read_rows, write_rows
from plait.kernels.spmm import Pattern
from plait.kernels.turned import MOST_TURNED, Turned
from plait.ops.program import Step

__all__ = ["BoundChain", "ChainOutline", "Env", "turned"]

Take = Callable[[int, int, torch.dtype], torch.Tensor]
_MOST_SIZES = 16  # numbers of rows that a chain without a graph is kept for


def turned(name: str) -> str:
    """The name of a value's transpose."""
    return name[:-1] if name.endswith("ᵀ") else f"{name}ᵀ"


class Env(dict[str, Any]):
    """Values by name; one stored transposed is transposed back when it is read."""

    def __missing__(self, name: str) -> Any:
        other = self.get(turned(name))
        if other is None:
            raise KeyError(name)
        value = self[name] = other.t()
        return value


class ChainOutline:
    """Where the operands of a chain go among the kernel's words: for their widths, on any graph."""

    def __init__(self, step: Step, env: Mapping[str, Any]):
        names = dict(step.reads)
        self.block, self.x = step.get("block"), names.get("x")
        self.keeps = self.block is not None and self.block in step.more
        rows = [name for role, name in step.reads if role.startswith("rows")]
        weights = [names[f"w{k}"] if f"w{k}" in names else turned(names[f"wt{k}"]) for k in range(len(rows))]
        rights = [(role[5:], name) for role, name in step.reads if role.startswith("right")]
        sides = [self._side(names.get(f"left{k}"), right, env) for k, right in rights]
        self.some = self.x if self.x is not None else rows[0] if rows else rights[0][1]
        some = env[self.some]
        self.dtype, self.across = some.dtype, int(some.shape[1])
        self.width = int(env[weights[0]].shape[1]) if weights else 0
        self.products = tuple(self._columns(name, env) for name in rows)
        self.sums = tuple((self._columns(left, env), self._columns(right, env)) for left, right, _ in sides)
        made = zip(step.more, sides, strict=False)  # what else is made is the block
        self.made = [turned(name) if is_turned else name for name, (_, _, is_turned) in made]
        self.first = step.more[0] if step.more else ""
        self.plus, self.bias, self.has_product = names.get("addend", ""), names.get("bias"), bool(weights)
        self.columns_of_ones = [
            at for at, (left, _, _) in zip(kernel.LEFTS, sides, strict=False) if left is None
        ]
        known = {kernel.X: self.x, kernel.ADDEND: names.get("block_addend"), kernel.PLUS: names.get("addend")}
        known |= dict(zip(kernel.ROWS, rows, strict=False)) | dict(zip(kernel.WEIGHTS, weights, strict=False))
        for (left, right, _), at_left, at_right in zip(sides, kernel.LEFTS, kernel.RIGHTS, strict=False):
            known |= {at_right: right, at_left: left}
        # every operand whose address changes; the block in hand has none
        self.operands = [(at, name) for at, name in known.items() if name is not None and name != self.block]
        self._by_rows: dict[int, BoundChain] = {}

    def without_graph(self, num_rows: int) -> BoundChain:
        """The chain on this many rows, where it gathers none: graphs of one size share it."""
        found = self._by_rows.get(num_rows)
        if found is None:
            while len(self._by_rows) >= _MOST_SIZES:
                self._by_rows.pop(next(iter(self._by_rows)), None)
            found = self._by_rows[num_rows] = BoundChain(self, num_rows, None, {}, lambda env: None)
        return found

    def _side(self, left: str | None, right: str, env: Mapping[str, Any]) -> tuple[str | None, str, bool]:
        """(left, right, turned): vector lanes run over the wider operand, so that one goes right.

        Of two as wide, the left one: the gradient of a layer's weight, which PyG stores [out, in], then lies
        as the weight does.
        """
        if left is None:  # a bias gradient: every row counts once
            return None, right, False
        widths = [env[self.x or "" if name == self.block else name].shape[1] for name in (left, right)]
        return (right, left, True) if widths[0] >= widths[1] else (left, right, False)

    def _columns(self, name: str | None, env: Mapping[str, Any]) -> int | None:
        if name is None:
            return 1
        return None if name == self.block else int(env[name].shape[1])


class BoundChain:
    """A chain on one graph: the call made for its shapes, to which every run brings the addresses."""

    def __init__(
        self,
        outline: ChainOutline,
        num_rows: int,
        pattern: Pattern | None,
        constants: Mapping[str, torch.Tensor | None],
        scale: Callable[[Env], torch.Tensor | None],
    ):
        self.outline, self.num_rows, self.scale = outline, num_rows, scale
        gathered = None
        if pattern is not None:
            gathered = Gathered(pattern, outline.across, **constants, is_kept=outline.keeps)
        chain = self.chain = Chain(
            num_rows, outline.dtype, gathered, outline.products, outline.width, outline.sums
        )
        places = [(at, name, *chain.size_of(at)) for at, name in outline.operands]
        is_small = [
            at in kernel.WEIGHTS and rows * width <= MOST_TURNED for at, _, _, rows, width, _ in places
        ]
        self.places = [place for place, small in zip(places, is_small, strict=True) if not small]
        self.weights = [
            (place, turned(place[1]), Turned(place[0], place[3], place[4], outline.dtype))
            for place, small in zip(places, is_small, strict=True)
            if small
        ]
        self.held = [
            chain.fill(chain.words, at, ones(num_rows, outline.dtype)) for at in outline.columns_of_ones
        ]

    def run(self, env: Env, owns: bool, take: Take) -> torch.Tensor:
        """The products' rows, the first sum where there are none; env gets what is made besides.

        With `owns` the added term's buffer becomes the result; `take` lends memory for others.
        """
        outline, chain, num_rows = self.outline, self.chain, self.num_rows
        words, dtype = chain.start(), outline.dtype
        # kept until the kernel has run: some may be copies
        held: list[Any] = [
            read_rows(words, at, label, env[name], dtype, rows, width, may_be_longer)
            for at, name, label, rows, width, may_be_longer in self.places
        ]
        for (at, name, label, rows, width, may_be_longer), stored, weight in self.weights:
            if not weight.place(words, env.get(stored)):
                held.append(read_rows(words, at, label, env[name], dtype, rows, width, may_be_longer))
        scale = self.scale(env)
        if scale is not None:
            held.append(chain.fill_scale(words, scale))
        if outline.bias is not None:
            held.append(chain.fill_bias(words, env[outline.bias]))
        out = None
        if outline.has_product:
            out = env[outline.plus] if owns else take(num_rows, outline.width, dtype)
            write_rows(words, kernel.OUT, "out", out, dtype, num_rows, outline.width)
        if outline.keeps and outline.block is not None:
            kept = env[outline.block] = take(num_rows, outline.across, dtype)
            write_rows(words, kernel.KEPT, "kept", kept, dtype, num_rows, outline.across)
        env.update(zip(outline.made, chain.finish(words, take), strict=True))
        return env[outline.first] if out is None else out
