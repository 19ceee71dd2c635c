"""bench/calibrate: a profile says in what circumstances it was taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.bench import calibrate
from plait.bench.calibrate import _described
from plait.cost.machine import MachineProfile, default_profile, profile_path
from plait.errors import InputError


def test_a_profile_taken_while_others_were_busy_says_so() -> None:
    quiet = _described(default_profile(), {}, 0.02)
    busy = _described(default_profile(), {}, 0.4)
    assert quiet.disturbance is None
    assert "disturbed" not in quiet.name
    assert busy.disturbance == "other programs used 40% of the processor"
    assert "calibrate` again" in busy.name
    assert _described(default_profile(), {}, None).disturbance is None


def test_a_folder_that_takes_no_profile_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(calibrate, "_measured", lambda tell: pytest.fail("measured"))
    with pytest.raises(InputError, match=r"PLAIT_CACHE: cannot write .*; name another place"):
        calibrate.calibrate()


def test_gradients_of_float32_are_measured_whatever_the_caller_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    found: list[object] = []

    def measured(tell: object) -> tuple[MachineProfile, dict[str, float]]:
        found.extend((torch.zeros(1, requires_grad=True).exp().requires_grad, torch.zeros(1).dtype))
        return default_profile(), {}

    monkeypatch.setattr(calibrate, "_measured", measured)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            calibrate.calibrate()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [True, torch.float32]
    assert {path.name for path in tmp_path.iterdir()} - {"kernels"} == {profile_path(tmp_path).name}
