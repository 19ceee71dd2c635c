"""Attention: its kernels on a CPU, and what its passes mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from plait.kernels import attention as kernels
from plait.kernels import spmm as sparse
from plait.kernels.attention import Dropout, Scores, padded
from plait.kernels.heads import project_heads, project_heads_backward
from plait.kernels.spmm import Pattern
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import ends, meaning, with_terms
from plait.runtime.orders import EdgeOrders
from plait.runtime.segments import segment_softmax, segment_sum

__all__ = ["scores_of"]


def scores_of(step: Step) -> Any:
    """The scores of a step as a function of the available values."""
    kind, slope, is_shared = step.option("kind"), step.option("slope"), bool(step.option("is_shared"))
    far, near = step["far"], step["near"] if kind != "gat" else ""
    edge, att = step.get("edge") or "", step.get("att") or ""

    def scores(env: Env) -> Scores:
        return Scores(
            kind, env[far], env.get(near), edge=env.get(edge), att=env.get(att), slope=slope,
            dropout=env.get("dropout"), is_shared=is_shared and kind == "dot",
        )  # fmt: skip

    return scores


@kernel("attend", "cpu")
def _attend(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, scores, heads = b.orders.pattern, scores_of(step), step.option("heads")
    lanes, is_shared, rows = padded(heads), bool(step.option("is_shared")), pattern.num_rows
    value_name, statistics_name = step["value"], step.more[0]
    near = step["near"] if step.option("kind") == "gat" else ""
    addend, bias = step.get("addend") or "", step.get("bias") or ""

    def run(env: Env) -> Tensor:
        value: Tensor = env[value_name]
        statistics = b.take(rows, 4 * lanes, value.dtype).view(rows, 4, lanes)
        if near:
            statistics[:, 0] = env[near]
        if heads < lanes:  # for padding heads
            statistics[:, 3] = 0
        env[statistics_name] = statistics
        out = b.take(rows, value.shape[1] * (heads if is_shared else 1), value.dtype)
        return kernels.attend(
            pattern, scores(env), value, out, statistics, heads, is_shared=is_shared,
            addend=env.get(addend), bias=env.get(bias),
        )  # fmt: skip

    return run


@kernel("attend_dots", "cpu")
def _attend_dots(b: Binding, step: Step, owns: bool) -> Bound:
    """The dot products are stored with the statistics, where the passes over edges read them."""
    grad, out, statistics = step["grad"], step["out"], step["statistics"]
    addend, bias, heads = step.get("addend") or "", step.get("bias") or "", step.option("heads")

    def run(env: Env) -> Tensor:
        kernels.output_dots(
            env[grad], env[out], env[statistics], heads, addend=env.get(addend), bias=env.get(bias)
        )
        made: Tensor = env[statistics]
        return made

    return run


@kernel("attend_sources", "cpu")
def _attend_sources(b: Binding, step: Step, owns: bool) -> Bound:
    orders, scores, heads = b.orders, scores_of(step), step.option("heads")
    kind, is_shared, lanes = step.option("kind"), bool(step.option("is_shared")), padded(heads)
    value_name, grad, statistics, far = step["value"], step["grad"], step["statistics"], step["far"]
    slopes, to_far, kept = step.option("slopes"), step.option("to_far"), step.get("kept") or ""
    to_att = step.more[0] if kind == "leaky" else ""
    edges = orders.transpose.num_edges

    def run(env: Env) -> Tensor:
        value: Tensor = env[value_name]
        given = scores(env)
        out = b.room_like(env, step.out, value)
        to_scores: Tensor | None = None
        if to_far is not None:
            to_scores = env[to_far] = b.room_like(env, to_far, env[far])
        elif kind == "dot":
            to_scores = out  # keys and values are the same rows
        if slopes is not None:
            env[slopes] = b.take(edges, lanes, value.dtype)
        needs_order = kept or given.edge is not None or given.dropout is not None
        made = kernels.attend_sources(
            orders.transpose, orders.order if needs_order else None, given, value, env[grad], env[statistics],
            env.get(slopes), out, to_scores, heads, is_shared=is_shared, kept=env.get(kept),
        )  # fmt: skip
        if to_att and made is not None:
            env[to_att] = made.reshape(1, -1)
        return out

    return run


@kernel("attend_targets", "cpu")
def _attend_targets(b: Binding, step: Step, owns: bool) -> Bound:
    orders, scores, heads = b.orders, scores_of(step), step.option("heads")
    near, slopes, lanes = step["near"], step["slopes"], padded(heads)
    rows, to_att = orders.pattern.num_rows, step.more[0] if step.more else ""
    if step.option("kind") == "gat":
        by_target = orders.slopes_by_target

        def total(env: Env) -> Tensor:
            given: Tensor = env[slopes]
            return sparse.spmm(by_target, given, b.room(env, step.out, rows, lanes, given))

        return total

    def run(env: Env) -> Tensor:
        out = b.room_like(env, step.out, env[near])
        made = kernels.attend_targets(orders.pattern, orders.inverse, scores(env), env[slopes], out, heads)
        if to_att and made is not None:
            env[to_att] = made.reshape(1, -1)
        return out

    return run


@kernel("attend_again", "cpu")
def _attend_again(b: Binding, step: Step, owns: bool) -> Bound:
    orders, scores, heads = b.orders, scores_of(step), step.option("heads")
    value, grad, statistics, near = step["value"], step["grad"], step["statistics"], step["near"]
    kept, is_shared, pattern = step.option("kept"), bool(step.option("is_shared")), orders.pattern
    to_att = step.more[0] if step.option("kind") == "leaky" else ""

    def run(env: Env) -> Tensor:
        out = b.room_like(env, step.out, env[near])
        if kept is not None:
            env[kept] = b.take(pattern.num_edges, 2 * padded(heads), out.dtype)
        made = kernels.attend_again(
            pattern, scores(env), env[value], env[grad], env[statistics], out, heads, is_shared=is_shared,
            kept=env.get(kept),
        )  # fmt: skip
        if to_att and made is not None:
            env[to_att] = made.reshape(1, -1)
        return out

    return run


@kernel("edge_order", "cpu")
def _edge_order(b: Binding, step: Step, owns: bool) -> Bound:
    order = torch.from_numpy(b.orders.inverse.astype(np.int64))
    return lambda env: env[step["x"]][order]


@kernel("heads", "cpu")
def _heads(b: Binding, step: Step, owns: bool) -> Bound:
    names, heads = dict(step.reads), step.option("heads")
    bare = b.orders.bare if step.option("is_bare_without") and "bias" in names else None

    def run(env: Env) -> Tensor:
        x, w = env[names["x"]], env[names["w"]]
        own, skip, skip_bias, bias = (
            env[names[role]] if role in names else None for role in ("own", "skip", "skip_bias", "bias")
        )
        out = b.take(x.shape[0], w.shape[1], x.dtype)
        skip = skip if skip is None else skip.contiguous()
        project_heads(x, w.contiguous(), out, heads, bias=bias, own=own, skip=skip, skip_bias=skip_bias)
        if (
            bias is not None and bare is not None and len(bare)
        ):  # a target without edges has no value whose bias it could get
            out[bare] -= bias
        return out

    return run


@kernel("heads_backward", "cpu")
def _heads_backward(b: Binding, step: Step, owns: bool) -> Bound:
    x_name, w_name, grad = (step[role] for role in ("x", "w", "grad"))
    own, heads = step.get("own"), step.option("heads")

    def run(env: Env) -> Tensor:
        x = env[x_name]
        out = b.like(x)
        to_w, to_skip, sums = project_heads_backward(
            env[grad], x, env[w_name].contiguous(), out, heads, own=env.get(own or "")
        )
        env.update(zip(step.more, (to_w, sums, to_skip), strict=False))
        return out

    return run


@kernel("bare_sums", "any", "torch")
def _bare_sums(b: Binding, step: Step, owns: bool) -> Bound:
    bare = b.orders.bare
    return lambda env: env[step["sums"]] - env[step["grad"]][bare.to(env[step["grad"]].device)].sum(0)


# Meaning --------------------------------------------------------------------------------------------------


def _by_head(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(len(rows), heads, rows.shape[1] // heads)


@meaning("attend")
def _attend_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    kind, heads, value = step.option("kind"), step.option("heads"), env[step["value"]]
    is_shared = bool(step.option("is_shared"))
    sources, targets = ends(edges, value)
    near, far = env[step["near"]].index_select(0, targets), env[step["far"]].index_select(0, sources)
    own = step.get("edge")
    rows = value.index_select(0, sources)
    if (
        own is not None and kind != "gat"
    ):  # rows per edge are added to the sources' and, of dots, to the values
        far = far + env[own]
        rows = rows + env[own] if kind == "dot" else rows
    if kind == "gat":
        edge = step.get("edge")
        scores = leaky_relu(near + far if edge is None else near + far + env[edge], step.option("slope"))
        scores = scores[:, :heads]
    elif kind == "leaky":
        bent = leaky_relu(near + far, step.option("slope")) * env[step["att"]].reshape(-1)
        scores = _by_head(bent, heads).sum(-1)
    else:
        other = far.unsqueeze(1) if is_shared else _by_head(far, heads)
        scores = (_by_head(near, heads) * other).sum(-1)
    count = edges.pattern.num_rows
    weights = segment_softmax(scores, targets, count)
    dropout = env.get("dropout")
    if dropout is not None:
        weights = weights * _dropped(edges, dropout, heads, scores)
    by_head = rows.unsqueeze(1) if is_shared else _by_head(rows, heads)
    return with_terms(segment_sum((weights.unsqueeze(-1) * by_head).flatten(1), targets, count), step, env)


def _dropped(edges: EdgeOrders, dropout: Dropout, heads: int, like: Tensor) -> Tensor:
    """[edges, heads]: what the kernels multiply the weights by, found by letting each edge attend alone."""
    count, lanes = edges.pattern.num_edges, padded(heads)
    alone = Pattern(np.arange(count + 1, dtype=np.int64), np.zeros(count, np.int64), 1)
    dtype = like.dtype
    scores = Scores("gat", torch.zeros((1, lanes), dtype=dtype), dropout=dropout.on_host())
    out, statistics = torch.empty((count, heads), dtype=dtype), torch.zeros((count, 4, lanes), dtype=dtype)
    made = kernels.attend(alone, scores, torch.ones((1, heads), dtype=dtype), out, statistics, heads)
    return made.to(like.device)


@meaning("heads")
def _heads_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    heads, means, w = step.option("heads"), env[step["x"]], env[step["w"]]
    inner, width = w.shape[0], w.shape[1] // heads
    by_head = means.view(len(means), heads, inner).transpose(0, 1)
    out = torch.bmm(by_head, w.reshape(inner, heads, width).transpose(0, 1)).transpose(0, 1).flatten(1)
    if step.get("bias") is not None:
        bias = env[step["bias"]]
        if step.option("is_bare_without"):
            bias = bias * out.new_ones(len(out), 1).index_fill(0, edges.bare, 0.0)
        out = out + bias
    if step.get("skip") is not None:
        out = out + env[step["own"]] @ env[step["skip"]]
    return out if step.get("skip_bias") is None else out + env[step["skip_bias"]]
