"""Attention over a graph's edges: softmax of scores, weighted sums of source rows, and the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.kernels import launch
from plait.kernels.arguments import Arguments
from plait.kernels.attention import cpu, targets
from plait.kernels.compiled import address_of, stored
from plait.kernels.operands import float_bits, read_flat, read_numbers, read_rows, write_flat, write_rows
from plait.kernels.spmm import Pattern

__all__ = [
    "MOST_HEADS", "Dropout", "Scores", "attend", "attend_again", "attend_sources", "attend_targets",
    "output_dots", "padded",
]  # fmt: skip

MOST_HEADS = 16
_SERIAL_BELOW = 1 << 16  # edges times columns; a score costs several multiply-adds
_PIECE_ROWS = 512
_FEW_DOTS = 1 << 14  # numbers (5 us of one core) under which a second thread does not pay, see kernels/gemm
# Columns of a head that have float32 kernels of their own: short rows spend more on loops of unknown length
# than on the sums inside them. In float64, which checks rather than trains, compiling them would not pay.
_FIXED_WIDTHS = (8, 16, 32, 64)


def padded(heads: int) -> int:
    """Heads as kernels lay them out: the next power of two."""
    return 1 << (heads - 1).bit_length()


@dataclass(frozen=True)
class Dropout:
    """Attention dropout drawn by counter: the same seed drops the same (edge, head) pairs in every pass."""

    seed: int | torch.Tensor  # a tensor of one int64 on the device whose kernels read it
    probability: float

    def on_host(self) -> Dropout:
        """The same with the seed as a number."""
        return Dropout(int(self.seed), self.probability)

    @property
    def threshold(self) -> int:
        """Draws of 32 bits below it are kept; never 0, which stands for no dropout."""
        return min((1 << 32) - 1, max(1, round((1.0 - self.probability) * (1 << 32))))

    @property
    def scale(self) -> float:
        return 1.0 / (1.0 - self.probability) if self.probability < 1.0 else 0.0


@dataclass(frozen=True)
class Scores:
    """How the edges are scored.

    gat: far[sources, lanes] + statistics slot 0 of the target + edge[edges, lanes], through leaky.
    leaky: att . leaky(near[targets] + far[sources]), by head; dot: near . far, by head. is_shared: far is one
    row for all heads (dot).
    """

    kind: str
    far: torch.Tensor
    near: torch.Tensor | None = None
    edge: torch.Tensor | None = None
    att: torch.Tensor | None = None
    slope: float = 0.2
    dropout: Dropout | None = None
    is_shared: bool = False

    def width(self, heads: int) -> int:
        """Columns of one head's far row."""
        return self.far.shape[1] if self.is_shared else self.far.shape[1] // heads

    def near_columns(self, heads: int) -> int:
        """Columns of a near row, all heads."""
        return heads * self.width(heads)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "forward": cpu.forward, "sources": cpu.sources, "targets": targets.targets, "again": targets.again,
    "weigh": functools.partial(targets.again, is_kept=True),
    "spread": functools.partial(cpu.sources, is_kept=True),
}  # fmt: skip


@functools.cache
def _address(name: str, float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int) -> int:
    build = _BUILDERS[name]
    return address_of(
        f"attention-{name}-{kind}-f{float_bits}-i{index_bits}-h{lanes}" + (f"-w{fixed}" if fixed else ""),
        lambda: build(float_bits, index_bits, lanes, kind, fixed),
    )


def _fixed(scores: Scores, heads: int, lanes: int, width: int, is_shared: bool) -> int:
    """The columns of a head if kernels are made for this many, 0 where they take any number."""
    is_plain = heads == lanes and not is_shared and not scores.is_shared
    is_even = scores.kind == "gat" or scores.width(heads) == width
    is_single = scores.far.element_size() == 4
    return width if is_plain and is_even and is_single and width in _FIXED_WIDTHS else 0


_dots_address = stored("attention-dots", cpu.row_dots)


def _numbers(scores: Scores, dtype: torch.dtype) -> torch.Tensor:
    return _numbers_of(scores.slope, 1.0 if scores.dropout is None else scores.dropout.scale, dtype)


