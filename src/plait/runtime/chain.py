"""A chain step bound to its constants: what stays the same from call to call is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from plait.kernels import chain as kernel
from plait.kernels.chain import Chain, Gathered, ones
from plait.kernels.operands import read_rows
from plait.kernels.spmm import Pattern
from plait.ops.program import Step

__all__ = ["BoundChain", "Env", "turned"]

Take = Callable[[int, int, torch.dtype], torch.Tensor]


def turned(name: str) -> str:
    """The name of a value's transpose."""
    return name[:-1] if name.endswith("ᵀ") else f"{name}ᵀ"


class Env(dict[str, Any]):
    """Values by name; one that is there the other way round is transposed when it is asked for."""

    def __missing__(self, name: str) -> Any:
        other = self.get(turned(name))
        if other is None:
            raise KeyError(name)
        value = self[name] = other.t()
        return value


class BoundChain:
    """Where the operands of a chain go among the kernel's words, and the call made for their shapes."""

    def __init__(
        self,
        step: Step,
        env: Mapping[str, Any],
        pattern: Pattern | None,
        constants: Mapping[str, torch.Tensor | None],
        scale: Callable[[Env], torch.Tensor | None],
        take: Take,
    ):
        names = dict(step.reads)
        self.block, self.x, self.take, self.scale = step.get("block"), names.get("x"), take, scale
        self.keeps = self.block is not None and self.block in step.more
        rows = [name for role, name in step.reads if role.startswith("rows")]
        self.weights = [
            (at, names[f"w{k}"] if f"w{k}" in names else turned(names[f"wt{k}"]))
            for k, at in zip(range(len(rows)), kernel.WEIGHTS, strict=False)
        ]
        rights = [(role[5:], name) for role, name in step.reads if role.startswith("right")]
        sides = [self._side(names.get(f"left{k}"), right, env) for k, right in rights]
        some = env[self.x] if self.x is not None else env[rows[0] if rows else rights[0][1]]
        self.dtype = some.dtype
        self.num_rows = some.shape[0] if pattern is None else pattern.num_rows
        gathered = None
        if pattern is not None:
            gathered = Gathered(pattern, some.shape[1], **constants, is_kept=self.keeps)
        self.width = self._product_width(env)
        self.chain = Chain(
            self.num_rows, some.dtype, gathered, [self._columns(name, env) for name in rows], self.width,
            [(self._columns(left, env), self._columns(right, env)) for left, right, _ in sides],
        )  # fmt: skip
        made = zip(step.more, sides, strict=False)  # what else is made is the block
        self.made = [turned(name) if is_turned else name for name, (_, _, is_turned) in made]
        self.first = step.more[0] if step.more else ""
        self._places(names, rows, sides)

    def _places(
        self,
        names: Mapping[str, str],
        rows: list[str],
        sides: list[tuple[str | None, str, bool]],
    ) -> None:
        """(word, name, size) of every operand whose address changes; the block in hand has none."""
        known = {kernel.X: self.x, kernel.ADDEND: names.get("block_addend"), kernel.PLUS: names.get("addend")}
        known |= dict(zip(kernel.ROWS, rows, strict=False))
        for (left, right, _), at_left, at_right in zip(sides, kernel.LEFTS, kernel.RIGHTS, strict=False):
            known[at_right] = right
            if left is None:
                self.held = self.chain.fill(self.chain.words, at_left, ones(self.num_rows, self.dtype))
            else:
                known[at_left] = left
        known |= dict(self.weights)
        sizes = self.chain.sizes
        self.places = [
            (at, name, sizes[at]) for at, name in known.items() if name is not None and name != self.block
        ]
        self.plus, self.bias = names.get("addend", ""), names.get("bias")

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

    def _product_width(self, env: Mapping[str, Any]) -> int:
        if not self.weights:
            return 0
        return int(env[self.weights[0][1]].shape[1])

    def run(self, env: Env, owns: bool) -> torch.Tensor:
        """The products' rows, the first sum where there are none; env gets what is made beside.

        With `owns` the added term's buffer becomes the result.
        """
        chain, take = self.chain, self.take
        words = chain.start()
        # kept until the kernel has run: some may be copies
        dtype = self.dtype
        held: list[Any] = [
            read_rows(words, at, label, env[name], dtype, rows, width, may_be_longer)
            for at, name, (label, rows, width, may_be_longer) in self.places
        ]
        scale = self.scale(env)
        if scale is not None:
            held.append(chain.fill_scale(words, scale))
        if self.bias is not None:
            held.append(chain.fill_bias(words, env[self.bias]))
        out = None
        if self.weights:
            out = env[self.plus] if owns else take(self.num_rows, self.width, self.dtype)
            chain.fill_result(words, kernel.OUT, out)
        if self.keeps and self.x is not None and self.block is not None:
            kept = take(self.num_rows, env[self.x].shape[1], self.dtype)
            chain.fill_result(words, kernel.KEPT, kept)
            env[self.block] = kept
        env.update(zip(self.made, chain.finish(words, take), strict=True))
        return env[self.first] if out is None else out
