"""What earlier modules left in memory is not walked through by the garbage collections of later ones."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Tests of memory collect dozens of times, 0.3 s each over torch, numba and two libraries of graphs."""
    gc.collect()
    gc.freeze()
