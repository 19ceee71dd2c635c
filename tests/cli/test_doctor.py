"""cli/doctor: it says what is there, what is missing and how to get it, and fails when plait does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.cli import doctor
from plait.cli.main import main
from plait.cost.machine import default_profile, profile_path


def test_a_healthy_machine_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        "torch",
        "threads",
        "thread pool",
        "machine profile",
        "extras",
        "everything plait needs is installed",
    ):
        assert part in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_a_broken_part_is_named_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise OSError("no such library")

    monkeypatch.setattr(doctor, "_pool", broken)
    assert main(["doctor"]) == 1
    assert "thread pool: fails: OSError: no such library" in capsys.readouterr().out


def test_the_line_of_a_machine_that_was_not_calibrated_has_room_for_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled = replace(default_profile(), name="AMD EPYC (AMD Zen 5), scaled from AMD EPYC (Zen 4), 2 threads")
    monkeypatch.setattr("plait.runtime.probe.machine_for", lambda folder: scaled)
    assert main(["doctor"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "machine profile" in line)
    assert "`plait calibrate`" in line


def test_a_disturbed_calibration_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = {"disturbed": "others used 76% of the processor, repeats were 31% apart"}
    replace(default_profile(), is_default=False, measured=measured).save(profile_path(tmp_path))
    monkeypatch.setattr("plait.kernels.compiled.cache_folder", lambda: tmp_path)
    assert main(["doctor"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "machine profile" in line)
    assert "others used 76%" in line
    assert "calibrate again" in line
    assert len(line) <= 120


def test_a_missing_extra_comes_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"surely_not_here": ("a test", "pip install surely-not-here")})
    assert main(["doctor"]) == 0
    assert "pip install surely-not-here" in capsys.readouterr().out
