"""cost/price.py: prices grow with the work, and slabs are chosen where gathered rows do not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from plait.cost.machine import default_profile
from plait.cost.price import Pricer, uniform_matrix
from plait.ops.work import ChainRequest, Matrix, Request, Uniform
from tests.plan.machines import random_machine

MACHINES = [default_profile(), *(random_machine(np.random.default_rng(k)) for k in range(6))]
WIDTHS = (0, 1, 7, 16, 33, 64, 100, 128, 256, 512, 1024)


def graph(nodes: int, edges: int, is_weighted: bool = False) -> Matrix:
    return Matrix(nodes, nodes, edges, is_weighted, Uniform(nodes), Uniform(nodes))


def rises(prices: list[float]) -> bool:
    return all(a <= b * (1 + 1e-12) for a, b in pairwise(prices))


@pytest.mark.parametrize("machine", MACHINES, ids=range(len(MACHINES)))
@pytest.mark.parametrize("op", ["spmm", "extremum", "extremum_gather", "spmm_features"])
def test_a_sparse_product_costs_more_with_more_edges_and_columns(machine: object, op: str) -> None:
    pricer = Pricer(machine)  # type: ignore[arg-type]
    by_edges = [
        pricer.price(Request(op, 10_000, 64, 0, graph(10_000, edges))).seconds
        for edges in (0, 1, 1000, 10**5, 10**7)
    ]
    by_width = [pricer.price(Request(op, 10_000, width, 0, graph(10_000, 10**5))).seconds for width in WIDTHS]
    assert rises(by_edges)
    assert rises(by_width)
    assert by_edges[0] > 0


@pytest.mark.parametrize("op", ["gemm", "gemm_transposed"])
def test_a_dense_product_costs_more_with_more_rows_and_at_least_a_call(op: str) -> None:
    pricer = Pricer(default_profile())
    prices = [pricer.price(Request(op, rows, 64, 64)).seconds for rows in (0, 1, 100, 10**4, 10**6)]
    assert rises(prices)
    assert prices[0] >= default_profile().call_seconds


def test_weights_beyond_the_caches_are_left_to_the_library() -> None:
    pricer = Pricer(default_profile())
    assert pricer.price(Request("gemm", 1000, 64, 64)).backend == "plait"
    assert pricer.price(Request("gemm", 1000, 4096, 4096)).backend == "torch"
    apart = 2 * pricer.price(Request("gemm", 60, 4096, 4096)).seconds
    wide, narrow = (
        pricer.price(ChainRequest(60, width, None, False, ((width, width),) * 2, (), 3 * width)).seconds
        for width in (4096, 64)
    )
    assert wide > apart
    assert narrow < 2 * pricer.price(Request("gemm", 60, 64, 64)).seconds


def test_work_of_a_dense_product_is_exact() -> None:
    work = Pricer(default_profile()).price(Request("gemm", 100, 8, 16)).work
    assert work.flops == 2 * 100 * 16 * 8
    assert work.bytes_least == 4 * (100 * 16 + 16 * 8 + 100 * 8)


def test_work_of_a_sparse_product_is_exact() -> None:
    price = Pricer(default_profile()).price(Request("spmm", 10, 8, 0, graph(10, 30)))
    assert price.work.flops == 30 * 8
    assert price.work.bytes_least == 4 * (10 * 8 + 30 + 10 + 10 * 8)
    assert price.work.bytes_gathered == 4 * (10 * 8 + 30 + 10 + 30 * 8)
    weighted = Pricer(default_profile()).price(Request("spmm", 10, 8, 0, graph(10, 30, True)))
    assert weighted.work.flops == 2 * 30 * 8


def test_the_rest_streams_through_memory() -> None:
    machine = default_profile()
    price = Pricer(machine).price(Request("combine", 1000, 64, parts=2))
    assert price.work.bytes_least == 4 * 1000 * 64 * 3
    assert price.seconds >= price.work.bytes_least / machine.stream_bytes_per_s
    assert price.backend == "torch"


def test_weights_and_scalings_are_dearer_than_neither() -> None:
    pricer = Pricer(default_profile())
    plain = pricer.price(Request("spmm", 10**4, 64, 0, graph(10**4, 10**5))).seconds
    source = pricer.price(Request("spmm", 10**4, 64, 0, graph(10**4, 10**5), has_source=True)).seconds
    edge = pricer.price(Request("spmm", 10**4, 64, 0, graph(10**4, 10**5, True))).seconds
    assert plain <= source
    assert plain <= edge


def test_slabs_are_chosen_where_whole_rows_miss_the_cache_and_narrow_ones_do_not() -> None:
    machine = replace(
        default_profile(), l2_bytes=1 << 20, l3_bytes=1 << 22, torch_spmm_factor=9.0, tile_seconds=0.0,
        edge_seconds=1e-12, row_seconds=1e-12, gather_l2_bytes_per_s=1e11, gather_l3_bytes_per_s=5e10,
        gather_memory_bytes_per_s=1e9,
    )  # fmt: skip
    wide = Pricer(machine).price(Request("spmm", 4000, 512, 0, graph(4000, 400_000)))
    assert 0 < wide.slab < 512
    assert f"slabs of {wide.slab}" in wide.because
    narrow = Pricer(machine).price(Request("spmm", 400, 32, 0, graph(400, 4000)))
    assert narrow.slab == 0


def test_a_slower_call_never_makes_more_slabs() -> None:
    slabs = [
        Pricer(replace(default_profile(), call_seconds=call)).price(
            Request("spmm", 10**5, 512, 0, graph(10**5, 10**6))
        )
        for call in (0.0, 1e-5, 1.0)
    ]
    assert slabs[-1].slab == 0


def test_double_precision_and_fewer_threads_cost_more() -> None:
    machine = replace(default_profile(), threads=4)
    for request in (Request("spmm", 10**4, 64, 0, graph(10**4, 10**5)), Request("gemm", 10**4, 64, 64)):
        base = Pricer(machine).price(request).seconds
        assert Pricer(machine, float_bytes=8).price(request).seconds >= base
        assert Pricer(machine, threads=1).price(request).seconds >= base
        assert Pricer(machine, threads=64).price(request).seconds == base


def test_torch_is_chosen_only_where_it_can_do_the_step() -> None:
    pricer = Pricer(replace(default_profile(), torch_spmm_factor=0.01))
    matrix = graph(10**4, 10**5)
    assert pricer.price(Request("spmm", 10**4, 64, 0, matrix)).backend == "torch"
    assert pricer.price(Request("spmm", 10**4, 64, 0, matrix, has_source=True)).backend == "plait"
    assert pricer.price(Request("spmm", 10**4, 64, 0, matrix, addends=1)).backend == "plait"
    assert pricer.price(Request("extremum", 10**4, 64, 0, matrix)).backend == "plait"


def test_a_product_with_sparse_features_pays_for_the_transposed_weight() -> None:
    machine = replace(default_profile(), correction={})
    slow = replace(machine, turned_byte_seconds=machine.turned_byte_seconds + 1e-9)
    matrix = uniform_matrix(1_000, 300, 5_000, True)
    for request in (
        Request("spmm_features", 1_000, 16, 0, matrix),
        Request("spmm_features", 300, 16, 0, matrix.transposed(), kind="transposed"),
    ):
        more = Pricer(slow).price(request).seconds - Pricer(machine).price(request).seconds
        assert more == pytest.approx(2 * 300 * 16 * 4 * 1e-9)  # the weight read and written


def test_sparse_features_are_a_matrix_of_even_columns() -> None:
    matrix = uniform_matrix(10, 1000, 50, True)
    assert matrix.transposed().rows == 1000
    assert matrix.transposed().transposed() == matrix
    assert matrix.locality.miss_rate(0) == 1.0
    assert matrix.locality.miss_rate(10**6) == 0.0


def test_a_pricer_on_another_machine_keeps_its_threads_and_element_size() -> None:
    machine, request = replace(default_profile(), call_seconds=1.0), Request("gemm", 1000, 64, 64)
    moved = Pricer(default_profile(), 8, 1).on(machine)
    assert moved.price(request).seconds == Pricer(machine, 8, 1).price(request).seconds
