"""Rows of several batches in one exchange: asked for together and each once, handed out batch by batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.distributed.exchange import Exchange, Request, place

__all__ = ["Staging"]

Array = NDArray[Any]


@dataclass
class _Group:
    """Remote rows of some batches; `ids` ascend, `left` of the batches are not made yet.

    `lends_to` is the number of the last group that was asked for without rows which this one brings.
    """

    number: int
    ids: Array
    left: int
    lends_to: int
    requests: Sequence[Request] = ()
    rows: Array | None = None


class Staging:
    """The rows of an exchange, those that were announced with `stage` asked for ahead of their use.

    Batches are made in the order they were staged in, each ended by `done`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.num_rows = exchange.num_rows
        self._groups: list[_Group] = []
        self._staged = 0
        self._lock = threading.Lock()

    def stage(self, ids: Array, batches: int) -> None:
        """Asks for the remote rows among these, which ascend, less those on their way; returns at once."""
        far = ids[self.exchange.is_far(ids)]
        with self._lock:
            self._staged += 1
            for group in self._groups:
                if group.left:  # none that is spent, or a row wanted by all would keep every group alive
                    is_missing = _places(group.ids, far) < 0
                    group.lends_to = group.lends_to if is_missing.all() else self._staged
                    far = far[is_missing]
            staged = _Group(self._staged, far, batches, self._staged)
            self._groups.append(staged)
        staged.requests = self.exchange.request(far)

    def done(self) -> None:
        """Counts a batch as made, and drops the groups that no batch to come needs."""
        with self._lock:
            current = next((group for group in self._groups if group.left), None)
            if current is None:
                return
            current.left -= 1
            made = current.number if current.left == 0 else current.number - 1
            self._groups = [group for group in self._groups if group.lends_to > made]

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
                place(self._rows(group), at[at >= 0], found, out)
                is_left[found] = False
                left = left[at < 0]
        if left.size:
            place(self.exchange.take(wanted[left]), np.arange(left.size), left, out)
            is_left[left] = False
        near = np.flatnonzero(is_left)
        self.exchange.local.place(wanted[near], near, out)
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
