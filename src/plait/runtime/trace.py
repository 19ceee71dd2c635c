"""Whether a PyTorch profiler runs: steps are then ranges with their names, otherwise they cost nothing."""

from __future__ import annotations

import torch

__all__ = ["is_profiling"]

# whether a PyTorch profiler is running in this thread: 50 ns, so it is asked at every step
is_profiling = torch._C._autograd._profiler_enabled
