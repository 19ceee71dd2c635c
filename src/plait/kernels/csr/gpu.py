"""CSR on a GPU, made there with torch's sorts: transpose, edge order, degrees, rows by length, norms.

Nothing reads a value back to the host for graphs of up to `_BOUNDED_EDGES` edges: counts that only the device
knows are replaced by their upper bounds, and the kernels skip what is left over. Larger graphs read four
numbers once, because idle programs would cost more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from plait.errors import InputError
from plait.kernels.relaunch import Launcher

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise InputError(
        "x is on a GPU, but triton is not installed; it comes with CUDA builds of torch. "
        "Install one, or move x to the CPU"
    ) from error

__all__ = [
    "Items", "Rows", "inverse_degrees", "pack", "packed", "rows_of", "sorted_rows",
    "transposed", "with_loops", "without_loops",
]  # fmt: skip

_BOUNDED_EDGES = 1 << 20
_BLOCK = 512
_COUNTS = (
    "num_rows", "num_columns", "num_pieces", "num_short", "num_splits", "num_edges", "num_groups", "short",
    "most", "halvings",
)  # fmt: skip
"""Numbers that differ from one graph to the next: kernels are not compiled again for them."""
_LARGEST_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Items:
    """What the programs of a launch take up: pieces of long rows, then short rows of similar length together.

    items[k] = (row, begin, end, part): the edges [begin, end) of a row. A piece of a row that was split
    writes the partial result `part`; everything else (part -1) writes its row. Row -1 is padding.
    splits[k] = (row, first part, last part). Pieces lie on fixed edges and partial results are added in their
    order, so results do not depend on how the device schedules the programs.
    """

    items: torch.Tensor
    splits: torch.Tensor
    num_pieces: int
    num_short: int
    num_splits: int
    num_parts: int

    def grid(self, slots: int) -> int:
        """Programs of a launch: one per piece, one per `slots` short rows."""
        return self.num_pieces + -(-self.num_short // slots)


class Rows:
    """A sparse matrix by rows on a device; `order[e]` is the edge's number in the data it was made from.

    has_rest: edges from indptr[-1] on may belong to no row. How many is known to the device alone; kernels
    never reach them, and their columns are in range like those of the others.
    """

    def __init__(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        num_columns: int,
        order: torch.Tensor | None = None,
        has_rest: bool = False,
    ):
        self.indptr, self.indices, self.order, self.has_rest = indptr, indices, order, has_rest
        self.num_rows, self.num_columns = indptr.numel() - 1, num_columns
        self.num_edges = indices.numel()
        self.is_read = False  # whether counts may be read from the device, however few the edges
        # (target, source or num_columns where it is rest) of every edge, if known and not used yet
        self.ends: tuple[torch.Tensor, torch.Tensor] | None = None
        self._items: dict[tuple[int, int], Items] = {}

    @functools.cached_property
    def degrees(self) -> torch.Tensor:
        """Edges of every row."""
        return self.indptr.diff()

    def items(self, short: int, most: int) -> Items:
        """The rows of up to `short` edges by length, longer ones in pieces of up to `most` edges."""
        if (short, most) not in self._items:
            self._items[short, most] = _arrange(self, short, most)
        return self._items[short, most]


@triton.jit
def _group_of(degree, short, num_groups):  # type: ignore[no-untyped-def]
    """0 for the longest of the short rows, num_groups - 2 for those of up to one edge; last are long rows."""
    # the bits of degree - 1, from a float's exponent: 0 for up to one edge, 1 for 2, 2 for 3 and 4, ...
    other = tl.maximum(degree - 1, 0).to(tl.float32)
    bits = tl.where(other > 0, (other.to(tl.int32, bitcast=True) >> 23) - 126, 0)
    return tl.where(degree > short, num_groups - 1, num_groups - 2 - bits)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    p_indptr, p_sizes, num_rows, num_groups, short, most, BLOCK: tl.constexpr
):
    """Of every row: pieces, parts, whether it is split, and of every group whether the row is in it."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = row < num_rows
    degree = tl.load(p_indptr + row + 1, mask=m_row, other=0) - tl.load(p_indptr + row, mask=m_row, other=0)
    pieces = tl.where(degree > short, (degree + most - 1) // most, 0)
    is_split = pieces > 1
    group = _group_of(degree, short, num_groups)
    p_size, rows = p_sizes + row.to(tl.int64), num_rows.to(tl.int64)
    tl.store(p_size, pieces, mask=m_row)
    tl.store(p_size + rows, tl.where(is_split, pieces, 0), mask=m_row)
    tl.store(p_size + 2 * rows, is_split.to(tl.int32), mask=m_row)
    for k in range(0, num_groups):
        tl.store(p_size + (3 + k) * rows, (group == k).to(tl.int32), mask=m_row)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    p_indptr, p_ends, p_items, p_splits, num_rows, num_groups, num_pieces, num_short, num_splits, short, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes every row's item, or pieces and split, and -1 where bounds leave room for more of them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = at < num_rows
    begin = tl.load(p_indptr + at, mask=m_row, other=0)
    end = tl.load(p_indptr + at + 1, mask=m_row, other=0)
    is_long = end - begin > short
    pieces = tl.where(is_long, (end - begin + most - 1) // most, 0)
    is_split = pieces > 1
    # sums over all kinds in a row: each begins where the one before ended
    p_end, rows = p_ends + at.to(tl.int64), num_rows.to(tl.int64)
    all_pieces, all_parts = tl.load(p_ends + rows - 1), tl.load(p_ends + 2 * rows - 1)
    before_groups = tl.load(p_ends + 3 * rows - 1)
    none = tl.full((BLOCK,), -1, tl.int32)
    # the row's place by length; a long row's is padding where their number was not read
    group = _group_of(end - begin, short, num_groups)
    place = tl.load(p_end + (3 + group) * rows, mask=m_row, other=1) - 1 - before_groups
    m_place = m_row & (place < num_short)
    p_item = p_items + (num_pieces + place).to(tl.int64) * 4
    tl.store(p_item, tl.where(is_long, -1, at), mask=m_place)
    tl.store(p_item + 1, begin, mask=m_place)
    tl.store(p_item + 2, tl.where(is_long, begin, end), mask=m_place)
    tl.store(p_item + 3, none, mask=m_place)
    part = tl.load(p_end + rows, mask=m_row, other=0) - all_pieces - pieces
    split = tl.load(p_end + 2 * rows, mask=m_row, other=1) - all_parts - 1
    p_split = p_splits + split.to(tl.int64) * 3
    tl.store(p_split, at, mask=is_split)
    tl.store(p_split + 1, part, mask=is_split)
    tl.store(p_split + 2, part + pieces, mask=is_split)
    m_left = (at >= before_groups - all_parts) & (at < num_splits)
    for k in tl.static_range(3):
        tl.store(p_splits + at.to(tl.int64) * 3 + k, none, mask=m_left)
    m_left = (at >= all_pieces) & (at < num_pieces)
    for k in tl.static_range(4):
        tl.store(p_items + at.to(tl.int64) * 4 + k, none, mask=m_left)
    first = tl.load(p_end, mask=m_row, other=0) - pieces
    for k in range(0, tl.max(pieces, 0)):
        m_piece = k < pieces
        p_item = p_items + (first + k).to(tl.int64) * 4
        tl.store(p_item, at, mask=m_piece)
        tl.store(p_item + 1, begin + k * most, mask=m_piece)
        tl.store(p_item + 2, tl.minimum(begin + (k + 1) * most, end), mask=m_piece)
        tl.store(p_item + 3, tl.where(is_split, part + k, -1), mask=m_piece)


def _memo(tensor: torch.Tensor, dtype: torch.dtype, *more: object) -> object:
    """What launches are recognised by; None where counts may not fit 32 bits."""
    return (tensor.device, dtype, *more) if dtype == torch.int32 else None


def _blocks(count: int) -> tuple[int]:
    return (-(-count // _BLOCK),)


def _arrange(rows: Rows, short: int, most: int) -> Items:
    """See Items. Rows of up to `short` edges are grouped by powers of two and keep their order in a group:
    neighbouring rows of a mesh read the same neighbours, sorting them by exact length would part them.

    One sum over the rows of every group in turn is their order: a sort would be six launches more.
    """
    n, dtype, device = rows.num_rows, rows.indptr.dtype, rows.indptr.device
    if not n:
        none = torch.empty((0, 4), dtype=dtype, device=device)
        return Items(none, none, 0, 0, 0, 0)
    num_groups = max(0, short - 1).bit_length() + 2
    sizes = torch.empty((3 + num_groups) * n, dtype=dtype, device=device)
    constants, memo = {"BLOCK": _BLOCK}, _memo(rows.indptr, dtype)
    _run_measure(_blocks(n), (rows.indptr, sizes, n, num_groups, short, most), constants, memo=memo)
    # in one row: torch sums 65,536 numbers in 5 us so, and in 85 us as four rows
    ends = sizes.cumsum(0, dtype=dtype)
    num_pieces, num_parts, num_splits, num_long = _sizes(rows, short, most, ends)
    num_short = n - num_long
    items = torch.empty((num_pieces + num_short, 4), dtype=dtype, device=device)
    splits = torch.empty((num_splits, 3), dtype=dtype, device=device)
    counts = (n, num_groups, num_pieces, num_short, num_splits, short, most)
    _run_place(
        _blocks(max(n, num_pieces, num_splits)), (rows.indptr, ends, items, splits, *counts), constants,
        memo=memo,
    )  # fmt: skip
    return Items(items, splits, num_pieces, num_short, num_splits, num_parts)


def _sizes(rows: Rows, short: int, most: int, ends: torch.Tensor) -> tuple[int, int, int, int]:
    """(pieces, parts, split rows, long rows): read from the device, or for small graphs their bounds.

    The bound of the long rows is 0: the list of short rows then holds padding in their place.
    """
    if rows.is_read or rows.num_edges > _BOUNDED_EDGES:
        last = ends[rows.num_rows - 1 :: rows.num_rows].tolist()
        pieces, parts, splits, *_, long = (b - a for a, b in zip([0, *last[:-1]], last, strict=True))
        return pieces, parts, splits, long
    whole = rows.num_edges // most
    most_long = min(rows.num_rows, rows.num_edges // (short + 1))
    most_split = min(rows.num_rows, rows.num_edges // (max(short, most) + 1))
    return most_long + whole, most_split + whole if most_split else 0, most_split, 0


def _index_dtype(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) <= _LARGEST_INT32 else torch.int64


def rows_of(edge_index: torch.Tensor, num_rows: int, num_columns: int | None = None) -> Rows:
    """The matrix with an entry (target, source) for every edge of edge_index[2, edges] = (sources, targets).

    Sources ascend inside a row; repeated edges keep their order. `order` is each edge's place in edge_index.
    """
    key, _ = pack(edge_index, num_rows, num_rows if num_columns is None else num_columns)
    return sorted_rows(key, num_rows, num_rows if num_columns is None else num_columns)


def pack(edge_index: torch.Tensor, num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(target << 32 | source of every edge, 1 if all are in range and else 0: a number on the device)."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise InputError(f"edge_index has shape {tuple(edge_index.shape)}; pass one of shape [2, edges]")
    # 2**32 sources do not occur on one device
    num_edges, device = edge_index.shape[1], edge_index.device
    key = torch.empty(num_edges, dtype=torch.int64, device=device)
    is_right = torch.ones(1, dtype=torch.int32, device=device)
    if num_edges:
        strides = edge_index.stride()
        # Triton compiles for strides that are 1 or multiples of 16
        kinds = [(stride == 1, stride % 16 == 0) for stride in strides]
        dtype = _index_dtype(num_rows, num_columns, num_edges, *strides)
        memo = _memo(key, dtype, edge_index.dtype, *kinds)
        arguments = (edge_index, key, is_right, *strides, num_rows, num_columns, num_edges)
        _run_pack(_blocks(num_edges), arguments, {"BLOCK": _BLOCK}, memo=memo)
    return key, is_right


def without_loops(key: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the packed edges, loops moved to the row after the last; how many those are, known to the device)."""
    kept, count = torch.empty_like(key), torch.zeros(1, dtype=torch.int64, device=key.device)
    if key.numel():
        _run_part(_blocks(key.numel()), (key, kept, count, num_rows, key.numel()), {"BLOCK": _BLOCK})
    return kept, count


def with_loops(key: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The packed edges, loops moved to the row after the last, and one loop for every row behind them."""
    made = torch.empty(key.numel() + num_rows, dtype=torch.int64, device=key.device)
    if made.numel():
        memo = _memo(key, _index_dtype(num_rows, key.numel()))
        arguments = (key, made, num_rows, key.numel())
        _run_loop(_blocks(made.numel()), arguments, {"BLOCK": _BLOCK}, memo=memo)
    return made


def sorted_rows(key: torch.Tensor, num_rows: int, num_columns: int, has_rest: bool = False) -> Rows:
    """The matrix of packed edges; has_rest: some may lie in the row after the last, which is none."""
    count, device = key.numel(), key.device
    dtype = _index_dtype(num_rows, num_columns, count)
    key, order = key.sort(stable=True)  # one sort of (target, source) pairs
    keeps_ends = count <= _BOUNDED_EDGES  # of a graph that may come once: the transpose is made at once
    many = 2 + keeps_ends + (keeps_ends and has_rest)
    indices, placed, *ends = (torch.empty(count, dtype=dtype, device=device) for _ in range(many))
    indptr = torch.empty(num_rows + 1, dtype=dtype, device=device)
    arrays = (key, order, indptr, indices, placed, *ends, *[None] * (4 - many))
    _run_unpack(
        _blocks(max(count, num_rows + 1)), (*arrays, num_rows, num_columns, count, count.bit_length()),
        {"BLOCK": _BLOCK}, memo=_memo(key, dtype, many),
    )  # fmt: skip
    rows = Rows(indptr, indices, num_columns, placed, has_rest)
    if keeps_ends:
        rows.ends = (ends[0], ends[-1] if has_rest else indices)
    return rows


@triton.jit
def _first_at_least(p_sorted, value, num_sorted, halvings):  # type: ignore[no-untyped-def]
    """How many of num_sorted ascending numbers are less than value; halvings: num_sorted's bits."""
    low = tl.zeros_like(value).to(tl.int64)
    high = low + num_sorted
    for _ in range(0, halvings):
        middle = (low + high) >> 1
        is_open = low < high
        is_less = is_open & (tl.load(p_sorted + middle, mask=is_open, other=0) < value)
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_open & (is_less == 0), middle, high)
    return low


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    p_edges, p_key, p_right, row_stride, edge_stride, num_rows, num_columns, num_edges, BLOCK: tl.constexpr
):
    """Both ends of every edge in one number; says so where one is out of range."""
    edge = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_edge = edge < num_edges
    source = tl.load(p_edges + edge * edge_stride, mask=m_edge, other=0).to(tl.int64)
    target = tl.load(p_edges + row_stride + edge * edge_stride, mask=m_edge, other=0).to(tl.int64)
    is_wrong = (source < 0) | (source >= num_columns) | (target < 0) | (target >= num_rows)
    is_wrong = is_wrong & m_edge
    tl.store(p_right, 0, mask=tl.max(is_wrong.to(tl.int32), 0) > 0)
    tl.store(p_key + edge, (target << 32) | source, mask=m_edge)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _part(p_key, p_kept, p_count, num_rows, num_edges, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loops go to row num_rows; counting them in integers gives the same number in any order."""
    edge = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_edge = edge < num_edges
    key = tl.load(p_key + edge, mask=m_edge, other=1)
    source = key & 0xFFFFFFFF
    is_loop = ((key >> 32) == source) & m_edge
    last = num_rows.to(tl.int64) << 32
    tl.store(p_kept + edge, tl.where(is_loop, last | source, key), mask=m_edge)
    tl.atomic_add(p_count, tl.sum(is_loop.to(tl.int64), 0))


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _loop(p_key, p_made, num_rows, num_edges, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loops of the data go to row num_rows; behind the edges stands one loop for every row."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_edge = at < num_edges
    key = tl.load(p_key + at, mask=m_edge, other=1)
    source = key & 0xFFFFFFFF
    node = at - num_edges
    kept = tl.where((key >> 32) == source, (num_rows.to(tl.int64) << 32) | source, key)
    tl.store(p_made + at, tl.where(m_edge, kept, (node << 32) | node), mask=at < num_edges + num_rows)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    p_key, p_order, p_indptr, p_indices, p_placed, p_target, p_source, num_rows, num_columns, num_edges,
    halvings, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows of sorted (target, source) pairs: where they begin, sources, their order in fewer bits.

    With p_target the targets too; with p_source the sources, num_columns for edges of no row.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0).to(tl.int64) * BLOCK <= num_rows:
        begin = _first_at_least(p_key, at << 32, num_edges, halvings)
        tl.store(p_indptr + at, begin, mask=at <= num_rows)
    m_edge = at < num_edges
    key = tl.load(p_key + at, mask=m_edge, other=0)
    source, target = key & 0xFFFFFFFF, key >> 32
    tl.store(p_indices + at, source, mask=m_edge)
    tl.store(p_placed + at, tl.load(p_order + at, mask=m_edge, other=0), mask=m_edge)
    if p_target is not None:
        tl.store(p_target + at, target, mask=m_edge)
    if p_source is not None:
        tl.store(p_source + at, tl.where(target < num_rows, source, num_columns), mask=m_edge)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _end(  # type: ignore[no-untyped-def]
    p_indptr, p_indices, p_target, p_source, num_rows, num_columns, num_edges, halvings, BLOCK: tl.constexpr
):
    """The target of every edge; with p_source its source, num_columns if it is of no row."""
    edge = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_edge = edge < num_edges
    target = _first_at_least(p_indptr, edge + 1, num_rows + 1, halvings) - 1
    tl.store(p_target + edge, target, mask=m_edge)
    if p_source is not None:
        source = tl.load(p_indices + edge, mask=m_edge, other=0)
        tl.store(p_source + edge, tl.where(target < num_rows, source, num_columns), mask=m_edge)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    p_source, p_order, p_target, p_indptr, p_indices, p_placed, num_rows, num_columns, num_edges, halvings,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The transpose of sorted sources: where rows begin, targets of the edges, their order in fewer bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0).to(tl.int64) * BLOCK <= num_columns:
        begin = _first_at_least(p_source, at, num_edges, halvings)
        tl.store(p_indptr + at, begin, mask=at <= num_columns)
    m_edge = at < num_edges
    order = tl.load(p_order + at, mask=m_edge, other=0)
    target = tl.load(p_target + order, mask=m_edge, other=0)
    # edges of no row get the last one, to be in range
    tl.store(p_indices + at, tl.maximum(0, tl.minimum(target, num_rows - 1)), mask=m_edge)
    tl.store(p_placed + at, order, mask=m_edge)


_run_measure, _run_place, _run_unpack, _run_turn = (Launcher(k) for k in (_measure, _place, _unpack, _turn))
_run_pack, _run_part, _run_loop, _run_end = (Launcher(k) for k in (_pack, _part, _loop, _end))


def _ends(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """(targets, sources) of the edges; of those that belong to no row (num_rows, num_columns)."""
    if rows.ends is not None:
        ends, rows.ends = rows.ends, None  # the transpose is kept, so once is enough
        return ends
    target = torch.empty_like(rows.indices, dtype=rows.indptr.dtype)
    source = torch.empty_like(rows.indices) if rows.has_rest else None
    counts = (rows.num_rows, rows.num_columns, rows.num_edges, (rows.num_rows + 1).bit_length())
    if rows.num_edges:
        arguments = (rows.indptr, rows.indices, target, source, *counts)
        _run_end(_blocks(rows.num_edges), arguments, {"BLOCK": _BLOCK})
    return target, rows.indices if source is None else source


def packed(rows: Rows) -> torch.Tensor:
    """target << 32 | source of every edge, in their order here."""
    target, source = _ends(rows)
    rows.ends = (target, source)
    return (target.long() << 32) | source


def transposed(rows: Rows) -> Rows:
    """The transpose; its `order[t]` is the edge of `rows` that its edge t is."""
    dtype, device, count = rows.indptr.dtype, rows.indptr.device, rows.num_edges
    target, source = _ends(rows)
    source, order = source.sort(stable=True)
    indptr = torch.empty(rows.num_columns + 1, dtype=dtype, device=device)
    indices, placed = (torch.empty(count, dtype=dtype, device=device) for _ in range(2))
    arrays: tuple[Any, ...] = (source, order, target, indptr, indices, placed)
    _run_turn(
        _blocks(max(count, rows.num_columns + 1)),
        (*arrays, rows.num_rows, rows.num_columns, count, count.bit_length()),
        {"BLOCK": _BLOCK}, memo=_memo(indptr, dtype, source.dtype),
    )  # fmt: skip
    turned = Rows(indptr, indices, rows.num_rows, placed, rows.has_rest)
    turned.is_read = rows.is_read
    return turned


def inverse_degrees(rows: Rows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """1 / the edges of each row, 0 for a row without any."""
    degrees = rows.degrees.to(dtype)
    return torch.where(degrees > 0, 1.0 / degrees, 0.0).to(dtype)
