"""A chain of products on blocks of rows in cache: gather, multiply by weights, add up weight gradients."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from plait.kernels import launch
from plait.kernels.chain import cpu
from plait.kernels.compiled import stored
from plait.kernels.operands import float_bits, read_flat, read_rows, write_flat, write_rows
from plait.kernels.spmm import Pattern
from plait.kernels.vector import LINE

__all__ = [
    "ADDEND", "ADDEND_SCALE", "BIAS", "KEPT", "LEFTS", "MOST_PRODUCTS", "MOST_SUMS", "OUT", "PLUS", "RIGHTS",
    "ROWS", "WEIGHTS", "Chain", "Gathered", "X", "ones",
]  # fmt: skip

MOST_PRODUCTS, MOST_SUMS = cpu.MOST_PRODUCTS, cpu.MOST_SUMS

# multiply-adds under which a second thread does not pay, see kernels/gemm
_SERIAL_BELOW = 1 << 18
# bytes of the block's rows and other rows of the chain: they stay in the second-level cache of a core
_BLOCK_BYTES = 128 << 10
_LEAST_ROWS, _MOST_ROWS = 16, 128
_ROWS_PER_CHUNK = 256
_WAIT = 4
_MOST_CHUNKS = 64
_SUM_BYTES = 8 << 20
_TOTAL_BYTES = 1 << 20  # parts up to this size are added up by one thread

Take = Callable[[int, int, torch.dtype], torch.Tensor]
Words = ctypes.Array[ctypes.c_int64]
Pair = tuple["torch.Tensor | None", "torch.Tensor | None"]


_address = stored("chain", cpu.kernel, uses=("spmm", "gemm"))
_AT = cpu.CHAIN


def _places(name: str, count: int) -> list[int]:
    return [_AT.names.index(f"{name}{k}") for k in range(count)]


ROWS, WEIGHTS = _places("rows", MOST_PRODUCTS), _places("w", MOST_PRODUCTS)
LEFTS, RIGHTS = _places("left", MOST_SUMS), _places("right", MOST_SUMS)
_PARTS, _TOTALS = _places("part", MOST_SUMS), _places("total", MOST_SUMS)
X, ADDEND, KEPT, OUT, PLUS = _AT.x, _AT.addend, _AT.block, _AT.out, _AT.plus
ADDEND_SCALE, BIAS = _AT.addend_scale, _AT.bias
_SLOT_COUNTER, _DONE_COUNTER = 8 * _AT.slot_counter, 8 * _AT.done_counter  # bytes into the block
_PLACES = {X: ("x", 0), ADDEND: ("addend", 0), KEPT: ("kept", 0), OUT: ("out", 0), PLUS: ("plus", 0)}
for _name, _of_name in (("rows", ROWS), ("w", WEIGHTS), ("left", LEFTS), ("right", RIGHTS)):
    _PLACES |= {at: (_name, k) for k, at in enumerate(_of_name)}


@functools.cache
def _one(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((1, 1), dtype=dtype)


def ones(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """A column of ones: one number, read with stride zero."""
    return _one(dtype).expand(rows, 1)


@dataclass(frozen=True)
class Gathered:
    """How a chain's block is made: target * sum_e(edge[e] * source[j] * x[j]) + addend_scale * addend."""

    pattern: Pattern
    width: int
    edge: torch.Tensor | None = None
    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    is_kept: bool = False  # its rows are needed afterwards

    @property
    def mode(self) -> str:
        return "edge" if self.edge is not None else "source" if self.source is not None else "plain"


