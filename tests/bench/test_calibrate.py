"""bench/calibrate.py: what others disturb is measured again, and a profile that stays disturbed says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.bench import calibrate as room
from plait.bench.calibrate import _apart, _described, _Watch, _with_rates
from plait.cost.machine import MachineProfile, default_profile


class _Busy:
    """Stands for BusyElsewhere: the shares to come, one an attempt."""

    shares: list[float]

    def __enter__(self) -> _Busy:
        self.share = self.shares.pop(0)
        return self

    def __exit__(self, *exception: object) -> None: ...


def watched(monkeypatch: pytest.MonkeyPatch, *shares: float) -> _Watch:
    busy = type("Busy", (_Busy,), {"shares": list(shares)})
    monkeypatch.setattr(room, "BusyElsewhere", busy)
    return _Watch()


def visit(factor: float = 1.0) -> dict[tuple[bool, bool, str], Any]:
    return {
        (transposed, cached, name): np.full((5, 4), 1e-11 * factor)
        for transposed in (False, True)
        for cached in (False, True)
        for name in ("plait", "torch")
    }


def described(watch: _Watch, apart: float) -> MachineProfile:
    return _described(default_profile(), {}, watch, apart)


def test_a_quiet_part_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watched(monkeypatch, 0.02)
    assert watch.part("layers", lambda: "only") == "only"
    assert (watch.told(), watch.repeated) == ([], set())
    assert described(watch, 0.03).disturbance is None


def test_a_disturbed_part_is_measured_again_and_the_quieter_time_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for shares, kept in (((0.5, 0.01), "second"), ((0.3, 0.6), "first")):
        watch, attempts = watched(monkeypatch, *shares), iter(("first", "second"))
        assert watch.part("layers", lambda attempts=attempts: next(attempts)) == kept  # type: ignore[misc]
        assert watch.repeated == {"layers"}
        assert watch.shares["layers"] == min(shares)


def test_a_profile_that_stays_disturbed_says_so_in_its_name_and_its_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = watched(monkeypatch, 0.6, 0.4)
    watch.part("layers", lambda: None)
    profile = described(watch, 0.3)
    assert profile.disturbance == "others used 40% of the processor, repeats were 30% apart"
    assert "calibration disturbed" in profile.name
    again = MachineProfile.from_dict(profile.to_dict(), "a test")
    assert again.disturbance == profile.disturbance


def test_repeats_far_apart_are_a_disturbance_where_the_system_does_not_say_who_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _apart(visit(), visit(1.65)) == pytest.approx(0.65)
    assert "65% apart" in (described(watched(monkeypatch), 0.65).disturbance or "")


def test_the_best_visit_to_a_product_is_its_rate() -> None:
    profile = _with_rates(default_profile(), [visit(1.65), visit(1.0)])
    assert profile.gemm["plait"].at(64, 64) == pytest.approx(100.0)
    assert profile.gemm_cached["torch"].at(64, 64) == pytest.approx(100.0)
