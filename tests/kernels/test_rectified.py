"""kernels/rectified against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.errors import InputError
from plait.kernels import rectified as k
from plait.kernels.rectified import reference
from plait.kernels.spmm import Pattern
from tests.kernels.test_gate import M, N, close, patterns


def bits_of(marks: torch.Tensor, width: int) -> np.ndarray:
    return np.unpackbits(marks.numpy(), axis=1, bitorder="little")[:, :width].astype(bool)


def packed(marks: np.ndarray) -> torch.Tensor:
    padded = np.zeros((len(marks), 8 * k.mark_bytes(marks.shape[1])), bool)
    padded[:, : marks.shape[1]] = marks
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little"))


def order_of(pattern: Pattern) -> np.ndarray:
    return np.argsort(pattern.indices, kind="stable").astype(pattern.indices.dtype)


@pytest.mark.parametrize("most", [8, 256])
@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inner", "width", "reduce"), [(1, 1, "max"), (37, 85, "min"), (64, 16, "max")])
def test_extrema_and_gradients_equal_the_reference(
    inner: int,
    width: int,
    reduce: str,
    dtype: torch.dtype,
    graph: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(k, "_MOST_EDGES", most)
    monkeypatch.setattr(k, "_LEAST_EDGES", 8)
    monkeypatch.setattr(k, "_EDGES_PER_CHUNK", 16)
    forward, transpose = patterns(graph)
    generator = torch.Generator().manual_seed(width)

    def draw(rows: int, columns: int) -> torch.Tensor:
        # halves and quarters: products and sums of them are exact, so that ties are ties
        drawn = torch.randint(-3, 4, (rows, columns), generator=generator)
        return drawn.to(dtype) / 2

    near, far, w, bias = draw(N, inner), draw(M, inner), draw(inner, width), draw(1, width)[0]
    expected = reference.attain(
        forward.indptr, forward.indices, reduce, *(t.numpy() for t in (near, far, w, bias))
    )
    out, ties = (torch.full((N, width), float("nan"), dtype=dtype) for _ in range(2))
    marks = torch.full((forward.num_edges, k.mark_bytes(width)), 255, dtype=torch.uint8)
    k.attain(forward, reduce, near, far, w, bias, out, ties, marks)
    np.testing.assert_array_equal(out.numpy(), expected[0])
    np.testing.assert_array_equal(ties.numpy(), expected[1])
    np.testing.assert_array_equal(bits_of(marks, width), expected[2])
    assert torch.equal(marks, packed(expected[2]))
    alone = torch.full_like(out, float("nan"))
    assert torch.equal(k.attain(forward, reduce, near, far, w, bias, alone), out)

    share = draw(N, width)
    to_near, to_far = (torch.full((rows, inner), float("nan"), dtype=dtype) for rows in (N, M))
    of_w, of_bias = k.target_gradients(forward, near, far, w.t(), share, marks, to_near)
    k.source_gradients(transpose, order_of(forward), near, far, w.t(), share, marks, to_far)
    slow = reference.gradients(
        forward.indptr, forward.indices, *(t.numpy() for t in (near, far, w, share)), expected[2]
    )
    for name, made in (("near", to_near), ("far", to_far), ("w", of_w.t()), ("bias", of_bias)):
        close(made, slow[name], name)


def test_a_maximum_of_nan_is_nan_and_nobody_attains_it() -> None:
    forward = Pattern(np.array([0, 2], np.int32), np.array([0, 1], np.int32), 2)
    near, far, w = torch.zeros(1, 1), torch.tensor([[1.0], [float("nan")]]), torch.ones(1, 1)
    out, ties, marks = torch.empty(1, 1), torch.empty(1, 1), torch.empty(2, 8, dtype=torch.uint8)
    k.attain(forward, "max", near, far, w, None, out, ties, marks)
    assert out.isnan().all()
    assert ties.item() == 1
    assert not marks.any()


def test_the_number_of_threads_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 40, 800)
    degrees[5] = 3000  # a row that is cut
    indptr = np.append(0, np.cumsum(degrees)).astype(np.int32)
    forward = Pattern(indptr, rng.integers(0, 700, indptr[-1]).astype(np.int32), 700)
    near, far, w = torch.randn(800, 64), torch.randn(700, 64), torch.randn(64, 64)

    def run() -> list[torch.Tensor]:
        out, ties, to_near = torch.empty(800, 64), torch.empty(800, 64), torch.empty(800, 64)
        marks = torch.empty(forward.num_edges, 8, dtype=torch.uint8)
        k.attain(forward, "max", near, far, w, None, out, ties, marks)
        return [out, ties, marks, to_near, *k.target_gradients(forward, near, far, w, out, marks, to_near)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(4)
        four = run()
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, one, four))


def test_a_weight_that_does_not_fit_and_marks_without_ties_are_refused() -> None:
    forward, _ = patterns("random")
    near, far, out = torch.zeros(N, 3), torch.zeros(M, 3), torch.empty(N, 4)
    with pytest.raises(InputError, match="w: has shape"):
        k.attain(forward, "max", near, far, torch.zeros(4, 4), None, out)
    with pytest.raises(InputError, match="ties and marks"):
        k.attain(forward, "max", near, far, torch.zeros(3, 4), None, out, torch.empty(N, 4))
