"""kernels/partial against the reference: schedules of every kind, odd graphs, every fused option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plait.graph import Graph
from plait.graph.hag import (
    Schedule,
    difference_rows,
    difference_schedule,
    search,
    tile_schedule,
)
from plait.kernels import partial
from plait.kernels.partial import Sums, partial_sums
from plait.kernels.spmm import Pattern, extremum, reference
from tests.graph.hag.graphs import ODD_GRAPHS, random_graph

WIDTHS = [1, 7, 16, 33, 64, 100, 130, 271]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def schedules(graph: Graph) -> dict[str, Schedule]:
    """Slots only, slots and shared rows, shared rows only, subtractions."""
    hag = search(graph, min_count=2)
    rows = difference_rows(graph, least_saving=0)
    return {
        "one tile": tile_schedule(hag),
        "tiles of two": tile_schedule(hag, 2),
        "levels": tile_schedule(hag, 1),
        "differences": difference_schedule(rows, 3),
    }


def schedules_in(dtype: torch.dtype, graph: Graph) -> list[Schedule]:
    """All of them; in float64, whose kernels differ by that alone, one that shares, one that subtracts."""
    made = schedules(graph)
    return list(made.values()) if dtype == torch.float32 else [made["levels"], made["differences"]]


def dense(rng: np.random.Generator, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((rows, width))).to(dtype)


def options_of(
    graph: Graph, width: int, dtype: torch.dtype, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    return {
        "source": dense(rng, graph.num_sources, 1, dtype)[:, 0].contiguous(),
        "target": dense(rng, graph.num_nodes, 1, dtype)[:, 0].contiguous(),
        "addend": dense(rng, graph.num_nodes, width, dtype),
        "addend_scale": dense(rng, graph.num_nodes, 1, dtype)[:, 0].contiguous(),
        "bias": dense(rng, width, 1, dtype)[:, 0].contiguous(),
    }


def assert_equals_reference(
    graph: Graph, schedule: Schedule, x: torch.Tensor, options: dict[str, Any]
) -> None:
    out = torch.full((graph.num_nodes, x.shape[1]), float("nan"), dtype=x.dtype)
    partial_sums(Sums(schedule), x, out, **options)
    arrays = {name: value.double().numpy() for name, value in options.items()}
    expected = reference.spmm(graph.indptr, graph.indices, x.double().numpy(), **arrays)
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(out.numpy(), expected, atol=TOLERANCE[x.dtype] * scale, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    graph, rng = ODD_GRAPHS[name], np.random.default_rng(0)
    for schedule in schedules_in(dtype, graph):
        for width in (1, 20):
            x = dense(rng, graph.num_sources, width, dtype)
            assert_equals_reference(graph, schedule, x, {})
            assert_equals_reference(graph, schedule, x, options_of(graph, width, dtype, rng))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_option_at_every_width_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(width)
    graph = random_graph(rng, repeats=True)
    options = options_of(graph, width, dtype, rng)
    x = dense(rng, graph.num_sources, width, dtype)
    chosen = (
        [],
        ["source"],
        ["target", "bias"],
        ["addend"],
        ["source", "addend", "addend_scale"],
        list(options),
    )
    for schedule in schedules_in(dtype, graph):
        for names in chosen:
            assert_equals_reference(graph, schedule, x, {name: options[name] for name in names})


def test_strided_inputs_and_outputs_and_an_addend_in_place() -> None:
    rng = np.random.default_rng(3)
    graph = random_graph(rng)
    wide = dense(rng, graph.num_sources, 90, torch.float32)
    out = dense(rng, graph.num_nodes, 70, torch.float32)
    before = out.clone()
    x = wide[:, 5:55]
    for schedule in schedules(graph).values():
        out.copy_(before)
        partial_sums(Sums(schedule), x, out[:, 10:60], addend=out[:, 10:60])
        expected = reference.spmm(graph.indptr, graph.indices, x.numpy(), addend=before[:, 10:60].numpy())
        np.testing.assert_allclose(out[:, 10:60].numpy(), expected, atol=2e-4)
        assert torch.equal(out[:, :10], before[:, :10])
        assert torch.equal(out[:, 60:], before[:, 60:])


def cliques(count: int, size: int) -> Graph:
    """Disjoint cliques without loops."""
    u, v = np.nonzero(1 - np.eye(size, dtype=int))
    first = size * np.arange(count)[:, None]
    return Graph.from_edge_index((first + u).ravel(), (first + v).ravel(), count * size)


def test_bits_do_not_depend_on_threads_nor_on_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = cliques(60, 20)
    x = dense(np.random.default_rng(0), graph.num_sources, 80, torch.float32)
    monkeypatch.setattr(partial, "_SERIAL_BELOW", 0)
    threads = torch.get_num_threads()
    for schedule in (tile_schedule(search(graph), 40), tile_schedule(search(graph), 1)):
        results = []
        for count, streamed_from in ((1, 1 << 40), (2, 1 << 40), (3, 0), (2, 0)):
            monkeypatch.setattr(partial, "_STREAMED_FROM", streamed_from)
            torch.set_num_threads(count)
            out = torch.full((graph.num_nodes, 80), float("nan"))
            results.append(partial_sums(Sums(schedule), x, out))
        torch.set_num_threads(threads)
        assert all(torch.equal(results[0], other) for other in results[1:])
        expected = reference.spmm(graph.indptr, graph.indices, x.numpy())
        np.testing.assert_allclose(results[0].numpy(), expected, atol=1e-4)


def test_infinities_and_nans_reach_the_neighbours_and_nobody_else() -> None:
    graph = cliques(3, 5)
    x = torch.ones(15, 3)
    x[2, 1], x[7, 0] = float("inf"), float("nan")
    out = partial_sums(Sums(tile_schedule(search(graph, min_count=2))), x, torch.empty(15, 3))
    expected = reference.spmm(graph.indptr, graph.indices, x.numpy())
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_extrema_by_overlapping_covers_are_those_of_csr_bit_by_bit(name: str, reduce: str) -> None:
    graph = ODD_GRAPHS[name]
    hag = search(graph, min_count=2, order="idempotent")
    for width in (1, 17, 64, 130):
        x = dense(np.random.default_rng(3), graph.num_sources, width, torch.float32).round(decimals=1)
        if x.numel():
            x[0, 0] = float("nan")
        expected = torch.from_numpy(reference.extremum(graph.indptr, graph.indices, x.numpy(), reduce))
        for schedule in (tile_schedule(hag), tile_schedule(hag, 2), tile_schedule(hag, 1)):
            out = torch.full((graph.num_nodes, width), 7.0)
            partial_sums(Sums(schedule), x, out, reduce=reduce)
            torch.testing.assert_close(out, expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_ties_by_disjoint_covers_are_those_of_csr(name: str, reduce: str) -> None:
    graph = ODD_GRAPHS[name]
    hag = search(graph, min_count=2)
    pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
    for width in (1, 17, 64, 300):
        x = dense(np.random.default_rng(3), graph.num_sources, width, torch.float32).round()
        expected, counts = torch.empty(graph.num_nodes, width), torch.empty(graph.num_nodes, width)
        extremum(pattern, x, expected, counts, reduce)
        for schedule in (tile_schedule(hag), tile_schedule(hag, 2), tile_schedule(hag, 1)):
            out, ties = torch.full_like(expected, 7.0), torch.full_like(expected, 7.0)
            partial_sums(Sums(schedule), x, out, reduce=reduce, ties=ties)
            assert torch.equal(out, expected)
            assert torch.equal(ties, counts)
