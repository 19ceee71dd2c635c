"""What the tests of caches share: rows, and batches of which some rows are hot."""

from __future__ import annotations

from typing import Any

import numpy as np

RNG = np.random.default_rng(1)
NUM_ROWS = 50
ONLINE = ["random", "degree", "massivegnn", "lru", "lfu", "clock", "sieve", "s3fifo", "lookahead"]


def trace(batches: int = 40) -> list[Any]:
    """Batches of distinct rows, some hot."""
    heat = RNG.zipf(1.4, NUM_ROWS).astype(float)
    return [
        RNG.choice(NUM_ROWS, RNG.integers(1, 15), replace=False, p=heat / heat.sum()) for _ in range(batches)
    ]


def table(dtype: Any = np.float32, width: int = 3) -> Any:
    return (RNG.random((NUM_ROWS, width)) * 99).astype(dtype)
