"""Mini-batches: neighbour sampling on CSR, and what turns samples into batches.

Names are loaded when first used, so that the sampler can be had without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Sample", "Sampler"]

_HOME = {"Sample": "plait.loader.sampler", "Sampler": "plait.loader.sampler"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"plait.loader has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
