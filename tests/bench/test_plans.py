"""bench/plans.py: candidates of layers and of whole models, the chosen one beside each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.bench.cases import LayerCase
from plait.bench.plans import CandidateTime, ModelCase, Options, Regret, model_cases, run
from plait.errors import InputError
from plait.graph import generate
from plait.measure.timer import Timing
from plait.report.plans import plans_text, regret_line


def timed(seconds: float, chosen: float) -> CandidateTime:
    return CandidateTime("c", 1.0, Timing((seconds,), 0), Timing((chosen,), 0))


def test_regret_compares_times_of_one_run_and_is_never_below_one() -> None:
    case = ModelCase("g", "gcn")
    assert Regret(case, timed(2.0, 2.0), (timed(1.0, 1.5), timed(4.0, 2.0))).regret == 1.5
    assert Regret(case, timed(2.0, 2.0), (timed(3.0, 1.5),)).regret == 1.0
    assert Regret(case, timed(2.0, 2.0), ()).prediction_error == -0.5


def test_unknown_models_are_refused() -> None:
    with pytest.raises(InputError, match="--models: unknown name 'transformer'"):
        model_cases(["cora"], ["transformer"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = (rng.random((60, 40)) < 0.05).astype(np.float32)
    generate.erdos(60, 240, 1).save(tmp_path / "small.npz", x=x, y=rng.integers(0, 3, 60))
    return tmp_path


def test_a_model_on_its_own_features_is_judged_with_sparse_and_hoisted_candidates(folder: Path) -> None:
    (record,) = run([ModelCase("small", "gcn")], Options(0.01, data_dir=str(folder)), lambda record: None)
    candidates = [c["candidate"] for c in record.result["candidates"]]  # type: ignore[attr-defined]
    assert candidates[0] == "as planned"
    assert {name.partition(":")[0] for name in candidates[1:]} == {"convs.0 GCNConv", "convs.1 GCNConv"}
    assert any("sparse features" in name for name in candidates)
    assert "small gcn model training: regret" in regret_line(record)
    assert "regret over 1 cases" in plans_text([record])


@pytest.mark.parametrize("layer", ["gcn", "gat"])
def test_every_candidate_of_a_layer_is_timed(folder: Path, layer: str) -> None:
    case = LayerCase("small", layer, 8, 8, "training", 4 if layer == "gat" else 1)
    (record,) = run([case], Options(0.01, data_dir=str(folder)), lambda record: None)
    candidates = [c["candidate"] for c in record.result["candidates"]]  # type: ignore[attr-defined]
    assert len(candidates) == len(set(candidates)) > 1
    assert record.result["regret"] >= 1.0  # type: ignore[operator]
