"""A run with every kind of record, written as the commands write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from plait.report.page import Report, read_runs, report_of
from tests.report.page import made


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A file of records for each command, and a plan."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    kinds = {"ops": made.ops, "layers": made.layers, "models": made.models, "plans": made.plans}
    kinds |= {"predicted": made.predicted, "loops": made.loops}
    for name, records in kinds.items():
        made.write(folder / f"{name}.jsonl", records(rng))
    (folder / "gcn.json").write_text(json.dumps(made.plan()))
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def report(runs: list[Path]) -> Report:
    """The report of them all."""
    return report_of(read_runs(runs))
