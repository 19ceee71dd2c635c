"""Memory that is used again: the kernel's page faults on fresh memory cost more than the sums written to it.

A buffer handed out shares its storage with the pool; it is free again when nobody else holds that storage any
more (the user dropped the tensor, autograd dropped what it saved). Nothing has to be given back, nothing is
ever handed out twice, and the pool holds no more than was alive at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Buffers"]

# Below this the allocator serves from memory it already has; glibc maps fresh pages from 128 KiB up.
_SMALLEST = 64 << 10
_ALONE = 2  # uses of a storage nobody else holds: the pool's tensor and its Python storage object


@dataclass(slots=True)
class _Buffer:
    storage: torch.UntypedStorage
    handle: int
    bytes: int

    def is_free(self) -> bool:
        return bool(torch._C._storage_Use_Count(self.handle) <= _ALONE - 1)


class Buffers:
    """A pool of float buffers; one per compiled model, freed with it."""

    def __init__(self) -> None:
        self._by_bytes: dict[int, list[_Buffer]] = {}
        self._most_alive = 0

    def take(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised [rows, cols] tensor, contiguous."""
        wanted = rows * cols * dtype.itemsize
        if wanted < _SMALLEST:
            return torch.empty((rows, cols), dtype=dtype)
        for buffer in self._by_bytes.get(wanted, ()):
            if buffer.is_free():
                return self._tensor(buffer, rows, cols, dtype)
        self._make_room(wanted)
        storage = torch.empty(wanted, dtype=torch.uint8).untyped_storage()
        buffer = _Buffer(storage, storage._cdata, wanted)
        self._by_bytes.setdefault(wanted, []).append(buffer)
        return self._tensor(buffer, rows, cols, dtype)

    @staticmethod
    def _tensor(buffer: _Buffer, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        # set_ rather than a view: users may modify an output in place, which autograd forbids on such views
        return torch.empty(0, dtype=dtype).set_(buffer.storage, 0, (rows, cols), (cols, 1))

    def _make_room(self, wanted: int) -> None:
        """Drop free buffers of other sizes until no more is held than was ever alive at once."""
        alive = sum(b.bytes for group in self._by_bytes.values() for b in group if not b.is_free())
        self._most_alive = max(self._most_alive, alive + wanted)
        held = self.bytes_held
        for size, group in list(self._by_bytes.items()):
            for buffer in list(group):
                if held + wanted <= self._most_alive:
                    return
                if buffer.is_free():
                    group.remove(buffer)
                    held -= buffer.bytes
            if not group:
                del self._by_bytes[size]

    @property
    def bytes_held(self) -> int:
        return sum(b.bytes for group in self._by_bytes.values() for b in group)

    def clear(self) -> None:
        self._by_bytes.clear()
