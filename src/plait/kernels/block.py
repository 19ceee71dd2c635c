"""The block of int64 words a kernel reads its arguments from."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from plait.kernels.launch import launch

__all__ = ["Block"]


class Block:
    """Argument blocks of one kernel, one a thread: word 0 is the address of its counter.

    The counter sits on a cache line of its own behind the words: every thread of the team increments it
    while it reads the rest.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._local = threading.local()

    def words(self) -> ctypes.Array[ctypes.c_int64]:
        """This thread's block, to be filled and then run."""
        block: ctypes.Array[ctypes.c_int64] | None = getattr(self._local, "block", None)
        if block is None:
            block = self._local.block = (ctypes.c_int64 * (len(self.names) + 16))()
        return block

    @staticmethod
    def address(block: ctypes.Array[ctypes.c_int64], word: int) -> int:
        """Where a word of the block lies, for a kernel that changes it."""
        return ctypes.addressof(block) + word * 8

    def run(self, address: int, block: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        counter = len(self.names) + 8
        block[counter] = 0
        block[0] = ctypes.addressof(block) + counter * 8
        launch(address, block, threads)
