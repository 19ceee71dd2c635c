"""Gated sums: their kernels on a CPU, and what they mean."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels import gate as kernels
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import ends, meaning, with_terms
from plait.runtime.orders import EdgeOrders
from plait.runtime.segments import segment_sum

__all__: list[str] = []


@kernel("gate", "cpu")
def _gate(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, names = b.orders.pattern, dict(step.reads)
    near, far, value = names["near"], names["far"], names.get("value", "")
    act = step.option("act", "sigmoid")
    addend, bias = names.get("addend", ""), names.get("bias", "")
    slopes = step.more[0] if step.more else ""

    def run(env: Env) -> Tensor:
        rows: Tensor = env[far]
        out = b.room(env, step.out, pattern.num_rows, rows.shape[1], rows)
        if slopes:
            env[slopes] = b.take(pattern.num_rows, rows.shape[1], rows.dtype)
        kernels.gate(
            pattern, act, env[near], rows, env.get(value), out=out, slopes=env.get(slopes),
            addend=env.get(addend), bias=env.get(bias),
        )  # fmt: skip
        return out

    return run


@kernel("gate_targets", "cpu")
def _gate_targets(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, act = b.orders.pattern, step.option("act", "sigmoid")
    near, far, value, grad = (step.get(role) or "" for role in ("near", "far", "value", "grad"))

    def run(env: Env) -> Tensor:
        out = b.room(env, step.out, pattern.num_rows, env[far].shape[1], env[far])
        kernels.gate(pattern, act, env[near], env[far], env.get(value), slopes=out)
        return out.mul_(env[grad])

    return run


@kernel("gate_sources", "cpu")
def _gate_sources(b: Binding, step: Step, owns: bool) -> Bound:
    transpose, act = b.orders.transpose, step.option("act", "sigmoid")
    near, far, value, grad = (step.get(role) or "" for role in ("near", "far", "value", "grad"))
    to_value = step.more[0] if step.more else ""

    def run(env: Env) -> Tensor:
        rows: Tensor = env[far]
        out = b.room_like(env, step.out, rows)
        if to_value:
            env[to_value] = b.room_like(env, to_value, rows)
        kernels.gate_sources(
            transpose, act, env[near], rows, env.get(value), env[grad], out, env.get(to_value)
        )
        return out

    return run


@kernel("multiply", "any", "torch")
def _multiply(b: Binding, step: Step, owns: bool) -> Bound:
    left, right = step["left"], step["right"]

    def run(env: Env) -> Tensor:
        x: Tensor = env[left]
        return torch.mul(x, env[right], out=b.room_like(env, step.out, x))

    return run


@meaning("gate")
def _gate_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    near, far, value = env[step["near"]], env[step["far"]], env.get(step.get("value") or "")
    sources, targets = ends(edges, near)
    both = near.index_select(0, targets) + far.index_select(0, sources)
    rows = both.relu() if value is None else both.sigmoid() * value.index_select(0, sources)
    return with_terms(segment_sum(rows, targets, len(near)), step, env)
