"""What a cache counts: rows requested, found and fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

__all__ = ["Counters"]

Array = NDArray[Any]


@dataclass
class Counters:
    """Counters of a cache, in rows unless said otherwise.

    A row requested twice in a batch counts once. `halo_requests` and `halo_hits` count only rows inside the
    one-hop halo, as MassiveGNN does; they stay 0 when no halo was given.
    """

    requests: int = 0
    hits: int = 0
    remote_rows: int = 0
    remote_bytes: int = 0
    evictions: int = 0
    halo_requests: int = 0
    halo_hits: int = 0
    failures: int = 0
    batches: int = 0
    fetch_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Hits per row requested; 0 when none was."""
        return self.hits / self.requests if self.requests else 0.0

    def count(self, far: Array, is_near: Array, halo: Array | None) -> None:
        """A batch of the remote rows `far`, of which some were found; `halo` is a mask over all rows."""
        self.batches += 1
        self.requests += far.size
        self.hits += int(is_near.sum())
        if halo is not None:
            inside = halo[far]
            self.halo_requests += int(inside.sum())
            self.halo_hits += int(is_near[inside].sum())
