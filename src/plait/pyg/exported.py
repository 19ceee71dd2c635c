"""A planned layer under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.pyg.active import Seats

__all__ = ["call"]


def call(seats: Seats, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer's answer in a traced call that came in through a compiled model."""
    return original(module, *args, **kwargs)
