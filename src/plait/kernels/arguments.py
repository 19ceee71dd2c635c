"""What a kernel is called with: declared once by name, filled and read by that name.

A kernel takes the address of a block of int64 words. They are not numbered by hand: `Arguments` gives every
name its place, `arguments.width` is where the caller writes the width, and inside the kernel `a =
read(block)` is a named tuple of all of them, `a.width`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numba import cfunc, njit, types

from plait.kernels.launch import launch, thread_number
from plait.kernels.vector import LINE, group_reader, load_index, next_piece, tuple_reader

__all__ = ["PATTERN", "Arguments"]

_LINE = LINE // 8  # words
_Team = tuple[ctypes.Array[ctypes.c_int64], int, tuple[int, ...]]

PATTERN = "pieces bounds indptr indices"
"""The arguments of a kernel over the rows of a pattern, in the order of `Pattern.addresses`."""


def _expanded(fields: str) -> list[str]:
    names = []
    for field in fields.split():
        name = field.removesuffix("[]")
        names += [name] if name == field else [name, f"{name}_row"]
    return names


class Arguments:
    """The arguments of one kernel, and a block of them for each calling thread.

    `fields` are names. `x[]` is a matrix, which takes two: `x`, its address, and `x_row`, the bytes from one
    row to the next. A group, `product=(3, "rows[] inner")`, is repeated: `rows0`, `rows0_row`, `inner0`,
    `rows1`, ... The first name is always `team`, the address of what the threads of a launch share: their
    number, the C function that numbers them (0: none), and a counter for the part of each, on cache lines of
    their own; `next_piece` in kernels/vector.py claims work from them.
    """

    def __new__(cls, fields: str, **groups: tuple[int, str]) -> Arguments:
        """An object with a slot for each place: a quarter of the time of looking it up in a dictionary."""
        names = ["team", *_expanded(fields)]
        starts = {}
        for group, (count, repeated) in groups.items():
            starts[group] = len(names), tuple(_expanded(repeated))
            names += [f"{name}{k}" for k in range(count) for name in _expanded(repeated)]
        if len(set(names)) < len(names):
            raise ValueError(f"fields: a name stands twice among {', '.join(names)}")
        made: Arguments = super().__new__(type(cls.__name__, (cls,), {"__slots__": names}))
        for place, name in enumerate(names):
            setattr(made, name, place)
        made.names, made._groups = tuple(names), starts
        return made

    def __init__(self, fields: str, **groups: tuple[int, str]):
        self.names: tuple[str, ...]
        self._groups: dict[str, tuple[int, tuple[str, ...]]]
        first = self.names.index("pieces") if "pieces" in self.names else 0
        self._pattern = slice(first, first + 4)
        self._local = threading.local()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...

    def reader(self) -> Any:
        """A numba function of a block: a named tuple of all arguments outside groups."""
        first = min((start for start, _ in self._groups.values()), default=len(self.names))
        return tuple_reader(self.names[:first])

    def group_reader(self, group: str) -> Any:
        """A numba function of a block and k: a named tuple of the group's arguments, its k-th repetition."""
        first, names = self._groups[group]
        return group_reader(names, first)

    def row_kernel(self, index_bits: int, row: Callable[[Any, Any, Any, Any], None]) -> Any:
        """The kernel over a pattern that runs row(arguments, i, start, end) for row i and its edges.

        Threads claim pieces of rows. `row` is compiled into that loop: a call would hand all arguments over.
        """
        read, index, bound = self.reader(), load_index(index_bits), load_index(64)
        inside = njit(forceinline=True)(row)

        @cfunc(types.void(types.CPointer(types.int64)))  # type: ignore[untyped-decorator]
        def run(arguments: Any) -> None:
            a = read(arguments)
            while True:
                piece = next_piece(a.team, a.pieces)
                if piece >= a.pieces:
                    break
                for i in range(bound(a.bounds, piece), bound(a.bounds, piece + 1)):
                    inside(a, i, index(a.indptr, i), index(a.indptr, i + 1))

        return run

    def words(self) -> ctypes.Array[ctypes.c_int64]:
        """This thread's block, to be filled and then run."""
        try:
            block: ctypes.Array[ctypes.c_int64] = self._local.block
        except AttributeError:
            block = self._local.block = self.fresh()
        return block

    def over(self, addresses: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
        """This thread's block with the arguments of a pattern filled in."""
        words = self.words()
        words[self._pattern] = addresses  # type: ignore[call-overload]  # any sequence will do
        return words

    def fresh(self) -> ctypes.Array[ctypes.c_int64]:
        """A block of zeros."""
        return (ctypes.c_int64 * len(self.names))()

    @staticmethod
    def address(block: ctypes.Array[ctypes.c_int64], place: int) -> int:
        """Where an argument lies in memory, for a kernel that changes it."""
        return ctypes.addressof(block) + place * 8

    def run(self, address: int, block: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        """Run the kernel at `address` on this many threads; returns when all are done."""
        try:
            team, block[0], counters = self._local.teams[threads]
        except (AttributeError, KeyError):
            team, block[0], counters = self._team(threads)
        for counter in counters:
            team[counter] = 0
        launch(address, block, threads)

    def _team(self, threads: int) -> _Team:
        """What a team of this size shares, its address, and where its counters lie."""
        teams: dict[int, _Team] | None = getattr(self._local, "teams", None)
        if teams is None:
            teams = self._local.teams = {}
        found = teams.get(threads)
        if found is None:
            team = (ctypes.c_int64 * (_LINE * (threads + 1)))()
            team[0], team[1] = threads, thread_number()
            found = teams[threads] = team, ctypes.addressof(team), tuple(range(_LINE, len(team), _LINE))
        return found
