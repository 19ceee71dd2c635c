"""The pace of sparse products: one probe for the process, times taken again while patience lasts."""

from __future__ import annotations

import torch

from plait.bench import pace as module
from plait.bench.pace import at_pace, pace, patient


def test_the_process_has_one_pace() -> None:
    assert patient(3.0) is pace()
    assert pace().patience_seconds == 3.0


def test_a_first_caller_under_inference_mode_leaves_a_pace_for_all() -> None:
    pace.cache_clear()
    with torch.inference_mode():
        made = pace()
    assert made.is_kept() in (True, False)


def test_what_was_measured_behind_the_pace_is_measured_again(monkeypatch) -> None:
    class Slowed:
        checks = iter([False, True])

        def is_kept(self) -> bool:
            return next(self.checks)

        def wait(self, lost_seconds: float) -> bool:
            return lost_seconds >= 0.0

    slowed, results = Slowed(), iter(["slow", "fast"])
    monkeypatch.setattr(module, "pace", lambda: slowed)
    assert at_pace(lambda: next(results)) == "fast"
