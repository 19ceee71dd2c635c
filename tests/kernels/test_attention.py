"""kernels/attention against its reference: outputs, gradients, odd shapes, hubs, large scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plait.kernels import attention as k
from plait.kernels.attention import reference
from plait.kernels.spmm import Pattern

TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-12}


class Case:
    """Random operands of one kind of attention on one small graph, as kernels want them."""

    def __init__(
        self, kind: str, heads: int, width: int, dtype: torch.dtype, graph: str = "random", scale: float = 1.0
    ):
        rng = np.random.default_rng(heads * 100 + width)
        self.rng, self.kind, self.heads, self.width, self.dtype = rng, kind, heads, width, dtype
        self.n, self.m = 23, 19
        rows, cols = _edges(graph, rng, self.n, self.m)
        self.pattern = Pattern(_pointer(rows, self.n), cols.astype(np.int32), self.m)
        self.order = np.argsort(cols, kind="stable").astype(np.int32)
        self.transpose = Pattern(_pointer(cols, self.m), rows[self.order].astype(np.int32), self.n)
        self.inverse = np.argsort(self.order).astype(np.int32)
        self.value, self.grad = self._draw(self.m, heads, width), self._draw(self.n, heads, width)
        self.edge = self.att = None
        if kind == "gat":
            self.near, self.far = self._draw(self.n, heads) * scale, self._draw(self.m, heads) * scale
            self.edge = self._draw(len(rows), heads)
        else:
            self.near = self._draw(self.n, heads, width) * scale
            self.far = self.value if kind == "leaky" else self._draw(self.m, heads, width)
            self.att = self._draw(heads, width) if kind == "leaky" else None

    def _draw(self, *shape: int) -> np.ndarray[Any, Any]:
        return self.rng.standard_normal(shape).astype(
            {torch.float32: np.float32, torch.float64: np.float64}[self.dtype]
        )

    def scores(self, dropout: k.Dropout | None = None) -> k.Scores:
        if self.kind == "gat":
            assert self.edge is not None
            return k.Scores("gat", self._lanes(self.far), edge=self._lanes(self.edge), dropout=dropout)
        att = None if self.att is None else torch.from_numpy(self.att.reshape(-1))
        return k.Scores(self.kind, _flat(self.far), _flat(self.near), att=att, dropout=dropout)

    def statistics(self) -> torch.Tensor:
        made = torch.full((self.n, 4, k.padded(self.heads)), float("nan"), dtype=self.dtype)
        made[:, 0] = self._lanes(self.near) if self.kind == "gat" else 0
        made[:, 3] = 0
        return made

    def _lanes(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.pad(values, ((0, 0), (0, k.padded(self.heads) - self.heads))))

    def forward(self, scores: k.Scores, statistics: torch.Tensor) -> torch.Tensor:
        out = torch.full((self.n, self.heads * self.width), float("nan"), dtype=self.dtype)
        return k.attend(self.pattern, scores, _flat(self.value), out, statistics, self.heads)

    def backward(
        self, scores: k.Scores, statistics: torch.Tensor, out: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        nothing = float("nan")
        shape = (self.m, self.heads * self.width)
        k.output_dots(_flat(self.grad), out, statistics, self.heads)
        slopes = torch.full((self.pattern.num_edges, k.padded(self.heads)), nothing, dtype=self.dtype)
        value = torch.full(shape, nothing, dtype=self.dtype)
        lanes = k.padded(self.heads) if self.kind == "gat" else shape[1]
        far = None if self.kind == "leaky" else torch.full((self.m, lanes), nothing, dtype=self.dtype)
        att = k.attend_sources(
            self.transpose, self.order, scores, _flat(self.value), _flat(self.grad), statistics, slopes,
            value, far, self.heads,
        )  # fmt: skip
        result = {"value": value.view(self.m, self.heads, self.width)}
        if self.kind == "gat":
            assert far is not None
            result |= {"far": far[:, : self.heads], "edge": slopes[self.inverse][:, : self.heads]}
            return result
        near = torch.full((self.n, shape[1]), nothing, dtype=self.dtype)
        more = k.attend_targets(self.pattern, self.inverse, scores, slopes, near, self.heads)
        result["near"] = near.view(self.n, self.heads, self.width)
        if far is not None:
            result["far"] = far.view(self.m, self.heads, self.width)
        if att is not None and more is not None:
            result["att"] = (att + more).view(self.heads, self.width)
        return result

    def backward_from_targets(self, scores: k.Scores, statistics: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same gradients by the pass over targets first; neither the output nor its dots are there."""
        statistics[:, 3] = nothing = float("nan")
        lanes, columns = k.padded(self.heads), self.heads * self.width
        is_gat = self.kind == "gat"
        kept = torch.full((self.pattern.num_edges, 2 * lanes), nothing, dtype=self.dtype)
        near = torch.full((self.n, lanes if is_gat else columns), nothing, dtype=self.dtype)
        rows = (_flat(self.value), _flat(self.grad), statistics)
        more = k.attend_again(self.pattern, scores, *rows, near, self.heads, kept=kept)
        value = torch.full((self.m, columns), nothing, dtype=self.dtype)
        far = None if self.kind == "leaky" else torch.full((self.m, near.shape[1]), nothing, dtype=self.dtype)
        att = k.attend_sources(
            self.transpose, self.order, scores, *rows, None, value, far, self.heads, kept=kept
        )
        result = {"value": value.view(self.m, self.heads, self.width)}
        if is_gat:
            assert far is not None
            result |= {"far": far[:, : self.heads], "edge": kept[:, lanes : lanes + self.heads]}
            return result | {"near": near[:, : self.heads]}
        result["near"] = near.view(self.n, self.heads, self.width)
        if far is not None:
            result["far"] = far.view(self.m, self.heads, self.width)
        if att is not None and more is not None:
            result["att"] = (att + more).view(self.heads, self.width)
        return result

    def expected(
        self, factor: np.ndarray[Any, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        graph = (self.pattern.indptr, self.pattern.indices, self.kind, self.near, self.far, self.value)
        options = {"edge": self.edge, "att": self.att, "factor": factor}
        grads = reference.attend_backward(*graph, self.grad, **options)
        if self.kind == "leaky":  # the values are the far rows
            grads["value"] = grads["value"] + grads["far"]
        return reference.attend(*graph, **options)[0], grads


def _edges(
    graph: str, rng: np.random.Generator, n: int, m: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    if graph == "empty":
        return np.zeros(0, int), np.zeros(0, int)
    if graph == "hub":
        return np.sort(np.where(np.arange(500) < 400, 3, rng.integers(0, n, 500))), rng.integers(0, m, 500)
    if graph == "repeated":
        return np.repeat(np.arange(n), 4), np.repeat(rng.integers(0, m, n), 4)
    return np.sort(rng.integers(0, n - 3, 150)), rng.integers(0, m - 2, 150)


def _pointer(rows: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    return np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))]).astype(np.int32)


