"""Whether the machine runs at its usual pace, or an unseen neighbour shares its cores.

A virtual machine's neighbours come and go by the second: the same sparse product took 0.6 and 1.1 ms
seconds apart, for ten seconds at a time, while copies and dense products took what they always take, and
nothing in the system's own figures showed it. A probe of the same kind does (its time and that of a training
step correlate by 0.82 to 0.95), so times taken meanwhile can be taken again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pace"]

_SLACK = 1.5  # times its shortest that a probe may take; neighbours make it 2.3
_NAP_SECONDS = 0.05
_FIRST_PROBES = 10


class Pace:
    """A probe of known work, relative to the shortest time it ever took."""

    def __init__(self, probe: Callable[[], float], patience_seconds: float = 0.0):
        """`probe` returns the seconds of some fixed work; `patience_seconds` is what waiting may use up."""
        self._probe = probe
        self._shortest = min(probe() for _ in range(_FIRST_PROBES))
        self.patience_seconds = patience_seconds

    def is_kept(self) -> bool:
        """Whether the probe now takes about as long as it ever did."""
        seconds = min(self._probe(), self._probe())  # one of them may have been interrupted
        self._shortest = min(self._shortest, seconds)
        return seconds <= _SLACK * self._shortest

    def wait(self, lost_seconds: float = 0.0) -> bool:
        """Wait until the pace is kept again or no patience is left; whether it was worth waiting.

        `lost_seconds` were spent on what has to be done again; they count as waiting. False: no patience
        was left, go on with what there is.
        """
        self.patience_seconds -= lost_seconds
        if self.patience_seconds <= 0.0:
            return False
        while self.patience_seconds > 0.0:
            start = time.perf_counter()
            if self.is_kept():
                break
            time.sleep(_NAP_SECONDS)
            self.patience_seconds -= time.perf_counter() - start
        return True
