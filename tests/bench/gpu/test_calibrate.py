"""The profile of a GPU: where it is kept and read; on a device, that a calibration is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import plait
from plait.cost.machine import gpu_profile, gpu_profile_path, load_profile
from plait.errors import InputError
from plait.runtime import machine

NAME = "NVIDIA Test 200"


def test_a_calibrated_profile_takes_the_place_of_the_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(name=NAME, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    machine.forget_machine()
    place = torch.device("cuda", 0)
    assert machine.machine_in_use(place).is_default
    own = replace(gpu_profile(NAME, (9, 0)), is_default=False, call_seconds=0.5)
    path = gpu_profile_path(tmp_path, NAME)
    assert path.name == "machine-nvidia-test-200.json"
    own.save(path)
    assert machine.machine_in_use(place).is_default  # until it is read anew
    machine.forget_machine()
    assert machine.machine_in_use(place).call_seconds == 0.5
    machine.forget_machine()


def test_other_devices_are_refused() -> None:
    with pytest.raises(InputError, match="device: 'tpu'"):
        plait.calibrate(device="tpu")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_calibration_is_whole(tmp_path: Path) -> None:
    profile = plait.calibrate(save=False, device="cuda")
    profile.save(tmp_path / "it.json")
    assert load_profile(tmp_path / "it.json").name == torch.cuda.get_device_name()
    assert not profile.is_default
    assert profile.stream_bytes_per_s > 1e11
