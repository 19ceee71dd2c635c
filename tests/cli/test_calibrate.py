"""cli/calibrate: it calls plait.calibrate with a progress function and says what was stored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

import plait
from plait.cli.main import main


def test_it_shows_progress_and_names_the_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def calibrate(progress: Callable[[str, float], None], device: str) -> SimpleNamespace:
        assert device == "cpu"
        progress("dense products", 0.5)
        return SimpleNamespace(
            name="a test machine, 2 threads", disturbance="others used 40% of the processor"
        )

    monkeypatch.setattr(plait, "calibrate", calibrate, raising=False)
    assert main(["calibrate"]) == 0
    shown = capsys.readouterr()
    assert "a test machine, 2 threads" in shown.out
    assert "disturbed: others used 40% of the processor" in shown.out
    assert "calibrating: 100/100" in shown.err
