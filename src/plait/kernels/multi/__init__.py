"""Several aggregators of neighbours in one pass: mean, sum, var, std, max, min, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plait.kernels import launch
from plait.kernels.compiled import stored
from plait.kernels.multi import cpu
from plait.kernels.operands import float_bits, read_rows, write_rows
from plait.kernels.spmm import Pattern

__all__ = ["Layout", "aggregate", "aggregate_shares", "aggregate_sources"]

_SERIAL_BELOW = 1 << 17  # edges times columns
_PIECE_ROWS = 512


@dataclass(frozen=True)
class Layout:
    """How the results lie: for every tower the aggregators side by side, in the order of `names`.

    Where a variance is wanted and no mean, the mean follows the names in a tower's columns, for backward.
    """

    names: tuple[str, ...]
    width: int
    towers: int = 1

    @property
    def has_spread(self) -> bool:
        return "var" in self.names or "std" in self.names

    @property
    def has_ends(self) -> bool:
        return "max" in self.names or "min" in self.names

    @property
    def kept(self) -> tuple[str, ...]:
        """The names, and the mean where it is kept with them."""
        return (*self.names, "mean") if self.has_spread and "mean" not in self.names else self.names

    @property
    def columns(self) -> int:
        """Columns of a node's rows, all towers."""
        return self.width * self.towers

    @property
    def sections(self) -> int:
        return cpu.sections(self.has_spread, self.has_ends)

    def offsets(self, size: int) -> list[int]:
        """Byte offsets of all aggregators inside a tower's columns; -1: not there."""
        names = self.kept
        return [names.index(n) * self.width * size if n in names else -1 for n in cpu.AGGREGATORS]


_forward_address = stored("multi", cpu.forward)
_shares_address = stored("multi-shares", cpu.shares)
_sources_address = stored("multi-sources", cpu.sources)


def aggregate(
    pattern: Pattern, x: torch.Tensor, layout: Layout, out: torch.Tensor, ties: torch.Tensor | None = None
) -> torch.Tensor:
    """out[i] = every aggregator of `layout.kept` of x[j] over the edges of row i; 0 for a row without edges.

    ties[i], 2 * width a tower, gets the number of edges that attain the max and the min.
    """
    bits, dtype, rows, size = float_bits("x", x), x.dtype, pattern.num_rows, x.element_size()
    at = cpu.FORWARD
    words = at.over(pattern.addresses)
    words[at.last_edge] = max(0, pattern.num_edges - 1)
    words[at.width], words[at.towers] = layout.width, layout.towers
    x = read_rows(words, at.x, "x", x, dtype, pattern.num_columns, layout.columns, True)
    write_rows(words, at.out, "out", out, dtype, rows, len(layout.kept) * layout.columns)
    words[at.tower] = len(layout.kept) * layout.width * size
    words[at.mean : at.ties] = [*layout.offsets(size)]
    write_rows(words, at.ties, "ties", ties, dtype, rows, 2 * layout.columns)
    address = _forward_address(bits, pattern.index_bits, ties is not None)
    at.run(address, words, pattern.threads(layout.columns, _SERIAL_BELOW))
    return out


def aggregate_shares(
    pattern: Pattern,
    layout: Layout,
    grad: torch.Tensor,
    out: torch.Tensor,
    ties: torch.Tensor | None,
    shares: torch.Tensor,
) -> torch.Tensor:
    """shares[i] = the gradients of row i as the pass over sources reads them, layout.sections rows a tower.

    grad and out have the columns of `layout.kept`.
    """
    bits, dtype, rows, size = float_bits("grad", grad), grad.dtype, pattern.num_rows, grad.element_size()
    columns = len(layout.kept) * layout.columns
    at = cpu.SHARES
    words = at.words()
    words[at.rows], words[at.piece_rows], words[at.indptr] = rows, _PIECE_ROWS, pattern.addresses[2]
    words[at.width], words[at.towers] = layout.width, layout.towers
    grad = read_rows(words, at.grad, "grad", grad, dtype, rows, columns)
    out = read_rows(words, at.out, "out", out, dtype, rows, columns)
    words[at.tower] = len(layout.kept) * layout.width * size
    words[at.mean : at.ties] = [*layout.offsets(size)]
    ties = read_rows(words, at.ties, "ties", ties, dtype, rows, 2 * layout.columns)
    write_rows(words, at.shares, "shares", shares, dtype, rows, layout.sections * layout.columns)
    address = _shares_address(bits, pattern.index_bits, layout.has_spread, layout.has_ends)
    threads = launch.num_threads() if rows * shares.shape[1] > _SERIAL_BELOW else 1
    at.run(address, words, threads)
    return shares


def aggregate_sources(
    transpose: Pattern, x: torch.Tensor, layout: Layout, shares: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """out[j] = the gradient of x[j], summed over its targets' shares."""
    bits, dtype, rows, columns = float_bits("x", x), x.dtype, transpose.num_rows, layout.columns
    at = cpu.SOURCES
    words = at.over(transpose.addresses)
    words[at.last_edge] = max(0, transpose.num_edges - 1)
    words[at.width], words[at.towers] = layout.width, layout.towers
    x = read_rows(words, at.x, "x", x, dtype, rows, columns)
    sections = layout.sections * columns
    shares = read_rows(words, at.shares, "shares", shares, dtype, transpose.num_columns, sections, True)
    write_rows(words, at.out, "out", out, dtype, rows, columns)
    address = _sources_address(bits, transpose.index_bits, layout.has_spread, layout.has_ends)
    at.run(address, words, transpose.threads(columns, _SERIAL_BELOW))
    return out
