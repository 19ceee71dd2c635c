"""bench/correct.py: a correction is learned where it holds on graphs it was not fitted to, and only there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plait.bench import correct
from plait.bench.correct import Sample, correction, samples
from plait.cost.machine import default_profile
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


def test_steps_of_training_loops_are_sampled() -> None:
    told: list[float] = []
    found = samples([generate.erdos(40, 100, 1)], told.append)
    assert told[-1] == 1.0
    assert {"chain_gather", "gemm"} <= {sample.kind for sample in found}
    assert all(sample.seen > 0 and sample.modelled > 0 for sample in found)


def test_products_with_sparse_features_are_sampled_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct, "_FEATURES", ((200, 300, 0.02),))
    told: list[float] = []
    found = correct.samples_of_features(told.append)
    assert told == [1.0]
    assert {sample.kind for sample in found} == {"spmm_features", "spmm_features transposed"}
    assert all(sample.seen > 0 and sample.modelled > 0 for sample in found)
