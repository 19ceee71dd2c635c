"""Sets the number of threads a command runs with."""

from __future__ import annotations

from plait.errors import InputError

__all__ = ["use_threads"]


def use_threads(count: int | None) -> None:
    """torch, and with it plait's kernels, use this many threads; None leaves them as they are."""
    if count is None:
        return
    if count < 1:
        raise InputError(f"--num-threads: {count} is not a number of threads; give 1 or more")
    import torch

    torch.set_num_threads(count)
