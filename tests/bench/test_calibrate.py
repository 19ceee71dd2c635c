"""bench/calibrate: a profile says in what circumstances it was taken."""

from __future__ import annotations

from plait.bench.calibrate import _described
from plait.cost.machine import default_profile


def test_a_profile_taken_while_others_were_busy_says_so() -> None:
    quiet = _described(default_profile(), {}, 0.02)
    busy = _described(default_profile(), {}, 0.4)
    assert quiet.disturbance is None
    assert "disturbed" not in quiet.name
    assert busy.disturbance == "other programs used 40% of the processor"
    assert "calibrate` again" in busy.name
    assert _described(default_profile(), {}, None).disturbance is None
