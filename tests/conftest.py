"""What earlier modules left in memory is not walked through by the garbage collections of later ones."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from plait.cost.family import processor

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is defined, by whichever test comes first
# plans in tests are those of the built-in profile, whatever the processor
os.environ.setdefault("PLAIT_PROBE", "0")
# what tests compare with PyG is plait's: a clock decides otherwise only where a test asks for it
os.environ.setdefault("PLAIT_ASIDE", "0")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What held on one processor has failed on another: a log says which it was."""
    name, family = processor()
    terminalreporter.write_line(
        f"processor: {name} ({family}), {os.cpu_count()} cores, torch {torch.__version__}"
    )


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Tests of memory collect dozens of times, 0.3 s each over torch, numba and two libraries of graphs."""
    gc.collect()
    gc.freeze()
