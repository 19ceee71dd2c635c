"""Several machines with torch.distributed: parts of a graph, exchange of feature rows, mini-batches.

Names are loaded when first used: partitioning needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.distributed.checkpoint import Checkpoints as Checkpoints
    from plait.distributed.checkpoint import Position as Position
    from plait.distributed.divide import partition as partition
    from plait.distributed.exchange import Exchange as Exchange
    from plait.distributed.neighbor import NeighborLoader as NeighborLoader
    from plait.distributed.parts import Parts as Parts
    from plait.distributed.session import Session as Session
    from plait.distributed.session import init as init
    from plait.distributed.shard import Sharded as Sharded

_HOME = {
    "Checkpoints": "plait.distributed.checkpoint",
    "Exchange": "plait.distributed.exchange",
    "NeighborLoader": "plait.distributed.neighbor",
    "Parts": "plait.distributed.parts",
    "Position": "plait.distributed.checkpoint",
    "Session": "plait.distributed.session",
    "Sharded": "plait.distributed.shard",
    "init": "plait.distributed.session",
    "partition": "plait.distributed.divide",
}

__all__ = [
    "Checkpoints",
    "Exchange",
    "NeighborLoader",
    "Parts",
    "Position",
    "Session",
    "Sharded",
    "init",
    "partition",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"plait.distributed has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
