"""Machine profiles with made-up constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from plait.cost.machine import MachineProfile, Rates, default_profile


def random_machine(rng: np.random.Generator) -> MachineProfile:
    """Sane positive constants: caches faster than memory, dense rates that grow with both widths alike."""

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    base = default_profile()
    stream = between(3e9, 3e11)
    return replace(
        base,
        l2_bytes=int(between(2e5, 4e6)),
        l3_bytes=int(between(4e6, 1e8)),
        stream_bytes_per_s=stream,
        gather_l2_bytes_per_s=stream * between(2, 6),
        gather_l3_bytes_per_s=stream * between(1, 2),
        gather_memory_bytes_per_s=stream * between(0.1, 1),
        write_bytes_per_s=stream * between(0.5, 1),
        edge_seconds=between(1e-10, 5e-9),
        row_seconds=between(1e-10, 1e-8),
        tile_seconds=between(1e-10, 1e-9),
        edge_weight_seconds=between(1e-11, 2e-9),
        source_scale_seconds=between(1e-11, 2e-9),
        extremum_factor=between(1, 3),
        call_seconds=between(1e-6, 3e-5),
        gemm={"plait": _rates(between(1, 50))},
        gemm_transposed={"plait": _rates(between(1, 50))},
        torch_spmm_factor=between(1, 3),
        l3_row_seconds=2e-10,
        memory_row_seconds=5e-9,
        correction={},  # the model itself: what pruning rests on
    )


def _rates(scale: float) -> Rates:
    grid = (4, 64, 1024)
    table: Any = tuple(tuple(scale * (i * j) ** 0.1 for j in grid) for i in grid)
    return Rates(grid, grid, table)
