"""What importing the package loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

QUIET = (
    "plait, plait.plan.search, plait.analysis, plait.analysis.models, plait.report.analysis, "
    "plait.cost.machine, plait.ir, plait.graph, plait.features, plait.measure"
)


def after(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.processes
def test_planning_needs_no_torch() -> None:
    assert after(f"import {QUIET}; import sys; print('torch' in sys.modules)") == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import plait

    with pytest.raises(AttributeError, match="nonsense"):
        _ = plait.nonsense
