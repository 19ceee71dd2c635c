"""Reused memory: page faults on fresh memory cost more than the sums written to it.

A buffer shares its storage with the pool; it is free again when nothing else holds that storage any more (the
user dropped the tensor, autograd dropped what it saved). Nothing has to be returned explicitly, no buffer is
handed out twice, and the pool holds little more than was alive at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Buffers"]

# Below this the allocator serves from memory it already has; glibc maps fresh pages from 128 KiB up.
_SMALLEST = 64 << 10
# A free buffer up to this many times too large is used rather than a fresh one.
_LOOSEST = 4
_TIGHT = 1.1  # the same where bytes are counted
# Held at most: this times what was alive at once (sizes of a step rarely fit each other), or the slack.
_SPARE = 1.25
# A step may need a little more and would then drop and map the same buffers every time: this is allowed when
# a size comes back that was dropped (seen: 187 MB of buffers in a step with 147 alive at once).
_MOST_SPARE = 1.5
_SLACK = 32 << 20
_ALONE = 2  # uses of a storage nobody else holds: the pool's tensor and its Python storage object
_uses: Callable[[int], int] = torch._C._storage_Use_Count


# torch's constructors of one type take half the time of torch.empty
_CONSTRUCTORS: dict[torch.dtype, Callable[[], torch.Tensor]] = {
    torch.float32: torch.FloatTensor,
    torch.float64: torch.DoubleTensor,
}


def _nothing(dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU without elements, whose memory is still to be set."""
    make = _CONSTRUCTORS.get(dtype)
    return torch.empty(0, dtype=dtype) if make is None else make()


@dataclass(slots=True)
class _Buffer:
    storage: torch.UntypedStorage
    handle: int
    bytes: int

    def is_free(self) -> bool:
        return _uses(self.handle) < _ALONE


class Buffers:
    """A pool of float buffers; one per compiled model, freed with it.

    Fresh buffers are larger than asked for by the share `headroom`: where sizes vary a little, as those of
    mini-batches do, every new largest one would otherwise stay beside all the smaller ones.
    """

    def __init__(self, headroom: float = 0.0) -> None:
        self._headroom = headroom
        self._held: list[_Buffer] = []
        self._most_alive = 0
        self._most: int | None = None  # most bytes held, where a limit was set
        self._spare = _SPARE
        self._dropped: set[int] = set()  # sizes
        # a model may be called from several threads: a buffer found free is taken before another one looks
        self._lock = threading.Lock()

    def take(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised [rows, cols] tensor, contiguous."""
        wanted = rows * cols * dtype.itemsize
        if wanted < _SMALLEST:
            return torch.empty(rows, cols, dtype=dtype)
        with self._lock:
            for buffer in self._held:  # most steps ask for the same sizes again
                if buffer.bytes == wanted and _uses(buffer.handle) < _ALONE:
                    break
            else:
                buffer = self._find(wanted)
            if buffer.storage.is_shared():
                buffer = self._find(wanted)
            # set_, not a view: users may modify an output in place, which autograd forbids on such views
            return _nothing(dtype).set_(buffer.storage, 0, (rows, cols), (cols, 1))

    def _find(self, wanted: int) -> _Buffer:
        """The tightest free buffer, or a fresh one."""
        best = self._tightest(wanted)
        while best is not None and best.storage.is_shared():
            # handed to another process, which still reads it: this pool has seen it for the last time
            self._held.remove(best)
            best = self._tightest(wanted)
        if best is None:
            size = wanted + int(self._headroom * wanted)
            if size in self._dropped:
                self._spare = _MOST_SPARE
            self._make_room(size)
            storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
            best = _Buffer(storage, storage._cdata, size)
            self._held.append(best)
        return best

    def _tightest(self, wanted: int) -> _Buffer | None:
        best: _Buffer | None = None
        most = wanted * (_LOOSEST if self._most is None else _TIGHT)
        for buffer in self._held:
            size = buffer.bytes
            if size == wanted:  # most steps ask for the same sizes again
                if buffer.is_free():
                    return buffer
            elif wanted < size <= most and (best is None or size < best.bytes) and buffer.is_free():
                best = buffer
        return best

    def _make_room(self, wanted: int) -> None:
        """Drop free buffers, the longest held first, while more is held than a step has use for."""
        alive = sum(buffer.bytes for buffer in self._held if not buffer.is_free())
        self._most_alive = max(self._most_alive, alive + wanted)
        limit = max(_SLACK, self._spare * self._most_alive) if self._most is None else self._most
        excess = self.bytes_held + wanted - limit
        for buffer in list(self._held):
            if excess <= 0:
                return
            if buffer.is_free():
                self._held.remove(buffer)
                self._dropped.add(buffer.bytes)
                excess -= buffer.bytes

    @property
    def bytes_held(self) -> int:
        return sum(buffer.bytes for buffer in self._held)

    def limit_to(self, most: int) -> None:
        """Hold at most this many bytes besides what is in use; free buffers beyond that are dropped."""
        with self._lock:
            self._most = most
            self._make_room(0)

    def trim(self) -> None:
        """Drop the buffers that are not in use."""
        with self._lock:
            self._held = [buffer for buffer in self._held if not buffer.is_free()]

    def clear(self) -> None:
        self._held.clear()
