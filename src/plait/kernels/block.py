"""The block of int64 words a kernel reads its arguments from."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from plait.kernels.launch import launch, thread_number
from plait.kernels.vector import LINE

__all__ = ["Block"]

_LINE = LINE // 8  # words


class Block:
    """Argument blocks of one kernel, one a thread: word 0 is the address of what its team shares.

    A team shares its number of threads, the C function that numbers them (0: none), and a counter for the
    part of each, on cache lines of their own: `next_piece` in kernels/vector.py claims work from them.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._local = threading.local()

    def words(self) -> ctypes.Array[ctypes.c_int64]:
        """This thread's block, to be filled and then run."""
        try:
            block: ctypes.Array[ctypes.c_int64] = self._local.block
        except AttributeError:
            block = self._local.block = (ctypes.c_int64 * len(self.names))()
        return block

    @staticmethod
    def address(block: ctypes.Array[ctypes.c_int64], word: int) -> int:
        """Where a word of the block lies, for a kernel that changes it."""
        return ctypes.addressof(block) + word * 8

    def run(self, address: int, block: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        """Run the kernel at `address` on so many threads; returns when all are done."""
        try:
            team, block[0] = self._local.teams[threads]
        except (AttributeError, KeyError):
            team, block[0] = self._team(threads)
        for part in range(_LINE, len(team), _LINE):
            team[part] = 0
        launch(address, block, threads)

    def _team(self, threads: int) -> tuple[ctypes.Array[ctypes.c_int64], int]:
        """What a team of this size shares, and its address."""
        teams: dict[int, tuple[ctypes.Array[ctypes.c_int64], int]] | None
        teams = getattr(self._local, "teams", None)
        if teams is None:
            teams = self._local.teams = {}
        found = teams.get(threads)
        if found is None:
            team = (ctypes.c_int64 * (_LINE * (threads + 1)))()
            team[0], team[1] = threads, thread_number()
            found = teams[threads] = team, ctypes.addressof(team)
        return found
