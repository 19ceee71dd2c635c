"""Sets the number of threads a command runs with."""

from __future__ import annotations

import os

from plait.errors import InputError

__all__ = ["use_threads"]

_MOST = max(1024, 4 * (os.cpu_count() or 1))  # systems refuse tens of thousands, and torch crashes then


def use_threads(count: int | None) -> None:
    """torch, and with it plait's kernels, use this many threads; None leaves them as they are."""
    if count is None:
        return
    if count < 1:
        raise InputError(f"--num-threads: {count} is not a number of threads; give 1 or more")
    if count > _MOST:
        raise InputError(
            f"--num-threads: {count} is more than {_MOST}; this machine runs {os.cpu_count()} at once"
        )
    import torch

    torch.set_num_threads(count)
