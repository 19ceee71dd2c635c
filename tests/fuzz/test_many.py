"""The long run of the fuzzer: failing draws are kept with their scripts, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz import many
from tests.fuzz.replay import Difference, Tally


def test_every_failing_draw_is_kept_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def fail_sometimes(script: str, tally: Tally) -> None:
        seen.append(script)
        assert (tmp_path / "found.running").read_text() == script
        if len(seen) % 3 == 0:
            raise Difference(f"number {len(seen)}")

    monkeypatch.setattr(many, "replay", fail_sometimes)
    out = tmp_path / "found.json"
    assert many.main(["--sequences", "10", "--seed", "5", "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert len(seen) == 10
    assert [draw["script"] for draw in found] == seen[2::3]
    assert [draw["number"] for draw in found] == [3, 6, 9]
    assert all(draw["seed"] == 5 for draw in found)
    assert not (tmp_path / "found.running").exists()


def test_a_run_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "replay", lambda script, tally: None)
    count, failures, _ = many.run(10**6, 1, tmp_path / "found.json", seconds=0.5)
    assert 0 < count < 10**6
    assert not failures
