"""CSR products on a GPU: a row is a step of a schedule without partial sums, long ones cut in even pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

from plait.kernels.partial.gpu import OnDevice, sum_rounds
from plait.kernels.partial.rounds import rounds

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["spmm"]

_placed: WeakKeyDictionary[Pattern, dict[torch.device, OnDevice]] = WeakKeyDictionary()


def spmm(
    pattern: Pattern, x: torch.Tensor, out: torch.Tensor, **options: torch.Tensor | str | None
) -> torch.Tensor:
    """What kernels/spmm: spmm computes, on x's device; the pattern is copied there once."""
    devices = _placed.setdefault(pattern, {})
    if x.device not in devices:
        start, operands = pattern.indptr.astype(np.int64), pattern.indices.astype(np.int32)
        node = np.arange(pattern.num_rows, dtype=np.int32)
        nowhere = np.full(pattern.num_rows, -1, np.int32)
        made = rounds(start, operands, node, nowhere, pattern.num_columns, pattern.num_columns)
        devices[x.device] = OnDevice(made, x.device)
    return sum_rounds(devices[x.device], x, out, **options)  # type: ignore[arg-type]