class Chain:
    """A chain for one graph and one set of shapes, run again and again: only addresses change.

    `products` are the inner widths of rows @ w, summed to rows of `width` columns; `sums` the widths of the
    two sides of left.T @ right. None stands for the gathered block.
    """

    def __init__(
        self,
        num_rows: int,
        dtype: torch.dtype,
        gathered: Gathered | None,
        products: Sequence[int | None],
        width: int,
        sums: Sequence[tuple[int | None, int | None]],
    ):
        self.num_rows, self.gathered, self.dtype, self.size = num_rows, gathered, dtype, dtype.itemsize
        across = 0 if gathered is None else gathered.width
        is_kept = gathered is not None and gathered.is_kept
        layout = _layout(across, tuple(products), width, tuple(sums), is_kept, self.size)
        self.shapes, self.scratch_bytes = layout.shapes, layout.scratch_bytes
        chunks = _chunks(num_rows, layout.sum_bytes)
        bounds, where = _bounds(gathered, num_rows, chunks, layout.row_work)
        self.chunks = len(bounds) - 1
        work = num_rows * layout.row_work
        work += 0 if gathered is None else (gathered.pattern.num_edges + num_rows) * across
        self.most_threads = self.chunks if work > _SERIAL_BELOW else 1
        self.address = _address(
            float_bits("dtype", _one(dtype)),
            32 if gathered is None else gathered.pattern.index_bits,
            "rows" if gathered is None else gathered.mode,
        )
        self.width, self._across, self._inner = width, across, layout.inner
        self._parts_at, self._part_bytes = _parts_at(layout.shapes, self.chunks, self.size)
        self.words, constants = self._words(layout, where)
        self._word_bytes = ctypes.sizeof(self.words)
        self.held = bounds, constants  # their addresses are among the words

    def size_of(self, at: int) -> tuple[str, int, int, bool]:
        """(name, rows, columns, whether it may have more rows) of the matrix at one of the named places."""
        name, k = _PLACES[at]
        n, g = self.num_rows, self.gathered
        if name == "x":
            return "x", n if g is None else g.pattern.num_columns, self._across, True
        if name in ("addend", "kept"):
            return name, n, self._across, False
        if name in ("out", "plus"):
            return name, n, self.width, False
        if name == "w":
            return f"w {k}", self._inner[k], self.width, False
        columns = self._inner[k] if name == "rows" else self.shapes[k][name == "right"]
        return f"{name} {k}", n, columns, False

    def _words(self, layout: _Layout, bounds: int) -> tuple[Words, Any]:
        """(the words that stay, the tensors behind them); those handed in at every run are filled then."""
        words = type(layout.words).from_buffer_copy(layout.words)
        words[_AT.chunks], words[_AT.bounds] = self.chunks, bounds
        g = self.gathered
        if g is None:
            return words, None
        words[_AT.indptr], words[_AT.indices] = g.pattern.csr
        words[_AT.last_edge] = max(0, g.pattern.num_edges - 1)
        return words, self._constants(words, g)

    def _constants(self, words: Words, g: Gathered) -> Any:
        """Place the weights of the gathered block; returns what is to be held."""
        count = g.pattern.num_columns if g.edge is None else g.pattern.num_edges
        factor = g.source if g.edge is None else g.edge
        return (
            read_flat(words, _AT.factor, g.mode, factor, self.dtype, count),
            read_flat(words, _AT.target, "target", g.target, self.dtype, g.pattern.num_rows),
        )

    def run(
        self,
        take: Take,
        rows: Sequence[torch.Tensor | None] = (),
        weights: Sequence[torch.Tensor] = (),
        pairs: Sequence[Pair] = (),
        *,
        x: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        addend_scale: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """out = sum_k(rows_k @ w_k) + plus + bias; returns left.T @ right of every pair.

        One pass over the rows: the block is gathered from `x`, multiplied and added up while it is in cache.
        `plus` may be `out` itself. `take` lends memory (rows, columns, dtype).
        """
        words = self.start()
        given = [(X, x), (ADDEND, addend), (PLUS, plus)]
        given += [*zip(ROWS, rows, strict=False), *zip(WEIGHTS, weights, strict=False)]
        given += [(at[k], pair[s]) for k, pair in enumerate(pairs) for s, at in ((0, LEFTS), (1, RIGHTS))]
        held: list[Any] = [self.fill(words, at, tensor) for at, tensor in given if tensor is not None]
        for at, tensor in ((KEPT, kept), (OUT, out)):
            if tensor is not None:
                self.fill_result(words, at, tensor)
        held.append(self.fill_scale(words, addend_scale))
        held.append(self.fill_bias(words, bias))
        made = self.finish(words, take)
        del held
        return made

    def start(self) -> Words:
        """This thread's words with those filled in that stay; `fill` the others, then `finish`."""
        words = _AT.words()
        ctypes.memmove(words, self.words, self._word_bytes)
        where = ctypes.addressof(words)
        words[_AT.slots], words[_AT.done] = where + _SLOT_COUNTER, where + _DONE_COUNTER
        return words

    def fill(self, words: Words, at: int, tensor: torch.Tensor) -> torch.Tensor:
        """Place a matrix that is read at one of the places this module names; hold what is returned."""
        name, rows, width, may_be_longer = self.size_of(at)
        return read_rows(words, at, name, tensor, self.dtype, rows, width, may_be_longer)

    def fill_result(self, words: Words, at: int, tensor: torch.Tensor) -> None:
        """Place a matrix that is written: OUT or KEPT."""
        name, rows, width, _ = self.size_of(at)
        write_rows(words, at, name, tensor, self.dtype, rows, width)

    def fill_scale(self, words: Words, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Place one factor for each row of the addend; hold what is returned."""
        return read_flat(words, ADDEND_SCALE, "addend_scale", scale, self.dtype, self.num_rows)

    def fill_bias(self, words: Words, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Place the bias; hold what is returned."""
        return read_flat(words, BIAS, "bias", bias, self.dtype, self.width)

    def finish(self, words: Words, take: Take) -> list[torch.Tensor]:
        """Run the kernel; returns the sums."""
        threads = min(launch.num_threads(), self.most_threads)
        lent = _scratch(self._part_bytes + threads * self.scratch_bytes)
        words[_AT.scratch] = lent + self._part_bytes
        if not self.shapes:
            _AT.run(self.address, words, threads)
            return []
        made = [torch.empty(shape, dtype=self.dtype) for shape in self.shapes]  # the caller keeps them
        large = [self._place(words, k, total, lent, take) for k, total in enumerate(made)]
        _AT.run(self.address, words, threads)
        return [one if parts is None else parts.sum(0) for one, parts in zip(made, large, strict=True)]

    def _place(self, words: Words, k: int, total: torch.Tensor, lent: int, take: Take) -> torch.Tensor | None:
        """Place a sum and its parts; returns the parts where torch is to add them up.

        Small parts are added up by the kernel's last thread: starting torch's threads takes longer.
        """
        (height, width), at = self.shapes[k], self._parts_at[k]
        if self.chunks == 1:
            write_flat(words, _PARTS[k], "sums", total, self.dtype, height * width)
        elif at is not None:
            words[_PARTS[k]] = lent + at
            write_flat(words, _TOTALS[k], "totals", total, self.dtype, height * width)
        else:
            parts = take(self.chunks * height, width, self.dtype)
            write_flat(words, _PARTS[k], "sums", parts, self.dtype, self.chunks * height * width)
            return parts.view(self.chunks, height, width)
        return None


def _parts_at(shapes: list[tuple[int, int]], chunks: int, size: int) -> tuple[list[int | None], int]:
    """(where the parts of each sum lie in scratch memory, None for too large ones; the bytes of all)."""
    places: list[int | None] = []
    end = 0
    for height, width in shapes:
        count = chunks * height * width * size
        is_lent = chunks > 1 and count <= _TOTAL_BYTES
        places.append(end if is_lent else None)
        end += -(-count // LINE) * LINE if is_lent else 0
    return places, end


class _Layout(NamedTuple):
    """What a chain's widths alone decide; mini-batches share it."""

    shapes: list[tuple[int, int]]
    inner: list[int]
    scratch_bytes: int
    sum_bytes: int
    row_work: int
    words: Words


@functools.lru_cache(maxsize=1024)
def _layout(
    across: int,
    products: tuple[int | None, ...],
    width: int,
    sums: tuple[tuple[int | None, int | None], ...],
    is_kept: bool,
    size: int,
) -> _Layout:
    """See `_Layout`; `across` is the width of the gathered block, for which None stands."""
    shapes = [(across if a is None else a, across if b is None else b) for a, b in sums]
    inner = [across if p is None else p for p in products]
    beside = [width if products else 0, *(p or 0 for p in products), *(s or 0 for pair in sums for s in pair)]
    block_rows = _block_rows(across + sum(beside), size)
    words = _AT.fresh()
    fixed = {"block_rows": block_rows, "width": width, "products": len(inner), "sums": len(shapes)}
    fixed |= {f"inner{k}": value for k, value in enumerate(inner)} | {"block_width": across}
    for k, (height, wide) in enumerate(shapes):
        fixed |= {f"height{k}": height, f"across{k}": wide}
    for name, value in fixed.items():
        words[_AT.names.index(name)] = value
    area = sum(a * b for a, b in shapes)
    scratch = 0 if is_kept else block_rows * across * size
    return _Layout(shapes, inner, scratch, area * size, sum(inner) * width + area, words)


class _Scratch(threading.local):
    """Memory of one calling thread for the blocks of its team; grows to the most that was needed."""

    memory = torch.empty(0, dtype=torch.uint8)


_own = _Scratch()


def _scratch(count: int) -> int:
    if _own.memory.numel() < count:
        _own.memory = torch.empty(count, dtype=torch.uint8)
    return _own.memory.data_ptr()


def _block_rows(columns: int, size: int) -> int:
    """Rows that go through the chain together; a multiple of a product's block height."""
    fitting = _BLOCK_BYTES // max(1, columns * size)
    return int(max(_LEAST_ROWS, min(_MOST_ROWS, fitting)) // 8 * 8)


def _chunks(num_rows: int, sum_bytes: int) -> int:
    """Chunks of rows, by the shapes alone: with sums each needs its own partial ones."""
    if not sum_bytes:
        return max(1, num_rows // 192)
    by_memory = max(1, _SUM_BYTES // sum_bytes)
    return int(min(max(1, num_rows // _ROWS_PER_CHUNK), by_memory, _MOST_CHUNKS))


def _bounds(
    gathered: Gathered | None, num_rows: int, chunks: int, row_work: int
) -> tuple[np.ndarray[Any, Any], int]:
    """(row numbers that cut the rows into chunks of about equal cost, their address)."""
    if gathered is not None:
        # a gathered element waits for memory: as long as some multiply-adds take
        return gathered.pattern.even_bounds(chunks, 1 + row_work // (_WAIT * max(1, gathered.width)))
    return _equal_cuts(num_rows, chunks)


@functools.lru_cache(maxsize=64)
def _equal_cuts(num_rows: int, chunks: int) -> tuple[np.ndarray[Any, Any], int]:
    """The same for rows that all cost the same; kept, since chains without a graph are made for every one."""
    bounds = np.linspace(0, num_rows, chunks + 1).astype(np.int64)
    return bounds, bounds.ctypes.data