def _flat(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(values.reshape(values.shape[0], -1))


def close(actual: torch.Tensor, expected: np.ndarray[Any, Any], what: str) -> None:
    scale = max(1.0, float(np.abs(expected).max())) if expected.size else 1.0
    np.testing.assert_allclose(
        actual.numpy(), expected, atol=TOLERANCE[actual.dtype] * scale, rtol=0, err_msg=what
    )


# Some widths of a head have kernels of their own, where no head is padded. A kernel is compiled for every
# (kind, padded heads, dtype): what both dtypes do alike is tried with four heads in float64.
SHAPES = [
    ("gat", 4, 16, torch.float32), ("gat", 3, 17, torch.float64),
    ("gat", 1, 1, torch.float32), ("gat", 5, 5, torch.float32),
    ("leaky", 4, 16, torch.float32), ("leaky", 3, 37, torch.float64),
    ("dot", 4, 16, torch.float32), ("dot", 3, 37, torch.float64),
    ("gat", 8, 8, torch.float32), ("gat", 2, 53, torch.float32), ("leaky", 2, 32, torch.float32),
    ("leaky", 4, 8, torch.float64), ("leaky", 3, 21, torch.float32), ("dot", 1, 8, torch.float32),
    ("dot", 4, 16, torch.float64), ("dot", 4, 40, torch.float32), ("dot", 4, 64, torch.float32),
    ("leaky", 4, 32, torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize(("kind", "heads", "width", "dtype"), SHAPES)
def test_outputs_and_gradients_equal_the_reference(
    kind: str, heads: int, width: int, dtype: torch.dtype, graph: str
) -> None:
    case = Case(kind, heads, width, dtype, graph)
    scores, statistics = case.scores(), case.statistics()
    out = case.forward(scores, statistics)
    expected, grads = case.expected()
    close(out.view(case.n, heads, width), expected, "output")
    for name, value in case.backward(scores, statistics, out).items():
        close(value, grads[name], name)


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize(("kind", "heads", "width", "dtype"), SHAPES)
def test_gradients_of_the_targets_need_no_number_of_an_edge(
    kind: str, heads: int, width: int, dtype: torch.dtype, has_dropout: bool, graph: str
) -> None:
    case = Case(kind, heads, width, dtype, graph)
    dropout = k.Dropout(seed=987654321, probability=0.3) if has_dropout else None
    scores, statistics = case.scores(dropout), case.statistics()
    out = case.forward(scores, statistics)
    kept = case.backward(scores, statistics, out)
    lanes = k.padded(heads)
    near = torch.full((case.n, lanes if kind == "gat" else heads * width), float("nan"), dtype=dtype)
    att = k.attend_again(case.pattern, scores, _flat(case.value), _flat(case.grad), statistics, near, heads)
    if kind == "gat":
        expected = torch.zeros(case.n, heads, dtype=dtype)
        rows = torch.from_numpy(np.repeat(np.arange(case.n), np.diff(case.pattern.indptr)))
        expected.index_add_(0, rows, kept["edge"])
        close(near[:, :heads], expected.numpy(), "near")
        return
    close(near.view(case.n, heads, width), kept["near"].numpy(), "near")
    assert (att is None) == (kind == "dot")
    # the sources' pass gives the same with nobody reading its slopes
    value, far = torch.empty_like(_flat(case.value)), torch.empty_like(_flat(case.value))
    more = k.attend_sources(
        case.transpose, case.order, scores, _flat(case.value), _flat(case.grad), statistics, None, value,
        None if kind == "leaky" else far, heads,
    )  # fmt: skip
    assert torch.equal(value.view(kept["value"].shape), kept["value"])
    if att is not None and more is not None:
        close((att + more).view(heads, width), kept["att"].numpy(), "att")


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize(("kind", "heads", "width", "dtype"), SHAPES)
def test_gradients_do_not_depend_on_which_end_comes_first(
    kind: str, heads: int, width: int, dtype: torch.dtype, has_dropout: bool, graph: str
) -> None:
    case = Case(kind, heads, width, dtype, graph)
    dropout = k.Dropout(seed=987654321, probability=0.3) if has_dropout else None
    scores, statistics = case.scores(dropout), case.statistics()
    out = case.forward(scores, statistics)
    found = case.backward_from_targets(scores, statistics.clone())
    for name, value in case.backward(scores, statistics, out).items():
        close(found[name], value.numpy(), name)
    if not has_dropout:
        _, grads = case.expected()
        for name, value in found.items():
            close(value, grads[name], name)


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize(
    ("heads", "width", "dtype"), [(4, 16, torch.float32), (3, 37, torch.float64), (8, 1, torch.float32)]
)
def test_one_raw_row_is_key_and_value_of_every_head(
    heads: int, width: int, dtype: torch.dtype, graph: str
) -> None:
    case = Case("dot", heads, width, dtype, graph)
    x = case.value[:, :1]
    case.value = case.far = np.repeat(x, heads, 1)
    expected, grads = case.expected()
    raw, nothing = _flat(x), float("nan")
    scores, statistics = k.Scores("dot", raw, _flat(case.near), is_shared=True), case.statistics()
    out = torch.full((case.n, heads * width), nothing, dtype=dtype)
    k.attend(case.pattern, scores, raw, out, statistics, heads, is_shared=True)
    close(out.view(case.n, heads, width), expected, "output")
    slopes = torch.full((case.pattern.num_edges, k.padded(heads)), nothing, dtype=dtype)
    grad, to_raw = _flat(case.grad), torch.full(raw.shape, nothing, dtype=dtype)
    k.output_dots(grad, out, statistics, heads)
    k.attend_sources(
        case.transpose, None, scores, raw, grad, statistics, slopes, to_raw, to_raw, heads, is_shared=True
    )
    close(to_raw, (grads["value"] + grads["far"]).sum(1), "the sum of both gradients")
    near, again = torch.full_like(out, nothing), torch.full_like(out, nothing)
    k.attend_targets(case.pattern, case.inverse, scores, slopes, near, heads)
    k.attend_again(case.pattern, scores, raw, grad, statistics, again, heads, is_shared=True)
    for mine in (near, again):
        close(mine.view(case.n, heads, width), grads["near"], "near")


def test_scores_of_ten_thousand_neither_overflow_nor_lose_the_softmax() -> None:
    case = Case("gat", 4, 16, torch.float32, "hub", scale=1e4)
    scores, statistics = case.scores(), case.statistics()
    out = case.forward(scores, statistics)
    expected, grads = case.expected()
    close(out.view(case.n, 4, 16), expected, "output")
    for name, value in case.backward(scores, statistics, out).items():
        assert bool(torch.isfinite(value).all()), name
        if name == "value":
            close(value, grads[name], name)


@pytest.mark.parametrize("kind", ["gat", "dot"])
def test_dropout_drops_the_same_weights_in_both_passes(kind: str) -> None:
    case = Case(kind, 4, 16, torch.float32, "hub")
    dropout = k.Dropout(seed=12345678901234, probability=0.4)
    factor = _dropped(case, dropout)
    kept = float((factor != 0).mean())
    assert 0.5 < kept < 0.7
    scores, statistics = case.scores(dropout), case.statistics()
    out = case.forward(scores, statistics)
    expected, grads = case.expected(factor)
    close(out.view(case.n, 4, 16), expected, "output")
    for name, value in case.backward(scores, statistics, out).items():
        close(value, grads[name], name)


def _dropped(case: Case, dropout: k.Dropout) -> np.ndarray[Any, Any]:
    """What dropout did to every edge: with one edge in each row its weight is 1, times the factor."""
    edges = case.pattern.num_edges
    alone = Pattern(np.arange(edges + 1, dtype=np.int32), np.zeros(edges, np.int32), 1)
    scores = k.Scores("gat", torch.zeros((1, case.heads)), dropout=dropout)
    out, statistics = torch.empty((edges, case.heads)), torch.zeros((edges, 4, case.heads))
    k.attend(alone, scores, torch.ones((1, case.heads)), out, statistics, case.heads)
    return out.numpy()


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    rows = np.sort(rng.integers(0, 3000, 40000))
    pattern = Pattern(_pointer(rows, 3000), rng.integers(0, 3000, 40000).astype(np.int32), 3000)
    value, far = torch.randn(3000, 64), torch.randn(3000, 4)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            statistics = torch.zeros(3000, 4, 4)
            results.append(
                k.attend(pattern, k.Scores("gat", far), value, torch.empty(3000, 64), statistics, 4)
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
