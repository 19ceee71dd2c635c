"""Attention's aggregation, 4 heads of 32 columns, forward and backward, against float64 over an edge list."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from plait.bench.gpu.clock import fastest_first, milliseconds, relative_error
from plait.kernels.attention import Dropout, Scores
from plait.kernels.attention.gpu import (
    AttentionTiles,
    attend,
    attend_sources,
    attend_targets,
    statistics_of,
)
from plait.kernels.csr.gpu import Rows, rows_of, transposed

__all__ = ["CANDIDATES", "Problem", "measure", "sweep"]

HEADS, COLUMNS = 4, 32
_MOST_CHECKED_EDGES = 1 << 23
"""Larger graphs are checked on a sample of rows: float64 over the edge list would not fit."""
CANDIDATES = [
    AttentionTiles(32, 512, slots, lanes, warps)
    for slots, lanes, warps in (
        (2, 8, 1), (2, 16, 1), (2, 32, 1), (4, 8, 1), (4, 16, 1), (4, 32, 1), (8, 8, 1), (4, 16, 2),
        (8, 8, 2), (8, 16, 2), (8, 8, 4), (16, 8, 4), (8, 32, 4),
    )
]  # fmt: skip


@dataclass
class Problem:
    """Inputs, outputs and gradients of one attention on one graph."""

    kind: str
    rows: Rows
    turned: Rows
    scores: Scores
    value: torch.Tensor
    grad: torch.Tensor
    is_kept: bool = False

    def __post_init__(self) -> None:
        near = self.scores.near
        assert near is not None
        self.out, self.value_grad = (
            torch.full_like(self.grad, float("nan")),
            torch.full_like(self.value, float("nan")),
        )
        self.near_grad, self.far_grad = (
            torch.full_like(near, float("nan")),
            torch.full_like(self.scores.far, float("nan")),
        )
        self.statistics = statistics_of(self.rows, self.value, HEADS)
        size = self.rows.num_edges if self.is_kept else 0
        self.kept = torch.empty((size, 2, HEADS), device="cuda") if self.is_kept else None
        self.att_grad: torch.Tensor | None = None

    def forward(self, tiles: AttentionTiles | None = None) -> None:
        attend(self.rows, self.scores, self.value, self.out, self.statistics, HEADS, tiles=tiles)

    def targets(self, tiles: AttentionTiles | None = None) -> torch.Tensor | None:
        return attend_targets(
            self.rows, self.scores, self.value, self.out, self.grad, self.statistics, self.near_grad, HEADS,
            kept=self.kept, tiles=tiles,
        )  # fmt: skip

    def sources(self, tiles: AttentionTiles | None = None) -> torch.Tensor | None:
        far_grad = None if self.kind == "leaky" else self.far_grad
        return attend_sources(
            self.turned, self.turned.order, self.scores, self.value, self.grad, self.statistics,
            self.value_grad, far_grad, HEADS, kept=self.kept, tiles=tiles,
        )  # fmt: skip

    def step(self) -> None:
        """Forward and backward."""
        self.forward()
        near, far = self.targets(), self.sources()
        self.att_grad = None if near is None or far is None else near + far

    def results(self) -> dict[str, torch.Tensor]:
        found = {"out": self.out, "near": self.near_grad, "value": self.value_grad}
        if self.kind != "leaky":
            found["far"] = self.far_grad
        return found | ({} if self.att_grad is None else {"att": self.att_grad})


def problem(
    kind: str, rows: Rows, turned: Rows, dtype: torch.dtype, dropout: float = 0.0, is_kept: bool = False
) -> Problem:
    """Random inputs of one kind on a graph."""
    width = HEADS if kind == "gat" else HEADS * COLUMNS
    value, grad = (torch.randn(rows.num_rows, HEADS * COLUMNS, device="cuda", dtype=dtype) for _ in range(2))
    near = torch.randn(rows.num_rows, width, device="cuda", dtype=dtype)
    near *= COLUMNS**-0.5 if kind == "dot" else 1.0
    far = value if kind == "leaky" else torch.randn(rows.num_rows, width, device="cuda", dtype=dtype)
    att = (torch.randn(HEADS * COLUMNS, device="cuda") * 0.2).to(dtype) if kind == "leaky" else None
    drop = Dropout(seed=5, probability=dropout) if dropout else None
    return Problem(kind, rows, turned, Scores(kind, far, near, None, att, dropout=drop), value, grad, is_kept)


def _expected(p: Problem, first: int, last: int) -> dict[str, torch.Tensor]:
    """Outputs of the rows [first, last) and gradients of all they reach, by autograd over their edges."""
    rows, near, far = p.rows, p.scores.near, p.scores.far
    assert near is not None
    begin, end = int(rows.indptr[first]), int(rows.indptr[last])
    source = rows.indices[begin:end].long()
    target = torch.repeat_interleave(rows.degrees[first:last].long())
    leaves = {"near": near[first:last], "far": far, "value": p.value}
    leaves = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    if p.kind == "leaky":
        leaves["value"] = leaves["far"]
    a, b = leaves["near"][target], leaves["far"][source]
    count = last - first
    if p.kind == "gat":
        score = torch.nn.functional.leaky_relu(a + b, p.scores.slope)
    elif p.kind == "dot":
        score = (a * b).view(-1, HEADS, COLUMNS).sum(2)
    else:
        assert p.scores.att is not None
        leaves["att"] = p.scores.att.detach().double().requires_grad_()
        bent = torch.nn.functional.leaky_relu(a + b, p.scores.slope) * leaves["att"]
        score = bent.view(-1, HEADS, COLUMNS).sum(2)
    index = target[:, None].expand(-1, HEADS)
    top = score.detach().new_full((count, HEADS), -torch.inf).scatter_reduce(0, index, score.detach(), "amax")
    power = (score - top[target]).exp()
    weight = power / power.new_zeros(count, HEADS).index_add(0, target, power)[target]
    message = weight[:, :, None] * leaves["value"][source].view(-1, HEADS, COLUMNS)
    out = message.new_zeros(count, HEADS, COLUMNS).index_add(0, target, message).view(count, -1)
    torch.autograd.backward(out, p.grad[first:last].double())
    found = {"out": out.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}
    return found


def errors(p: Problem) -> dict[str, float]:
    """Relative errors of a step; of a large graph only for the rows of a sample."""
    p.step()
    results = p.results()
    if p.rows.num_edges <= _MOST_CHECKED_EDGES:
        want = _expected(p, 0, p.rows.num_rows)
        return {n: relative_error(t, want[n]) for n, t in results.items()}
    first = p.rows.num_rows // 3
    last = int(torch.searchsorted(p.rows.indptr, p.rows.indptr[first] + (1 << 22)))
    want = _expected(p, first, last)
    return {n: relative_error(results[n][first:last], want[n]) for n in ("out", "near")}


def measure(name: str, edge_index: torch.Tensor, num_nodes: int) -> Iterator[dict[str, Any]]:
    """One record per kind, dtype and variant; no error where dropout was drawn, which the tests check."""
    rows = rows_of(edge_index, num_nodes)
    turned = transposed(rows)
    cases = [(kind, torch.float32, 0.0, False) for kind in ("leaky", "gat", "dot")]
    cases += [("leaky", torch.bfloat16, 0.0, False), ("dot", torch.bfloat16, 0.0, False)]
    cases += [("leaky", torch.float32, 0.0, True), ("gat", torch.float32, 0.0, True)]
    cases += [("leaky", torch.float32, 0.4, False)]
    for kind, dtype, dropout, is_kept in cases:
        p = problem(kind, rows, turned, dtype, dropout, is_kept)
        found = {} if dropout else errors(p)
        p.step()
        before = {n: t.clone() for n, t in p.results().items()}
        p.step()
        is_same = all(torch.equal(before[n], t) for n, t in p.results().items())
        yield {
            "kernel": f"attention {kind}", "graph": name, "dtype": str(dtype).split(".")[1],
            "dropout": dropout, "is_kept": is_kept, "forward_ms": milliseconds(p.forward),
            "targets_ms": milliseconds(p.targets),
            "sources_ms": milliseconds(p.sources), "ms": milliseconds(p.step),
            "error": max(found.values(), default=None),
            "errors": found, "is_same_twice": is_same,
        }  # fmt: skip
        del p, before


def sweep(name: str, edge_index: torch.Tensor, num_nodes: int) -> Iterator[dict[str, Any]]:
    """The milliseconds of every candidate and cut, pass by pass, fastest first."""
    rows = rows_of(edge_index, num_nodes)
    turned = transposed(rows)
    for kind, dtype in (
        ("leaky", torch.float32),
        ("leaky", torch.bfloat16),
        ("gat", torch.float32),
        ("dot", torch.float32),
    ):
        p = problem(kind, rows, turned, dtype)
        p.step()
        for part in (p.forward, p.targets, p.sources):
            times = {}
            for tiles in CANDIDATES:
                for short, most in ((8, 256), (16, 512), (32, 512), (64, 1024)):
                    cut = AttentionTiles(short, most, tiles.slots, tiles.lanes, tiles.warps)
                    times[cut] = milliseconds(functools.partial(part, cut), 3, 1, 1)
            yield {
                "sweep": part.__name__, "kind": kind, "dtype": str(dtype).split(".")[1], "graph": name,
                "times": fastest_first(times),
            }  # fmt: skip
