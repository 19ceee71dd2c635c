"""The long run of the fuzzer: failing draws are kept with their scripts, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

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


def test_processes_have_seeds_of_their_own_and_every_other_is_never_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: dict[int, tuple[int, str | None]] = {}

    def start(command: list[str], env: dict[str, str], check: bool) -> CompletedProcess[bytes]:
        given = dict(zip(command[5::2], command[6::2], strict=True))
        seed, out = int(given["--seed"]), Path(given["--out"])
        started[seed] = int(given["--sequences"]), env.get("PLAIT_ASIDE")
        if seed == 8:
            out.with_suffix(".running").write_text("a script")
            return CompletedProcess(command, -11)
        out.write_text(json.dumps([{"number": 3, "what": "off by 1\nmore"}] if seed == 7 else []))
        return CompletedProcess(command, int(seed == 7))

    monkeypatch.delenv("PLAIT_ASIDE", raising=False)
    monkeypatch.setattr(many.subprocess, "run", start)
    monkeypatch.setattr(many, "LARGEST_SHARE", 4)
    assert many.main(["--sequences", "10", "--seed", "7", "--processes", "2", "--out", str(tmp_path)]) == 1
    assert started == {7: (4, None), 8: (4, "0"), 9: (2, None)}
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("seed 7, draw 3: off by 1 (")
    assert said[1].startswith("seed 8: ended with -11 while it ran the script in ")
    assert said[2] == "10 sequences asked for, 2 failures"
