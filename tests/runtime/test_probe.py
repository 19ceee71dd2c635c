"""runtime/probe.py: the built-in profile where it fits, scaled and kept where it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import plait
from plait.cost.machine import default_profile, load_profile, profile_path
from plait.cost.price import Pricer
from plait.ops.work import Request
from plait.runtime import probe
from plait.runtime.machine import using_machine

BUILT_IN = default_profile()
TABLE = BUILT_IN.gemm["plait"]
# what the probe would find on the machine of the profile
OWN = {
    **BUILT_IN.measured["probe"],
    **{f"dense {w}": TABLE.at(64, w) * 1e9 / BUILT_IN.threads for w in (8, 16, 32, 64)},
    **{name: getattr(BUILT_IN, name) for name in probe.OUTSIDE},
}


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An Intel processor whose probe finds products twice as fast and gathers half as fast."""
    probes: list[int] = []

    def found() -> dict[str, float]:
        probes.append(1)
        faster = {name: 2 * OWN[name] for name in OWN if name == "product" or name.startswith("dense")}
        return {**OWN, **faster, "gather": 0.5 * OWN["gather"]}

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


def test_the_profiles_own_machine_is_not_scaled() -> None:
    made = probe.scaled(BUILT_IN, OWN, "EPYC", "AMD Zen 4")
    assert all(ratio == pytest.approx(1.0) for ratio in made.measured["ratios"].values())
    for request in (Request("gemm", 10_000, 64, 32), Request("gemm_transposed", 64, 8, 10_000)):
        assert Pricer(made).price(request).seconds == pytest.approx(Pricer(BUILT_IN).price(request).seconds)


def test_products_are_scaled_by_width_and_backend() -> None:
    made = probe.scaled(BUILT_IN, {**OWN, "dense 64": 3 * OWN["dense 64"]}, "Zen", "AMD Zen 5")
    for name, is_transposed in (("gemm", False), ("gemm_transposed", True)):
        was, now = getattr(BUILT_IN, name), getattr(made, name)
        assert now["torch"] == was["torch"]
        ratio = {
            shape: now["plait"].at(*shape) / was["plait"].at(*shape)
            for shape in ((64, 8), (8, 64), (64, 64), (256, 256))
        }
        assert ratio[64, 64] == pytest.approx(3.0)
        assert ratio[256, 256] == pytest.approx(3.0)
        assert ratio[64, 8] == pytest.approx(1.0)
        assert ratio[8, 64] == pytest.approx(1.0 if is_transposed else 3.0)


def test_what_torch_takes_outside_layers_is_measured_outright(tmp_path: Path, intel: list[int]) -> None:
    found = probe.outside()
    assert set(found) == set(probe.OUTSIDE)
    assert all(0 < found[name] < 50 * OWN[name] for name in found)
    made = probe.scaled(BUILT_IN, {**OWN, **found}, "Zen", "AMD Zen 5")
    assert {name: getattr(made, name) for name in found} == found
    made.save(tmp_path / "scaled.json")
    assert load_profile(tmp_path / "scaled.json").loss_row_seconds == found["loss_row_seconds"]


def test_a_profile_scaled_by_fewer_ratios_is_made_anew(tmp_path: Path, intel: list[int]) -> None:
    made = probe.machine_for(tmp_path)
    few = {name: made.measured["ratios"][name] for name in ("copy", "gather", "product", "call")}
    replace(made, measured={**made.measured, "ratios": few}).save(tmp_path / "scaled.json")
    assert probe.machine_for(tmp_path).measured["ratios"].keys() > few.keys()
    assert len(intel) == 2


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

    probe.probe()  # kernels are compiled
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
    assert line.startswith("times are predicted for AMD Zen 4, scaled to this processor (Intel with AMX)")
    assert "plait calibrate" in line


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu"), lambda: torch.device("meta")],
)
def test_the_first_plan_may_be_made_in_any_mode_of_the_caller(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_TURN_SECONDS", 0.0)
    found: list[torch.Tensor] = []
    monkeypatch.setattr(probe.dense, "gemm", lambda left, weight, out: found.append(left))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mode():
            measured = probe.probe()
    finally:
        torch.set_default_dtype(before)
    assert set(measured) >= set(probe.OUTSIDE)
    assert {(left.dtype, left.device.type) for left in found} == {(torch.float32, "cpu")}
