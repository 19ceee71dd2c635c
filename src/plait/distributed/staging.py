"""Rows of several batches in one exchange: asked for together and each once, handed out batch by batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.distributed.exchange import Exchange, Request

__all__ = ["Staging"]

Array = NDArray[Any]

# The group whose batches are being filled, and the one before: the later one was asked for without what the
# earlier one brings.
_GROUPS = 2


@dataclass
class _Group:
    """Remote rows of some batches; `ids` ascend."""

    ids: Array
    requests: Sequence[Request]
    rows: Array | None = None


class Staging:
    """The rows of an exchange, those that were announced with `stage` asked for ahead of their use."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.num_rows = exchange.num_rows
        self._groups: deque[_Group] = deque()
        self._lock = threading.Lock()

    def stage(self, ids: Array) -> None:
        """Asks for the remote rows among these, which ascend, less those staged before; returns at once."""
        far = ids[self.exchange.is_far(ids)]
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            far = far[_places(group.ids, far) < 0]
        staged = _Group(far, self.exchange.request(far))
        with self._lock:
            self._groups.append(staged)
            while len(self._groups) > _GROUPS + 1:
                self._groups.popleft()

    def forget(self) -> None:
        """Drops what was staged."""
        with self._lock:
            self._groups.clear()

    def take(self, ids: Array) -> Array:
        """A fresh array whose row i is row ids[i]."""
        wanted = np.asarray(ids, np.int64)
        with self._lock:
            groups = list(self._groups)
        left = np.flatnonzero(self.exchange.is_far(wanted))
        if not groups or left.size == 0:
            return self.exchange.take(wanted)
        out = np.empty((wanted.size, self.exchange.local.width), np.float32)
        is_left = np.ones(wanted.size, bool)
        for group in groups:
            at = _places(group.ids, wanted[left])
            found = left[at >= 0]
            if found.size:
                out[found] = self._rows(group)[at[at >= 0]]
                is_left[found] = False
                left = left[at < 0]
        rest = np.flatnonzero(is_left)
        if rest.size:
            out[rest] = self.exchange.take(wanted[rest])
        return out

    def _rows(self, group: _Group) -> Array:
        if group.rows is None:
            group.rows = self.exchange.wait(group.requests)
        return group.rows


def _places(ids: Array, wanted: Array) -> Array:
    """The place of every wanted one in `ids`, which ascend; -1 where it is not."""
    if ids.size == 0:
        return np.full(wanted.size, -1, np.int64)
    at = np.minimum(np.searchsorted(ids, wanted), ids.size - 1)
    return np.where(ids[at] == wanted, at, -1)
