"""runtime/machine.py: the profile in use is this machine's, until one is lent or measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.cost.machine import default_profile, profile_path
from plait.runtime.machine import forget_machine, machine_in_use, using_machine


def test_a_calibration_is_read_at_the_next_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    forget_machine()
    assert machine_in_use().is_default
    replace(default_profile(), name="bench box", is_default=False).save(profile_path(tmp_path))
    assert machine_in_use().is_default
    forget_machine()
    assert machine_in_use().name == "bench box"
    forget_machine()


def test_a_lent_profile_is_given_back() -> None:
    own, other = machine_in_use(), replace(default_profile(), name="lent")
    with using_machine(other):
        assert machine_in_use() is other
    assert machine_in_use() is own
