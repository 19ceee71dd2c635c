"""CSR on a GPU, made there with torch's sorts: transpose, edge order, degrees, rows by length, norms.

Nothing here needs triton, and nothing reads a value back to the host for graphs of up to
`_BOUNDED_EDGES` edges: counts that only the device knows are replaced by their upper bounds, and the kernels
skip what is left over. Larger graphs read six numbers once, because idle programs would cost more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from plait.errors import InputError

__all__ = ["Items", "Rows", "gcn_norm", "inverse_degrees", "rows_of", "transposed"]

_BOUNDED_EDGES = 1 << 20
_LARGEST_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Items:
    """What the programs of a launch take up: pieces of long rows, then short rows of similar length together.

    items[k] = (row, begin, end, part): the edges [begin, end) of a row. A piece of a row that was split writes
    the partial result `part`; everything else (part -1) writes its row. Row -1 is padding. splits[k] = (row,
    first part, last part). Pieces lie on fixed edges and partial results are added in their order, so results
    do not depend on how the device schedules the programs.
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
    """A sparse matrix by rows on a device; `order[e]` is the edge's number in the data it was made from."""

    def __init__(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        num_columns: int,
        order: torch.Tensor | None = None,
    ):
        self.indptr, self.indices, self.order = indptr, indices, order
        self.num_rows, self.num_columns = indptr.numel() - 1, num_columns
        self.num_edges = indices.numel()
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