@functools.lru_cache(maxsize=64)
def _numbers_of(slope: float, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What kernels read from memory and nobody writes to."""
    return torch.tensor([slope, scale, 1.0, 0.0], dtype=dtype)


def _fill_scores(words: Any, at: Arguments, scores: Scores, heads: int, lanes: int, edges: int) -> Any:
    """Place what all passes read of the scores, but for the rows of both ends; returns what is to be held."""
    dtype, far = scores.far.dtype, scores.far
    columns = lanes if scores.kind == "gat" else far.shape[1]
    held = (
        read_flat(words, at.edge, "edge scores", scores.edge, dtype, edges * lanes),
        read_flat(words, at.att, "att", scores.att, dtype, columns),
        read_flat(words, at.numbers, "numbers", _numbers(scores, dtype), dtype, 4),
    )
    width = 0 if scores.kind == "gat" else scores.width(heads)
    words[at.score_width] = width
    words[at.near_head] = width * scores.far.element_size()
    words[at.far_head] = 0 if scores.is_shared else width * scores.far.element_size()
    dropout = scores.dropout
    words[at.seed] = 0 if dropout is None else int(dropout.seed)
    words[at.threshold] = 0 if dropout is None else dropout.threshold
    return held


def attend(
    pattern: Pattern,
    scores: Scores,
    value: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    heads: int,
    *,
    is_shared: bool = False,
    addend: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i, h] = sum over edges of softmax(score)[h] * value[j, h] + addend[i, h] + bias[h].

    statistics[targets, 4, lanes] gets the largest score (slot 1) and the inverse sum (slot 2) of every row;
    slot 0 is the target's part of the score (gat). Heads lie side by side. is_shared: value is one row for
    all heads, out has a row for each.
    """
    bits, dtype, size = float_bits("value", value), value.dtype, value.element_size()
    rows, sources, edges = pattern.num_rows, pattern.num_columns, pattern.num_edges
    width = value.shape[1] if is_shared else value.shape[1] // heads
    columns, lanes = heads * width, statistics.shape[2]
    fixed = _fixed(scores, heads, lanes, width, is_shared)
    at = cpu.FORWARD
    words = at.over(pattern.addresses)
    words[at.last_edge], words[at.heads], words[at.width] = max(0, edges - 1), heads, width
    words[at.value_head], words[at.out_head] = 0 if is_shared else width * size, width * size
    value = read_rows(words, at.value, "value", value, dtype, sources, width if is_shared else columns, True)
    write_rows(words, at.out, "out", out, dtype, rows, columns)
    write_flat(words, at.statistics, "statistics", statistics, dtype, rows * 4 * lanes)
    held = (
        read_rows(words, at.far, "far", scores.far, dtype, sources, scores.far.shape[1], True),
        read_rows(words, at.near, "near", scores.near, dtype, rows, scores.near_columns(heads)),
        _fill_scores(words, at, scores, heads, lanes, edges),
        read_rows(words, at.addend, "addend", addend, dtype, rows, columns),
        read_flat(words, at.bias, "bias", bias, dtype, columns),
    )
    address = _address("forward", bits, pattern.index_bits, lanes, scores.kind, fixed)
    at.run(address, words, pattern.threads(columns, _SERIAL_BELOW))
    del held
    return out


def attend_sources(
    transpose: Pattern,
    order: np.ndarray[Any, Any] | None,
    scores: Scores,
    value: torch.Tensor,
    grad: torch.Tensor,
    statistics: torch.Tensor,
    slopes: torch.Tensor | None,
    value_grad: torch.Tensor,
    score_grad: torch.Tensor | None,
    heads: int,
    *,
    is_shared: bool = False,
    kept: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The pass over sources: gradients of value, of the scores, and of what the source gives to the scores.

    slopes[edges, lanes] get the scores' gradients in the transpose's order (None: not needed);
    score_grad is None for leaky, whose far rows are the values; where far is the shared value itself, it is
    value_grad, which then gets the sum of both. order[t] is the row-order position of the
    transpose's edge t; only dropout and scores of edges need it. statistics needs all four slots (see
    output_dots). With `kept` from attend_again nothing is computed again: the order is needed, statistics and
    value are not read and slopes not written. Returns the sources' part of att's gradient (leaky only).
    """
    bits, dtype, size = float_bits("value", value), value.dtype, value.element_size()
    rows, targets, edges = transpose.num_rows, transpose.num_columns, transpose.num_edges
    width = value.shape[1] if is_shared else value.shape[1] // heads
    columns, lanes, far_columns = heads * width, statistics.shape[2], scores.far.shape[1]
    own_columns = width if is_shared else columns
    fixed = _fixed(scores, heads, lanes, width, is_shared)
    at = cpu.SOURCES
    words = at.over(transpose.addresses)
    words[at.last_edge], words[at.heads], words[at.width] = max(0, edges - 1), heads, width
    read_numbers(words, at.order, "order", order, transpose.index_bits, edges)
    words[at.grad_head] = width * size
    words[at.value_head] = words[at.out_head] = 0 if is_shared else width * size
    write_rows(words, at.out, "value_grad", value_grad, dtype, rows, own_columns)
    write_flat(words, at.slopes, "slopes", slopes, dtype, edges * lanes)
    write_rows(words, at.score_out, "score_grad", score_grad, dtype, rows, far_columns)
    held = (
        read_rows(words, at.value, "value", value, dtype, rows, own_columns),
        read_rows(words, at.grad, "grad", grad, dtype, targets, columns, True),
        read_flat(words, at.statistics, "statistics", statistics, dtype, targets * 4 * lanes),
        # seen from the source, its own row is near and the target's is far
        read_rows(words, at.near, "far", scores.far, dtype, rows, far_columns),
        read_rows(words, at.far, "near", scores.near, dtype, targets, scores.near_columns(heads), True),
        _fill_scores(words, at, scores, heads, lanes, edges),
        read_flat(words, at.kept, "kept", kept, dtype, edges * 2 * lanes),
    )
    words[at.near_head], words[at.far_head] = words[at.far_head], words[at.near_head]
    scratch, partial = _partials(transpose, scores, value, words, at)
    name = "sources" if kept is None else "spread"
    address = _address(name, bits, transpose.index_bits, lanes, scores.kind, fixed)
    at.run(address, words, transpose.threads(columns, _SERIAL_BELOW))
    del scratch, held
    return None if partial is None else partial.sum(0)


def _partials(
    pattern: Pattern, scores: Scores, like: torch.Tensor, words: Any, at: Arguments
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Rows of one piece each, so that sums over nodes do not depend on the threads."""
    if scores.kind != "leaky":
        words[at.scratch] = words[at.partial] = 0
        return None, None
    pieces = max(1, len(pattern.bounds) - 1)
    scratch, partial = (torch.zeros((pieces, scores.far.shape[1]), dtype=like.dtype) for _ in range(2))
    for name, place, tensor in (("scratch", at.scratch, scratch), ("partial", at.partial, partial)):
        write_flat(words, place, name, tensor, like.dtype, tensor.numel())
    return scratch, partial


def attend_targets(
    pattern: Pattern,
    inverse: np.ndarray[Any, Any],
    scores: Scores,
    slopes: torch.Tensor,
    near_grad: torch.Tensor,
    heads: int,
) -> torch.Tensor | None:
    """The pass over targets: the gradient of what the target gives to the scores (leaky and dot).

    inverse[e] is where the slopes of the row-order edge e lie. Returns the targets' part of att's gradient
    (leaky only).
    """
    far, near = scores.far, scores.near
    assert near is not None
    bits, dtype, size = float_bits("far", far), far.dtype, far.element_size()
    rows, edges, far_columns = pattern.num_rows, pattern.num_edges, far.shape[1]
    width, lanes = scores.width(heads), slopes.shape[1]
    columns = heads * width
    fixed = _fixed(scores, heads, lanes, width, scores.is_shared)
    at = targets.TARGETS
    words = at.over(pattern.addresses)
    words[at.heads], words[at.width], words[at.far_head] = (
        heads,
        width,
        0 if scores.is_shared else width * size,
    )
    words[at.near_head] = words[at.out_head] = width * size
    read_numbers(words, at.order, "inverse", inverse, pattern.index_bits, edges)
    write_rows(words, at.out, "near_grad", near_grad, dtype, rows, columns)
    held = (
        read_rows(words, at.far, "far", far, dtype, pattern.num_columns, far_columns, True),
        read_rows(words, at.near, "near", near, dtype, rows, columns),
        read_flat(words, at.slopes, "slopes", slopes, dtype, edges * lanes),
        read_flat(words, at.att, "att", scores.att, dtype, far_columns),
        read_flat(words, at.numbers, "numbers", _numbers(scores, dtype), dtype, 4),
    )
    scratch, partial = _partials(pattern, scores, far, words, at)
    address = _address("targets", bits, pattern.index_bits, lanes, scores.kind, fixed)
    at.run(address, words, pattern.threads(columns, _SERIAL_BELOW))
    del scratch, held
    return None if partial is None else partial.sum(0)


def attend_again(
    pattern: Pattern,
    scores: Scores,
    value: torch.Tensor,
    grad: torch.Tensor,
    statistics: torch.Tensor,
    near_grad: torch.Tensor,
    heads: int,
    *,
    is_shared: bool = False,
    kept: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """attend_targets without slopes: everything of an edge is computed again from the nodes' statistics.

    near_grad gets the gradient of what the target gives to the scores: [targets, lanes] for gat, else of its
    row. kept[edges, 2 lanes], where given, gets the weights of each edge and the gradients of its scores;
    slot 3 of statistics is not read then. Returns the targets' part of att's gradient (leaky only).
    """
    bits, dtype, size = float_bits("value", value), value.dtype, value.element_size()
    rows, sources, edges = pattern.num_rows, pattern.num_columns, pattern.num_edges
    width = value.shape[1] if is_shared else value.shape[1] // heads
    columns, lanes = heads * width, statistics.shape[2]
    near_columns = lanes if scores.kind == "gat" else scores.near_columns(heads)
    fixed = _fixed(scores, heads, lanes, width, is_shared)
    at = targets.AGAIN
    words = at.over(pattern.addresses)
    words[at.last_edge], words[at.heads], words[at.width] = max(0, edges - 1), heads, width
    words[at.value_head], words[at.grad_head] = 0 if is_shared else width * size, width * size
    write_rows(words, at.out, "near_grad", near_grad, dtype, rows, near_columns)
    write_flat(words, at.kept, "kept", kept, dtype, edges * 2 * lanes)
    held = (
        read_rows(words, at.value, "value", value, dtype, sources, width if is_shared else columns, True),
        read_rows(words, at.grad, "grad", grad, dtype, rows, columns),
        read_flat(words, at.statistics, "statistics", statistics, dtype, rows * 4 * lanes),
        read_rows(words, at.far, "far", scores.far, dtype, sources, scores.far.shape[1], True),
        read_rows(words, at.near, "near", scores.near, dtype, rows, near_columns),
        _fill_scores(words, at, scores, heads, lanes, edges),
    )
    scratch, partial = _partials(pattern, scores, value, words, at)
    name = "again" if kept is None else "weigh"
    address = _address(name, bits, pattern.index_bits, lanes, scores.kind, fixed)
    at.run(address, words, pattern.threads(columns, _SERIAL_BELOW))
    del scratch, held
    return None if partial is None else partial.sum(0)


def output_dots(
    grad: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    heads: int,
    *,
    addend: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """statistics slot 3 = grad[i, h] . (out[i, h] - addend[i, h] - bias[h]), for the softmax's gradient."""
    rows, columns = grad.shape
    at = cpu.ROW_DOTS
    words = at.words()
    words[at.rows], words[at.heads], words[at.width] = rows, heads, columns // heads
    bits, dtype, lanes = float_bits("grad", grad), grad.dtype, statistics.shape[2]
    words[at.lanes], words[at.piece_rows] = lanes, _PIECE_ROWS
    held = (
        read_rows(words, at.grad, "grad", grad, dtype, rows, columns),
        read_rows(words, at.row, "out", out, dtype, rows, columns),
        read_rows(words, at.addend, "addend", addend, dtype, rows, columns),
        read_flat(words, at.bias, "bias", bias, dtype, columns),
    )
    write_flat(words, at.out, "statistics", statistics, dtype, rows * 4 * lanes)
    at.run(_dots_address(bits), words, launch.num_threads() if rows * columns > _FEW_DOTS else 1)
    del held
