"""kernels/spmm against its reference: every mode, odd widths, hubs, empty rows, NaN in fresh outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.kernels import spmm as k
from plait.kernels.spmm import reference

WIDTHS = [1, 3, 7, 16, 17, 33, 64, 100, 130, 271]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def pattern_of(kind: str, rng: np.random.Generator, index: type = np.int32) -> k.Pattern:
    n, m = 23, 19
    if kind == "empty":
        rows, cols, n, m = np.zeros(0, int), np.zeros(0, int), 5, 4
    elif kind == "no_nodes":
        rows, cols, n, m = np.zeros(0, int), np.zeros(0, int), 0, 3
    elif kind == "hub":
        rows, cols = np.zeros(3000, int), rng.integers(0, m, 3000)
    elif kind == "repeated":
        rows, cols = np.repeat(np.arange(n), 4), np.repeat(rng.integers(0, m, n), 4)
    else:
        rows, cols = np.sort(rng.integers(0, n, 150)), rng.integers(0, m, 150)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))]).astype(index)
    return k.Pattern(indptr, cols.astype(index), m)


def dense(rng: np.random.Generator, n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((n, width))).to(dtype)


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    scale = max(1.0, float(np.abs(expected).max())) if expected.size else 1.0
    np.testing.assert_allclose(actual.numpy(), expected, atol=TOLERANCE[actual.dtype] * scale, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "empty", "no_nodes", "hub", "repeated"])
@pytest.mark.parametrize("width", WIDTHS)
def test_sum_with_every_option_equals_the_reference(kind: str, width: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(width)
    p = pattern_of(kind, rng, np.int64 if width % 2 else np.int32)
    x = dense(rng, p.num_columns, width, dtype)
    options = {
        "edge": dense(rng, p.num_edges, 1, dtype)[:, 0].contiguous(),
        "source": dense(rng, p.num_columns, 1, dtype)[:, 0].contiguous(),
        "target": dense(rng, p.num_rows, 1, dtype)[:, 0].contiguous(),
        "addend": dense(rng, p.num_rows, width, dtype),
        "addend_scale": dense(rng, p.num_rows, 1, dtype)[:, 0].contiguous(),
        "bias": dense(rng, width, 1, dtype)[:, 0].contiguous(),
    }
    for names in (
        [],
        ["edge"],
        ["source"],
        ["edge", "target"],
        ["source", "target", "addend", "addend_scale", "bias"],
    ):
        chosen = {name: options[name] for name in names}
        out = torch.full((p.num_rows, width), float("nan"), dtype=dtype)
        k.spmm(p, x, out, **chosen)
        plain = {name: value.numpy() for name, value in chosen.items()}
        close(out, reference.spmm(p.indptr, p.indices, x.numpy(), **plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 7, 8, 9, 15, 16, 24, 31, 32])
def test_rows_of_one_tile_are_the_end_of_wider_rows(width: int, dtype: torch.dtype) -> None:
    """Rows up to 32 (16) columns have their own kernels; a wider row ends in the same tiles."""
    rng = np.random.default_rng(width)
    p = pattern_of("random", rng)
    one, wider = (16, 64) if dtype is torch.float32 else (8, 32)
    width = min(width, 2 * one)
    x = dense(rng, p.num_columns, wider + width, dtype)
    out = torch.full((p.num_rows, width + 2), 7.0, dtype=dtype)
    for options in ({}, {"edge": torch.from_numpy(rng.standard_normal(p.num_edges)).to(dtype)}):
        expected = k.spmm(p, x, torch.empty(p.num_rows, wider + width, dtype=dtype), **options)
        k.spmm(p, x[:, wider:], out[:, 1:-1], **options)
        close(out[:, 1:-1], expected[:, wider:].numpy())
        if width <= one or width == 2 * one:  # else the ladder takes two tiles
            assert torch.equal(out[:, 1:-1], expected[:, wider:])
        assert (out[:, [0, -1]] == 7.0).all()  # beside the rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("kind", ["random", "empty", "hub", "repeated"])
def test_extremum_and_its_gradient_equal_the_reference(kind: str, name: str, width: int) -> None:
    rng = np.random.default_rng(width)
    p = pattern_of(kind, rng)
    # halves make ties, and zeros among them
    x = (dense(rng, p.num_columns, width, torch.float64) * 2).round() / 2
    out = torch.full((p.num_rows, width), float("nan"), dtype=torch.float64)
    k.spmm(p, x, out, reduce=name)
    close(out, reference.extremum(p.indptr, p.indices, x.numpy(), name))

    grad = dense(rng, p.num_rows, width, torch.float64)
    rows = np.repeat(np.arange(p.num_rows), np.diff(p.indptr))
    turned = np.argsort(p.indices, kind="stable")
    t_indptr = np.concatenate([[0], np.cumsum(np.bincount(p.indices, minlength=p.num_columns))])
    transpose = k.Pattern(t_indptr.astype(np.int32), rows[turned].astype(np.int32), p.num_rows)
    best, ties = torch.full_like(out, float("nan")), torch.full_like(out, float("nan"))
    k.extremum(p, x, best, ties, name)
    assert torch.equal(best, out)
    grad_x = k.extremum_gather(transpose, x, out, grad / ties, torch.full_like(x, float("nan")))
    expected = reference.extremum_backward(p.indptr, p.indices, x.numpy(), out.numpy(), grad.numpy())
    close(grad_x, expected)
    close(k.extremum_gather(transpose, x, out, grad / ties, torch.empty_like(x), x), expected + x.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "empty", "no_nodes", "hub", "repeated"])
@pytest.mark.parametrize("width", WIDTHS)
def test_marks_give_the_same_gradient_as_comparing(kind: str, width: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(width)
    index, name = (np.int64, "min") if width % 2 else (np.int32, "max")
    p = pattern_of(kind, rng, index)
    x = (dense(rng, p.num_columns, width, dtype) * 2).round() / 2
    x[:1, ::2] = float("nan")
    best, ties, marked_best, marked_ties = (
        torch.full((p.num_rows, width), 7.0, dtype=dtype) for _ in range(4)
    )
    marks = torch.full((p.num_edges, k.marks_bytes(width, dtype)), 255, dtype=torch.uint8)
    k.extremum(p, x, best, ties, name)
    k.extremum(p, x, marked_best, marked_ties, name, marks)
    assert torch.equal(marked_best.nan_to_num(9.0), best.nan_to_num(9.0))
    is_number = ~best.isnan()
    assert torch.equal(marked_ties[is_number], ties[is_number])

    rows = np.repeat(np.arange(p.num_rows), np.diff(p.indptr))
    order = np.argsort(p.indices, kind="stable").astype(index)
    t_indptr = np.concatenate([[0], np.cumsum(np.bincount(p.indices, minlength=p.num_columns))])
    transpose = k.Pattern(t_indptr.astype(index), rows[order].astype(index), p.num_rows)
    share = dense(rng, p.num_rows, width, dtype)
    for addend in (None, dense(rng, p.num_columns, width, dtype)):
        expected = k.extremum_gather(transpose, x, best, share, torch.empty_like(x), addend)
        edges, fresh = torch.from_numpy(order).unsqueeze(1), torch.full_like(x, float("nan"))
        assert torch.equal(k.marked_gather(transpose, edges, marks, share, fresh, addend), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_weight_gradient_equals_the_reference(width: int) -> None:
    rng = np.random.default_rng(width)
    p = pattern_of("random", rng)
    x, grad = dense(rng, p.num_columns, width, torch.float32), dense(rng, p.num_rows, width, torch.float32)
    out = k.weight_gradient(p, x, grad, torch.empty(p.num_edges))
    close(out, reference.spmm_weight_backward(p.indptr, p.indices, x.numpy(), grad.numpy()))


def test_strided_operands_and_slabs_change_nothing() -> None:
    rng = np.random.default_rng(0)
    p = pattern_of("random", rng)
    store = dense(rng, p.num_columns, 300, torch.float32)
    whole = k.spmm(p, store[:, 20:220], torch.empty(p.num_rows, 200))
    target = torch.full((p.num_rows, 250), 5.0)
    slabs = k.spmm(p, store[:, 20:220], target[:, 10:210], slab=64)
    assert torch.equal(whole, slabs)
    assert bool((target[:, :10] == 5).all() and (target[:, 210:] == 5).all())


def test_nan_and_infinity_travel_as_in_torch() -> None:
    p = k.Pattern(np.array([0, 2], np.int32), np.array([0, 1], np.int32), 2)
    x = torch.tensor([[float("nan"), float("inf"), 1.0], [2.0, 1.0, -float("inf")]])
    out = torch.empty(1, 3)
    assert torch.isnan(k.spmm(p, x, out, reduce="max"))[0].tolist() == [True, False, False]
    assert k.spmm(p, x, out)[0, 1:].tolist() == [float("inf"), -float("inf")]


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    rows = np.sort(rng.integers(0, 4000, 60000))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=4000))]).astype(np.int32)
    p = k.Pattern(indptr, rng.integers(0, 4000, 60000).astype(np.int32), 4000)
    x = dense(rng, 4000, 50, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(k.spmm(p, x, torch.empty(4000, 50)).clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
