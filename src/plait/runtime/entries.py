"""Matrices whose values are inputs: kernels on a CPU, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.kernels import normalised as kernels
from plait.kernels import spmm as sparse
from plait.kernels.normalised.reference import reference
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import meaning
from plait.runtime.orders import EdgeOrders
from plait.runtime.segments import segment_sum

__all__ = ["Normalising"]


def _part(entries: Tensor, first: int, count: int) -> Tensor:
    """Some of the entries as a vector: one call, where slicing a column takes several times as long."""
    stride = entries.stride(0)
    return entries.as_strided((count,), (stride,), entries.storage_offset() + first * stride)


def _diagonal(step: Step, edges: int, rows: int) -> Callable[[Tensor], Tensor | None]:
    """From the entries, the values on the diagonal; None where there are none."""
    has_own, identity = step.option("has_own"), step.option("identity", 0.0)
    if has_own and identity:
        return lambda entries: _part(entries, edges, rows) + identity
    if has_own:
        return lambda entries: _part(entries, edges, rows)
    return lambda entries: entries.new_full((rows,), identity) if identity else None


@kernel("entry_sums", "cpu")
def _sums(b: Binding, step: Step, owns: bool) -> Bound:
    is_turned, edges = step.is_transposed, b.orders.pattern.num_edges
    pattern = b.orders.transpose if is_turned else b.orders.pattern
    order = torch.from_numpy(b.orders.order) if is_turned else None
    rows, entries_name, x_name = pattern.num_rows, step["entries"], step["x"]
    diagonal = _diagonal(step, edges, rows)

    def run(env: Env) -> Tensor:
        entries, x = env[entries_name], env[x_name]
        values, own = _part(entries, 0, edges), diagonal(entries)
        out = b.take(rows, x.shape[1], x.dtype)
        return sparse.spmm(
            pattern, x, out, edge=values if order is None else values.index_select(0, order),
            addend=None if own is None else x, addend_scale=own,
        )  # fmt: skip

    return run


@kernel("entry_dots", "cpu")
def _dots(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, near_name, far_name = b.orders.pattern, step["near"], step["far"]
    edges, own = pattern.num_edges, pattern.num_rows if step.option("has_own") else 0
    counted = np.arange(own + 1, dtype=pattern.indices.dtype)
    diagonal = sparse.Pattern(counted, counted[:own], own)

    def run(env: Env) -> Tensor:
        near, far = env[near_name], env[far_name]
        out = b.take(edges + own, 1, far.dtype)
        sparse.weight_gradient(pattern, far, near, _part(out, 0, edges))
        if own:
            sparse.weight_gradient(diagonal, far, near, _part(out, edges, own))
        return out

    return run


@meaning("entry_sums")
def _sums_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    entries, x, pattern = env[step["entries"]], env[step["x"]], edges.pattern
    rows = entries[: pattern.num_edges] * x.index_select(0, edges.sources)
    out = segment_sum(rows, edges.targets, pattern.num_rows)
    identity = step.option("identity", 0.0)
    out = out + identity * x if identity else out
    return out + entries[pattern.num_edges :] * x if step.option("has_own") else out


# Normalisation ---------------------------------------------------------------------------------------------


@dataclass
class Normalising:
    """How the weights of one call are normalised, and what the gradient of that reads.

    It is not saved by autograd, which frees what it saved: layers share the result, and each of them may be
    differentiated by itself.
    """

    places: kernels.Places
    loops: str
    fill: float
    scale: str
    made: kernels.Normalised | None = None


@kernel("normalise", "cpu")
def _normalise(b: Binding, step: Step, owns: bool) -> Bound:
    places, weight = step["places"], step["weight"]

    def run(env: Env) -> Tensor:
        how: Normalising = env[places]
        numbers = np.ascontiguousarray(env[weight].detach().resolve_neg().numpy())
        how.made = kernels.normalised(how.places, numbers, how.loops, how.fill, how.scale)
        return torch.from_numpy(how.made.entries).unsqueeze(1)

    return run


@kernel("normalise_back", "cpu")
def _normalise_back(b: Binding, step: Step, owns: bool) -> Bound:
    places, grad = step["places"], step["grad"]

    def run(env: Env) -> Tensor:
        how: Normalising = env[places]
        assert how.made is not None
        by = env[grad].detach().resolve_neg().reshape(-1).contiguous().numpy()
        return torch.from_numpy(kernels.gradient(how.places, how.made, by, how.loops, how.scale))

    return run


@meaning("normalise")
def _normalise_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    how: Normalising = env[step["places"]]
    values, own = reference(how.places, env[step["weight"]], how.loops, how.fill, how.scale)
    return (values if own is None else torch.cat([values, own])).unsqueeze(1)
