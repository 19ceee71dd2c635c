"""bench/correct.py: a correction is learned where it holds on graphs it was not fitted to, and only there."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from plait.bench.correct import Sample, Seen, correction, fit_sparse, priced, seen_steps
from plait.cost.machine import default_profile
from plait.cost.price import Pricer, Request
from plait.cost.work import Matrix
from plait.graph import generate


def drawn(slope: float, noise: float, count: int = 60) -> list[Sample]:
    rng = np.random.default_rng(0)
    found = []
    for k in range(count):
        features = (1.0, float(rng.uniform(-4, 4)), float(rng.uniform(-2, 2)))
        gap = 0.3 + slope * features[1] + noise * float(rng.standard_normal())
        found.append(Sample("gemm", features, 1e-3, 1e-3 * math.exp(gap), k % 5))
    return found


def test_a_line_is_found_again() -> None:
    line = correction(drawn(0.1, 0.001))["gemm"]
    assert line[0] == pytest.approx(0.3, abs=0.02)
    assert line[1] == pytest.approx(0.1, abs=0.01)


def test_noise_teaches_nothing() -> None:
    rng = np.random.default_rng(1)
    noisy = [
        Sample(
            "spmm:edge", (1.0, float(rng.standard_normal()), 0.0), 1.0, math.exp(2.0 * (-1) ** graph), graph
        )
        for graph in range(6)
        for _ in range(4)
    ]
    assert correction(noisy) == {}


def test_few_samples_are_left_alone() -> None:
    assert correction(drawn(0.1, 0.0, count=5)) == {}


def test_a_kind_without_a_correction_keeps_the_model() -> None:
    assert default_profile().correction_of("unheard of", (1.0, 0.0, 0.0)) == 1.0


def test_steps_of_training_loops_are_seen_and_priced() -> None:
    told: list[float] = []
    seen = seen_steps([generate.erdos(40, 100, 1)], told.append)
    assert told[-1] == 1.0
    found = priced(seen, default_profile())
    assert {"chain_gather", "gemm", "spmm"} <= {sample.kind for sample in found}
    assert all(sample.seen > 0 and sample.modelled > 0 for sample in found)
    assert any(step.backend == "view" for step in seen)


def test_the_constants_of_a_machine_are_found_again_in_its_steps() -> None:
    truth = replace(
        default_profile(), correction={}, edge_seconds=5e-10, row_seconds=2e-9, uneven_row_seconds=3e-8,
        l2_line_seconds=8e-10, l3_row_seconds=6e-9, write_line_seconds=2e-9, gather_l2_bytes_per_s=2e11,
        gather_l3_bytes_per_s=1e11, write_bytes_per_s=1e11,
    )  # fmt: skip
    pricer, seen = Pricer(truth), []
    graphs = (generate.erdos(900, 9_000, 1), generate.rmat(10, 20_000, 2), generate.grid(60, 60),
              generate.cliques(50, 40), generate.erdos(30_000, 90_000, 3))  # fmt: skip
    for number, graph in enumerate(graphs):
        stats = graph.stats
        matrix = Matrix(graph.num_nodes, graph.num_nodes, graph.num_edges, False, stats, stats)
        for cols in (16, 40, 64, 160):
            request = Request("spmm", graph.num_nodes, cols, 0, matrix)
            seconds = pricer.sparse_seconds(request, matrix, cols)
            seen.append(Seen(request, "plait", 0, seconds, number))
    fitted = Pricer(fit_sparse(15 * seen, replace(truth, edge_seconds=1e-12, uneven_row_seconds=1e-12)))
    for step in seen:
        assert isinstance(step.request, Request)
        assert step.request.matrix is not None
        again = fitted.sparse_seconds(step.request, step.request.matrix, step.request.cols)
        assert again == pytest.approx(step.seconds, rel=0.25)
