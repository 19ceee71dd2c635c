"""measure/environment: what it says, and what it must not say."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.measure.environment import BusyElsewhere, available_bytes, environment, version_of


def test_it_names_versions_processor_and_memory() -> None:
    facts = environment()
    for name in ("plait", "python", "torch", "torch_geometric", "numpy", "numba", "os", "cpu", "cores"):
        assert facts[name], name
    json.dumps(facts)


def test_it_gives_away_neither_host_nor_paths() -> None:
    text = json.dumps(environment())
    node = platform.node()
    assert not node or len(node) < 4 or node not in text
    assert str(Path.home()) not in text
    assert os.getcwd() not in text


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert version_of("surely_not_a_package") is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may not tell")
def test_available_memory_is_a_positive_number_on_linux() -> None:
    free = available_bytes()
    assert free is not None
    assert free > 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may not tell")
def test_the_share_of_others_is_between_none_and_all() -> None:
    with BusyElsewhere() as busy:
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            pass
    assert busy.share is not None
    assert 0.0 <= busy.share <= 1.0


def test_measure_and_the_command_line_start_without_torch() -> None:
    code = "import sys, plait.measure, plait.report, plait.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
