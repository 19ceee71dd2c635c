"""build.py: the kernels against numpy's lexsort, the index arithmetic past 2**31, any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import GraphError
from plait.graph import build, index_dtype

CASES = {
    "random": (50, 40, 300),
    "more nodes than one bucket each": (5000, 3000, 4000),
    "one row": (1, 7, 30),
    "one column": (7, 1, 30),
    "mostly isolated nodes": (100_000, 100_000, 50),
}


def edges(name, seed=0):
    rows, columns, size = CASES[name]
    rng = np.random.default_rng(seed)
    return rng.integers(0, columns, size), rng.integers(0, rows, size), rows, columns


def check(src, dst, rows, columns, **options):
    indptr, indices, order = build.build_csr(src, dst, rows, columns, build.scan(src, dst), **options)
    expected = np.lexsort((src, dst))  # stable: ties in the caller's order
    np.testing.assert_array_equal(indptr, np.searchsorted(dst[expected], np.arange(rows + 1)))
    np.testing.assert_array_equal(indices, src[expected])
    np.testing.assert_array_equal(np.arange(src.size) if order is None else order, expected)
    return order


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [0, 1, 2, 3, 7])
def test_rows_and_order_equal_a_stable_lexsort_for_any_number_of_threads(name, parts):
    check(*edges(name), parts=parts)


@pytest.mark.parametrize("name", CASES)
def test_the_64_bit_path_gives_the_same_rows(name):
    check(*edges(name), dtype=np.int64)


def test_one_hub_among_many_rows_is_shared_between_threads():
    src = np.arange(2000)[::-1].copy()
    check(src, np.where(src % 10 == 0, src, 7), 2000, 2000, parts=4)


def test_csr_order_needs_no_sort_and_no_order():
    src, dst, rows, columns = edges("random")
    order = np.lexsort((src, dst))
    assert check(src[order], dst[order], rows, columns) is None


def test_coalesced_order_is_seen_and_sorted_once():
    src, dst, rows, columns = edges("random")
    order = np.lexsort((dst, src))
    src, dst = src[order], dst[order]
    facts = build.scan(src, dst)
    assert facts.is_source_order
    assert not facts.is_csr_order
    check(src, dst, rows, columns)


def test_scan_tells_ranges_and_orders():
    facts = build.scan(np.array([3, 1, 2]), np.array([0, 5, 5]))
    assert (facts.min_src, facts.max_src, facts.min_dst, facts.max_dst) == (1, 3, 0, 5)
    assert facts.is_csr_order
    assert not facts.is_source_order
    assert facts.num_loops == 0
    assert build.scan(np.array([3, 1, 2, 3]), np.array([3, 5, 2, 3])).num_loops == 3
    nothing = np.zeros(0, np.int64)
    assert build.scan(nothing, nothing) == build.EdgeScan(0, -1, 0, -1, True, True)


@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "expected"),
    [
        (0, 0, np.int32),
        (2**31 - 1, 2**31 - 1, np.int32),
        (10, 2**31, np.int64),
        (2**31, 10, np.int64),
        (2**40, 2**40, np.int64),
    ],
)
def test_indices_are_32_bit_exactly_while_they_fit(num_nodes, num_edges, expected):
    chosen = index_dtype(num_nodes, num_edges)
    assert chosen == expected
    assert num_edges <= np.iinfo(chosen).max  # the last row pointer is num_edges itself


def test_a_graph_beyond_32_bits_is_refused_by_name_on_a_32_bit_path():
    build.require_int32(10, 2**31 - 1, "spmm")
    with pytest.raises(GraphError, match=r"spmm.*2,147,483,648 edges.*64-bit path"):
        build.require_int32(10, 2**31, "spmm")


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_transpose_visits_rows_in_order_so_its_rows_are_sorted(parts):
    src, dst, rows, columns = edges("more nodes than one bucket each")
    pointer, indices, _ = build.build_csr(src, dst, rows, columns, build.scan(src, dst))
    edge_rows = np.sort(dst)
    indptr, flipped, order = build.transpose_csr(pointer, indices, columns, parts)
    expected = np.lexsort((edge_rows, indices))
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(flipped, edge_rows[expected])
    np.testing.assert_array_equal(np.diff(indptr), np.bincount(indices, minlength=columns))


def test_a_failure_in_a_thread_is_raised():
    def work(part):
        if part == 1:
            raise ValueError("part 1")

    with pytest.raises(ValueError, match="part 1"):
        build._each(2, work)
