"""bench/loops: every loop changes something, agrees with PyG before it is timed, and is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.bench import loops
from plait.bench.loops import LOOPS, LoopCase, Options, cases, measure, run
from plait.errors import InputError
from plait.measure import read
from plait.report.loops import loop_line, loops_text

GRAPH = "erdos:n=40,edges=120"
SMALL: Any = {"width": 6, "hidden": 4, "classes": 3, "repeats": 1, "environment": {}}
EDGES = torch.randint(0, 40, (2, 120), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_agrees_with_pyg(name: str) -> None:
    before = torch.get_num_threads()
    result: Any = measure(LoopCase(name, GRAPH, 1), EDGES, 40, Options(**SMALL))
    assert result["peers"]["plait"]["status"] == "timed", result["peers"]["plait"]
    assert result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert torch.get_num_threads() == before


def test_there_are_at_least_twenty() -> None:
    assert len(LOOPS) >= 20


def test_a_loop_with_other_results_is_wrong_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(model: Any, data: Any) -> Any:
        for parameter in model.parameters():
            parameter.data += 1
        return model

    monkeypatch.setattr(loops.plait, "compile", shifted)
    result: Any = measure(LoopCase("new x", GRAPH, 1), EDGES, 40, Options(**SMALL))
    assert result["peers"]["plait"]["status"] == "wrong"
    assert "median_seconds" not in result["peers"]["plait"]
    assert "ratio" not in result


def test_a_run_is_recorded_resumed_and_shown(tmp_path: Path) -> None:
    grid = cases(["new x", "growing graph"], GRAPH, [1])
    options = Options(**SMALL, output=tmp_path / "run.jsonl")
    records = run(grid[:1], options, lambda record: None)
    assert records == read(tmp_path / "run.jsonl")
    resumed = Options(**SMALL, output=options.output, resume=True)
    assert loops.left(grid, resumed) == grid[1:]
    records = run(grid, resumed, lambda record: None)
    text = loops_text(records)
    assert "growing graph" in text
    assert "geometric mean" in text
    assert "worst: " in text
    assert "new x, threads 1" in loop_line(records[0])
    assert loops_text([]) == "no loops measured"


def test_bad_names_and_threads_are_refused() -> None:
    with pytest.raises(InputError, match="--loops: unknown name 'old x'"):
        cases(["old x"], GRAPH, [1])
    with pytest.raises(InputError, match="--threads"):
        cases(None, GRAPH, [0])
