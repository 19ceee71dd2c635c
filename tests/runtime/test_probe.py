"""runtime/probe.py: the built-in profile where it fits, scaled and kept where it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import plait
from plait.cost.machine import default_profile, load_profile, profile_path
from plait.runtime import probe
from plait.runtime.machine import using_machine

OWN = default_profile().measured["probe"]


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An Intel processor whose probe finds products twice as fast and gathers half as fast."""
    probes: list[int] = []

    def found() -> dict[str, float]:
        probes.append(1)
        return {**OWN, "product": 2 * OWN["product"], "gather": 0.5 * OWN["gather"]}

    monkeypatch.setattr(probe, "processor", lambda: ("Xeon", "Intel with AMX"))
    monkeypatch.setattr(probe, "probe", found)
    monkeypatch.delenv("PLAIT_PROBE", raising=False)
    return probes


def test_a_processor_of_the_profiles_family_is_not_probed(
    tmp_path: Path, intel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "processor", lambda: ("EPYC", "AMD Zen 4"))
    assert probe.machine_for(tmp_path) == default_profile()
    assert not intel


def test_another_one_is_probed_once_and_rates_are_scaled(tmp_path: Path, intel: list[int]) -> None:
    base, made = default_profile(), probe.machine_for(tmp_path)
    assert probe.machine_for(tmp_path) == load_profile(tmp_path / "scaled.json")
    assert intel == [1]
    assert made.is_default
    assert made.edge_seconds == pytest.approx(2 * base.edge_seconds)
    assert made.gather_memory_bytes_per_s == pytest.approx(base.gather_memory_bytes_per_s / 2)
    assert made.gemm["plait"].at(64, 64) == pytest.approx(2 * base.gemm["plait"].at(64, 64))
    assert made.call_seconds == pytest.approx(base.call_seconds)


def test_a_profile_scaled_on_another_processor_or_damaged_is_made_anew(
    tmp_path: Path, intel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.machine_for(tmp_path)
    monkeypatch.setattr(probe, "processor", lambda: ("Neoverse", "Arm"))
    assert "Neoverse" in probe.machine_for(tmp_path).name
    (tmp_path / "scaled.json").write_text("{")
    probe.machine_for(tmp_path)
    assert len(intel) == 3


def test_a_calibrated_profile_and_the_switch_come_first(
    tmp_path: Path, intel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(default_profile(), name="mine", is_default=False).save(profile_path(tmp_path))
    assert probe.machine_for(tmp_path).name == "mine"
    monkeypatch.setenv("PLAIT_PROBE", "0")
    assert probe.machine_for(tmp_path / "empty") == default_profile()
    assert not intel


def test_a_probe_takes_less_than_a_second_of_processor_time() -> None:
    import time

    threads, started = torch.get_num_threads(), time.process_time()
    found = probe.probe()
    assert time.process_time() - started < 1.0
    assert torch.get_num_threads() == threads
    assert set(found) == set(OWN)
    assert all(value > 0 for value in found.values())


def test_a_plan_says_in_one_line_that_its_prices_are_scaled(tmp_path: Path, intel: list[int]) -> None:
    data = Data(x=torch.rand(50, 8), edge_index=torch.randint(0, 50, (2, 300)))
    with using_machine(probe.machine_for(tmp_path)):
        model: Any = GCNConv(8, 8)
        warnings = plait.explain(model, data).warnings
    (line,) = warnings
    assert line.startswith("prices are those of AMD Zen 4, scaled to this processor (Intel with AMX)")
    assert "plait calibrate" in line