def _arrange(rows: Rows, short: int, most: int) -> Items:
    """See Items. Rows of up to `short` edges are grouped by powers of two and keep their order inside a group:
    neighbouring rows of a mesh read the same neighbours, sorting them by exact length would part them."""
    degrees = rows.degrees
    is_long = degrees > short
    counts = torch.where(is_long, (degrees + (most - 1)) // most, 0)
    ends = counts.cumsum(0)
    is_split = counts > 1
    part_ends = torch.where(is_split, counts, 0).cumsum(0)
    split_ends = is_split.cumsum(0)
    num_pieces, num_parts, num_splits, num_long = _sizes(rows, short, most, ends, part_ends, split_ends, is_long)
    pieces = _pieces(rows, most, ends, part_ends, counts, num_pieces)
    # 0 for up to one edge, then the bits of degree - 1: 2, 3 to 4, 5 to 8, ...
    group = torch.frexp((degrees - 1).clamp(min=0).float()).exponent
    class_of = torch.where(is_long, -1, group).to(torch.int8)
    by_length = class_of.sort(stable=True, descending=True).indices[: rows.num_rows - num_long]
    is_padding = is_long[by_length]  # only where the number of long rows was not read
    begin = rows.indptr[by_length]
    end = torch.where(is_padding, begin, rows.indptr[by_length + 1])
    row = torch.where(is_padding, -1, by_length).to(begin.dtype)
    singles = torch.stack([row, begin, end, torch.full_like(row, -1)], 1)
    number = torch.arange(1, num_splits + 1, device=degrees.device)
    split = torch.searchsorted(split_ends, number).clamp(max=max(0, rows.num_rows - 1))
    is_real = number <= _last(split_ends)
    last_part = part_ends[split] if rows.num_rows else split
    first_part = last_part - counts[split] if rows.num_rows else split
    splits = torch.stack([torch.where(is_real, split, -1), first_part, last_part], 1).to(rows.indptr.dtype)
    items = torch.cat([pieces, singles.to(rows.indptr.dtype)])
    return Items(items, splits, num_pieces, singles.shape[0], num_splits, num_parts)


def _sizes(
    rows: Rows,
    short: int,
    most: int,
    ends: torch.Tensor,
    part_ends: torch.Tensor,
    split_ends: torch.Tensor,
    is_long: torch.Tensor,
) -> tuple[int, int, int, int]:
    """(pieces, parts, split rows, long rows): read from the device, or for small graphs their bounds.

    The bound of the long rows is 0: the list of short rows then holds padding in their place.
    """
    num_edges, whole = rows.num_edges, rows.num_edges // most
    most_long = min(rows.num_rows, num_edges // (short + 1))
    most_split = min(rows.num_rows, num_edges // (max(short, most) + 1))
    if num_edges <= _BOUNDED_EDGES:
        return most_long + whole, most_split + whole if most_split else 0, most_split, 0
    found = torch.stack([ends[-1], part_ends[-1], split_ends[-1], is_long.sum()]).tolist()
    pieces, parts, splits, long = (int(n) for n in found)
    return pieces, parts, splits, long


def _last(ends: torch.Tensor) -> torch.Tensor:
    return ends[-1:] if ends.numel() else ends.new_zeros(1)


def _pieces(
    rows: Rows, most: int, ends: torch.Tensor, part_ends: torch.Tensor, counts: torch.Tensor, num_pieces: int
) -> torch.Tensor:
    """The items of the long rows' pieces, padded with row -1 to `num_pieces`."""
    number = torch.arange(num_pieces, device=ends.device)
    if not num_pieces:
        return torch.empty((0, 4), dtype=rows.indptr.dtype, device=ends.device)
    row = torch.searchsorted(ends, number, right=True).clamp(max=rows.num_rows - 1)
    count = counts[row]
    inside = number - (ends[row] - count)
    begin = rows.indptr[row] + inside * most
    end = torch.minimum(begin + most, rows.indptr[row + 1])
    part = torch.where(count > 1, part_ends[row] - count + inside, -1)
    is_real = number < _last(ends)
    row, end = torch.where(is_real, row, -1), torch.where(is_real, end, begin)
    part = torch.where(is_real, part, -1)
    return torch.stack([row, begin, end, part], 1).to(rows.indptr.dtype)


def _index_dtype(*sizes: int) -> torch.dtype:
    return torch.int32 if max(sizes) <= _LARGEST_INT32 else torch.int64


def rows_of(edge_index: torch.Tensor, num_rows: int, num_columns: int | None = None) -> Rows:
    """The matrix with an entry (target, source) for every edge of edge_index[2, edges] = (sources, targets).

    Sources ascend inside a row; repeated edges keep their order. `order` is where each edge was in edge_index.
    """
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise InputError(f"edge_index has shape {tuple(edge_index.shape)}; pass one of shape [2, edges]")
    num_columns = num_rows if num_columns is None else num_columns
    source, target = edge_index[0].to(torch.int64), edge_index[1].to(torch.int64)
    dtype = _index_dtype(num_rows, num_columns, source.numel())
    # one sort of (target, source) pairs; 2**32 sources do not occur on one device
    key, order = ((target << 32) | source).sort(stable=True)
    return Rows(_pointers(key >> 32, num_rows, dtype), (key & 0xFFFFFFFF).to(dtype), num_columns, order.to(dtype))


def _pointers(sorted_rows: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    starts = torch.arange(num_rows + 1, device=sorted_rows.device, dtype=sorted_rows.dtype)
    return torch.searchsorted(sorted_rows, starts).to(dtype)


def transposed(rows: Rows) -> Rows:
    """The transpose; its `order[t]` is the edge of `rows` that its edge t is."""
    target = torch.searchsorted(
        rows.indptr, torch.arange(rows.num_edges, device=rows.indptr.device, dtype=rows.indptr.dtype), right=True
    )
    source, order = rows.indices.sort(stable=True)
    indptr = _pointers(source, rows.num_columns, rows.indptr.dtype)
    indices = (target - 1)[order].to(rows.indices.dtype)
    return Rows(indptr, indices, rows.num_rows, order.to(rows.indptr.dtype))


def inverse_degrees(rows: Rows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """1 / the edges of each row, 0 for a row without any."""
    degrees = rows.degrees.to(dtype)
    return torch.where(degrees > 0, 1.0 / degrees, 0.0).to(dtype)


def gcn_norm(rows: Rows, self_loops: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(edges + self_loops) ** -1/2 of every row, 0 where that is infinite."""
    degrees = rows.degrees.to(dtype) + self_loops
    return torch.where(degrees > 0, degrees.rsqrt(), 0.0).to(dtype)
