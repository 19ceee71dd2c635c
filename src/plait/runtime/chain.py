"""A chain step bound to its constants: what stays the same from call to call is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from plait.kernels.chain import Chain, Gathered, ones
from plait.kernels.spmm import Pattern
from plait.plan.program import Step

__all__ = ["BoundChain"]

Env = dict[str, Any]


class BoundChain:
    """Names of a chain's operands in order, and the kernel call made for their shapes."""

    def __init__(
        self,
        step: Step,
        env: Mapping[str, Any],
        pattern: Pattern | None,
        constants: Mapping[str, torch.Tensor | None],
    ):
        self.block = step.get("block")
        names = dict(step.reads)
        self.x = names.get("x")
        # an operand that is not there has a name that nothing has
        self.addend, self.plus, self.bias = (names.get(r, "") for r in ("block_addend", "addend", "bias"))
        self.keeps = self.block is not None and self.block in step.more
        self.rows = [name for role, name in step.reads if role.startswith("rows")]
        self.weights = [(names.get(f"w{k}"), names.get(f"wt{k}")) for k in range(len(self.rows))]
        rights = [(role[5:], name) for role, name in step.reads if role.startswith("right")]
        self.sides = [self._side(names.get(f"left{k}"), right, env) for k, right in rights]
        some = env[self.x] if self.x is not None else env[self.rows[0] if self.rows else rights[0][1]]
        self.num_rows = some.shape[0] if pattern is None else pattern.num_rows
        gathered = None
        if pattern is not None:
            gathered = Gathered(pattern, some.shape[1], **constants, is_kept=self.keeps)
        self.width = self._product_width(env)
        self.chain = Chain(
            self.num_rows, some.dtype, gathered, [self._columns(name, env) for name in self.rows], self.width,
            [(self._columns(left, env), self._columns(right, env)) for left, right, _ in self.sides],
        )  # fmt: skip

    def _side(self, left: str | None, right: str, env: Mapping[str, Any]) -> tuple[str | None, str, bool]:
        """(left, right, turned): vector lanes run over the wider operand, so that one goes right."""
        if left is None:  # a bias gradient: every row counts once
            return None, right, False
        widths = [env[self.x or "" if name == self.block else name].shape[1] for name in (left, right)]
        return (right, left, True) if widths[0] > widths[1] else (left, right, False)

    def _columns(self, name: str | None, env: Mapping[str, Any]) -> int | None:
        if name is None:
            return 1
        return None if name == self.block else int(env[name].shape[1])

    def _product_width(self, env: Mapping[str, Any]) -> int:
        if not self.weights:
            return 0
        plain, turned = self.weights[0]
        return int(env[plain].shape[1]) if plain is not None else int(env[turned or ""].shape[0])

    def run(
        self,
        env: Env,
        step: Step,
        out: torch.Tensor | None,
        addend_scale: torch.Tensor | None,
        take: Callable[[int, int, torch.dtype], torch.Tensor],
    ) -> None:
        """Fill env with what the chain makes, `out` apart."""
        block = self.block
        x: Any = None if self.x is None else env[self.x]
        kept = take(self.num_rows, x.shape[1], x.dtype) if self.keeps else None
        rows = [None if name == block else env[name] for name in self.rows]
        weights = [(env[w] if w is not None else env[t or ""].t()).contiguous() for w, t in self.weights]
        pairs = []
        for left, right, _ in self.sides:
            far = None if right == block else env[right]
            near = ones(x if far is None else far) if left is None else None if left == block else env[left]
            pairs.append((near, far))
        made = self.chain.run(
            take, rows, weights, pairs, x=x, addend=env.get(self.addend), addend_scale=addend_scale,
            kept=kept, out=out, plus=env.get(self.plus), bias=env.get(self.bias),
        )  # fmt: skip
        for name, value, (_, _, is_turned) in zip(step.more, made, self.sides, strict=False):
            env[name] = value.t() if is_turned else value
        if block is not None and kept is not None:
            env[block] = kept
