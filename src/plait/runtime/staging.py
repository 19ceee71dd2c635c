"""Tensors of the host on their way to a device: packed into pinned memory, moved by one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Staging"]

_RING = 3  # blocks of pinned memory: one is filled while copies from the others may still run
_ALIGNED = 16  # bytes: device kernels load this many at once


class Staging:
    """Moves a few tensors at a time to a device, without waiting for it.

    A copy from memory that is not pinned blocks the host until it is done, and every copy costs a launch.
    Packing costs one pass over the bytes at the speed of memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._host: list[Tensor] = []
        self._events: list[Any] = [None] * _RING
        self._turn = 0
        self._moved = torch.empty(0, dtype=torch.uint8, device=device)

    def move(self, values: Sequence[Tensor], narrow: Sequence[bool]) -> list[Tensor]:
        """The values on the device, in memory that the next call writes to.

        narrow: int64 values that are known to fit int32 come as int32, in half the bytes.
        """
        kinds = [
            torch.int32 if is_narrow and value.dtype is torch.int64 else value.dtype
            for value, is_narrow in zip(values, narrow, strict=True)
        ]
        places, end = _places([v.numel() * kind.itemsize for v, kind in zip(values, kinds, strict=True)])
        block = self._block(end)
        packed = block.numpy()
        for value, kind, (start, stop) in zip(values, kinds, places, strict=True):
            _pack(value, kind, packed[start:stop])
        moved = self._moved[:end]
        moved.copy_(block[:end], non_blocking=True)
        if self._is_cuda:
            event = self._events[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return [
            moved[start:stop].view(kind).view(value.shape)
            for value, kind, (start, stop) in zip(values, kinds, places, strict=True)
        ]

    def _block(self, size: int) -> Tensor:
        """Pinned memory that no copy reads any more."""
        if not self._host or len(self._host[0]) < size:
            room = size + size // 4
            for event in self._events:
                if event is not None:
                    event.synchronize()
            self._events = [None] * _RING
            self._host = [
                torch.empty(room, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(_RING)
            ]
            self._moved = torch.empty(room, dtype=torch.uint8, device=self.device)
        self._turn = (self._turn + 1) % _RING
        if self._events[self._turn] is not None:
            self._events[self._turn].synchronize()
        return self._host[self._turn]


def _places(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """(first and last byte of each part, bytes in all)."""
    places, start = [], 0
    for size in sizes:
        places.append((start, start + size))
        start += -(-size // _ALIGNED) * _ALIGNED
    return places, start


def _pack(value: Tensor, kind: torch.dtype, room: np.ndarray[Any, Any]) -> None:
    """Write a tensor to bytes; numpy's copies cost a tenth of torch's to start."""
    if kind is not value.dtype:
        np.copyto(room.view(np.int32).reshape(value.shape), value.detach().numpy(), casting="same_kind")
        return
    room[:] = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
