"""Rows of several batches in one exchange: requested together and once each, handed out by batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.distributed.exchange import Exchange, Request
from plait.features.rows import Row, place

__all__ = ["Staging"]

Array = NDArray[Any]


@dataclass
class _Group:
    """Remote rows of some batches; `ids` ascend, `left` of the batches are not made yet.

    `lends_to` is the number of the last group that was requested without rows which this one brings.
    """

    number: int
    ids: Array
    left: int
    lends_to: int
    requests: Sequence[Request] = ()
    rows: Array | None = None


class Staging:
    """The rows of an exchange; those announced with `stage` are requested ahead of their use.

    Batches are made in the order they were staged in, each ended by `done`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.num_rows = exchange.num_rows
        self.row: Row = exchange.local.row
        self.precision = exchange.local.precision
        self._groups: list[_Group] = []
        self._staged = 0
        self._last = np.full(exchange.num_rows or 0, -1, np.int32)  # the last batch that a row is staged for
        self._is_staged = np.zeros(self._last.size, bool)  # all false between two calls
        self._announced = self._made = 0  # batches
        self._lock = threading.Lock()

    def stage(self, ids: Array, batches: Sequence[Array]) -> None:
        """Requests the remote rows among these, which ascend, except those on their way; returns at once.

        They are those that the `batches`, each given by its nodes, do not find elsewhere.
        """
        far = ids[self.exchange.is_far(ids)]
        with self._lock:
            self._staged += 1
            self._is_staged[far] = True
            for nodes in batches:
                self._last[nodes[self._is_staged[nodes]]] = self._announced
                self._announced += 1
            self._is_staged[far] = False
            for group in self._groups:
                if group.left:  # none that is spent, or a row wanted by all would keep every group alive
                    is_missing = _places(group.ids, far) < 0
                    group.lends_to = group.lends_to if is_missing.all() else self._staged
                    far = far[is_missing]
            staged = _Group(self._staged, far, len(batches), self._staged)
            self._groups.append(staged)
        staged.requests = self.exchange.request(far)

    def done(self) -> None:
        """Counts a batch as made, and drops the groups that no batch to come needs."""
        with self._lock:
            current = next((group for group in self._groups if group.left), None)
            if current is None:
                return
            current.left -= 1
            self._made += 1
            made = current.number if current.left == 0 else current.number - 1
            self._groups = [group for group in self._groups if group.lends_to > made]

    def forget(self) -> None:
        """Drops what was staged."""
        with self._lock:
            self._groups.clear()
            self._last.fill(-1)
            self._announced = self._made = 0

    def held(self, ids: Array) -> Array:
        """A mask of the rows that stay here for a batch after the one being made."""
        later: Array = self._last[ids] > self._made
        return later

    def take(self, ids: Array) -> Array:
        """A fresh array whose row i is row ids[i]."""
        out = self.exchange.local.empty(np.size(ids))
        self.place(ids, np.arange(out.shape[0]), out)
        return out

    def place(self, ids: Array, at: Array, out: Array) -> None:
        """out[at] = the rows of `ids`; those available are copied before any is waited for."""
        wanted = np.asarray(ids, np.int64)
        with self._lock:
            groups = list(self._groups)
        is_far = self.exchange.is_far(wanted)
        near, left = np.flatnonzero(~is_far), np.flatnonzero(is_far)
        self.exchange.local.place(wanted[near], at[near], out)
        for group in groups:
            if left.size == 0:
                return
            found = _places(group.ids, wanted[left])
            is_here = found >= 0
            if is_here.any():
                place(self._rows(group), found[is_here], at[left[is_here]], out)
                left = left[~is_here]
        if left.size:
            place(self.exchange.fetch(wanted[left]), np.arange(left.size), at[left], out)

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
