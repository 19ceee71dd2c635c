"""Seconds of a step on a machine: work over measured rates, on the cheapest backend and blocking.

A sparse product is priced by where its gathered rows are found. The graph's footprint (graph/stats.py) says
which share of them misses a cache of given size; each level has its measured bandwidth. Walking the columns
in slabs makes rows narrower, so more of them fit: whether that pays is part of the price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from plait.cost.machine import MachineProfile, Rates
from plait.cost.work import Matrix, Uniform, Work

_LINE = 64  # bytes of a cache line

__all__ = ["ChainRequest", "Price", "Pricer", "Request", "uniform_matrix"]


@dataclass(frozen=True, slots=True)
class Request:
    """A step in the cost model's words: operation, output rows and columns, inner width, operands."""

    op: str
    rows: int
    cols: int
    inner: int = 0
    matrix: Matrix | None = None
    has_source: bool = False
    addends: int = 0
    parts: int = 1
    is_sparse_left: bool = False


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """Products of the same rows in one pass: what is gathered, (inner, columns) of products and sums."""

    rows: int
    gather: Request | None
    is_kept: bool  # the gathered rows are wanted afterwards
    products: tuple[tuple[int, int], ...]
    sums: tuple[tuple[int, int], ...]
    beside: int  # columns of all other rows that pass by, read or written


@dataclass(frozen=True, slots=True)
class Price:
    """What a step costs and how it would be run, with the reason."""

    seconds: float
    work: Work
    backend: str
    because: str
    slab: int = 0
    gather_seconds: float = 0.0  # the part of it that a sparse product takes, by CSR
    gather_columns: int = 0  # ... of rows this wide
    kind: str = ""  # which correction of the machine profile applies, and what it is a function of
    features: tuple[float, ...] = ()
    uncorrected: float = 0.0
    # what was priced: a calibration prices it again with other constants
    request: Request | ChainRequest | None = field(default=None, repr=False, compare=False)


class Pricer:
    """Prices steps for one machine, element size and number of threads."""

    def __init__(self, machine: MachineProfile, float_bytes: int = 4, threads: int | None = None):
        self.machine = machine
        self.float_bytes = float_bytes
        # rates were measured with machine.threads; fewer threads share the work less
        self.slowdown = machine.threads / max(1, min(threads or machine.threads, machine.threads))
        self._ops: Mapping[str, Callable[[Request], Price]] = {
            "spmm": self._spmm,
            "extremum": self._spmm,
            "extremum_gather": self._ties,
            "gemm": self._gemm,
            "gemm_transposed": self._gemm,
            "spmm_features": self._spmm,
        }

    def price(self, request: Request) -> Price:
        price = self._ops.get(request.op, self._stream)(request)
        return self._corrected(replace(price, request=request), self._kind(request), request.cols)

    def view(self) -> Price:
        """A step that moves no data: some Python."""
        seconds = self.machine.view_seconds or 0.2 * self.machine.call_seconds
        return Price(seconds, Work(0.0, 0.0, 0.0), "view", "no data moves")

    def _kind(self, request: Request) -> str:
        """The kind of step a correction was fitted for.

        All ways to scale a sparse product are one kind: pruning rests on their order in the model.
        """
        return request.op if request.op in self._ops else f"stream:{request.op}"

    def _corrected(self, price: Price, kind: str, cols: int) -> Price:
        """The price by the model times what this machine's steps were seen to take beside it."""
        features = self._features(price.work.bytes_least, cols)
        factor, call = self.machine.correction_of(kind, features), self.machine.call_seconds
        beyond = max(0.0, price.seconds - call)  # the call is what it is
        return replace(
            price, seconds=price.seconds + beyond * (factor - 1.0), kind=kind, features=features,
            gather_seconds=price.gather_seconds * factor, uncorrected=price.seconds,
        )  # fmt: skip

    def _features(self, moved: float, cols: int) -> tuple[float, ...]:
        """What the correction may depend on: 1, bytes against the L3, columns; sizes as powers of two."""
        held = math.log2(max(moved, 1.0) / self.machine.l3_bytes)
        return 1.0, min(4.0, max(-8.0, held)), math.log2(max(1, cols)) - 6.0

    # Sparse products --------------------------------------------------------------------------

    def _spmm(self, request: Request) -> Price:
        matrix = request.matrix
        assert matrix is not None
        work = self._sparse_work(request, matrix)
        shared = self._by_form(request, matrix, work)
        if shared is not None:
            return shared
        best = min(
            ((self.sparse_seconds(request, matrix, slab), slab) for slab in self._slabs(request.cols)),
            key=lambda pair: (pair[0], -pair[1]),
        )
        seconds, slab = best
        is_slabbed = slab < request.cols
        because = (
            f"columns in slabs of {slab}: gathered rows then fit the cache" if is_slabbed else "vector rows"
        )
        torch_seconds = self.sparse_seconds(request, matrix, request.cols) * self.machine.torch_spmm_factor
        if (
            request.op == "spmm"
            and torch_seconds < seconds
            and not request.has_source
            and not request.addends
        ):
            return Price(
                torch_seconds, work, "torch", "torch CSR (MKL) is priced lower", 0, seconds, request.cols
            )
        return Price(seconds, work, "plait", because, slab if is_slabbed else 0, seconds, request.cols)

    def _by_form(self, request: Request, matrix: Matrix, work: Work) -> Price | None:
        """The product in the form the matrix was given: the CSR kernel's seconds over the timed gain."""
        form = {"spmm": matrix.form, "extremum": matrix.form_of_extrema}.get(request.op)
        if form is None or matrix.is_weighted or form.gain(request.cols) <= 1.0:
            return None
        seconds = min(self.sparse_seconds(request, matrix, slab) for slab in self._slabs(request.cols))
        gain = form.gain(request.cols)
        reason = form.because(request.cols)
        return Price(seconds / gain, work, form.name, reason, 0, seconds, request.cols)

    def _slabs(self, cols: int) -> list[int]:
        lanes = 256 // self.float_bytes
        return [cols, *(s for s in (2 * lanes, lanes, lanes // 2) if s < cols)]

    def _sparse_work(self, request: Request, matrix: Matrix) -> Work:
        size = self.float_bytes
        out = matrix.rows * request.cols * size * (1 + request.addends)
        pattern = matrix.edges * (matrix.index_bytes + (size if matrix.is_weighted else 0)) + matrix.rows * 4
        scale = (matrix.columns if request.has_source else 0) * size
        least = out + pattern + scale + min(matrix.columns, matrix.edges) * request.cols * size
        gathered = out + pattern + scale + matrix.edges * request.cols * size
        per_edge = 2.0 if matrix.is_weighted or request.has_source else 1.0
        return Work(per_edge * matrix.edges * request.cols, least, gathered)

    def sparse_seconds(
        self, request: Request, matrix: Matrix, slab: int, l2_share: float = 1.0, is_written: bool = True
    ) -> float:
        """Seconds of a sparse product by plait's kernel: a call, and its passes over slabs of columns."""
        m, size = self.machine, self.float_bytes
        amounts = self.sparse_amounts(request, matrix, slab, l2_share, is_written)
        seconds = sum(amount * m.sparse_seconds(name) for name, amount in amounts.items())
        passes = self._passes(request, slab)
        if matrix.is_weighted:
            # between two products of a step the weights leave the cache: they stream from memory
            seconds += matrix.edges * passes * (m.edge_weight_seconds + size / m.stream_bytes_per_s)
        elif request.has_source:
            seconds += matrix.edges * passes * m.source_scale_seconds
        in_order = (matrix.loops + matrix.rows * request.addends) * request.cols * size
        seconds += in_order / m.stream_bytes_per_s
        if request.op == "extremum":
            seconds *= m.extremum_factor
        # a further pass is one more kernel call, a tenth of what a step costs beside its kernel
        return seconds * self.slowdown + m.call_seconds * (1 + 0.1 * max(0, passes - 1))

    def _passes(self, request: Request, slab: int) -> int:
        return -(-request.cols // max(1, slab)) if request.cols else 0

    def sparse_amounts(
        self, request: Request, matrix: Matrix, slab: int = 0, l2_share: float = 1.0, is_written: bool = True
    ) -> dict[str, float]:
        """How often a sparse product pays each constant of the profile it is linear in (SPARSE_CONSTANTS).

        The step before wrote what is gathered: operands that fit a cache are found there, also at their
        first read.
        """
        m, size = self.machine, self.float_bytes
        slab = slab or request.cols
        passes = self._passes(request, slab)
        row_bytes = max(1, min(slab, request.cols) * size)
        held_bytes = max(_LINE, row_bytes)  # a narrower row still occupies a cache line

        def miss(cache_bytes: float) -> float:
            held = int(0.8 * cache_bytes / held_bytes)
            return 0.0 if held >= matrix.columns else matrix.locality.miss_rate(held)

        miss1 = miss(m.l1_bytes)
        miss2 = min(miss1, miss(m.l2_bytes * l2_share))
        miss3 = min(miss2, miss(m.l3_bytes))
        edges, rows = matrix.edges * passes, matrix.rows * passes
        found = (matrix.edges - matrix.loops) * passes
        gathered = found * max(row_bytes, 32.0)
        row_total = request.cols * size
        written = matrix.rows * row_total if is_written else 0.0
        skew = min(1.0, getattr(matrix.locality, "skew", 0.0))
        return {
            "gather_l2_bytes_per_s": gathered * (1 - miss2),
            "gather_l3_bytes_per_s": gathered * (miss2 - miss3),
            "gather_memory_bytes_per_s": gathered * miss3,
            "write_bytes_per_s": written,
            "edge_seconds": edges,
            "row_seconds": rows,
            "tile_seconds": edges * max(0.0, row_bytes / 512.0 - 1.0),
            "l3_row_seconds": found * (miss2 - miss3),
            "memory_row_seconds": found * miss3,
            "l2_line_seconds": found * (miss1 - miss2) * -(-row_bytes // _LINE),
            "uneven_row_seconds": rows * skew,
            "part_line_seconds": edges if row_bytes % _LINE else 0.0,
            "write_line_seconds": written
            / _LINE
            * self._beyond_l3((matrix.rows + matrix.columns) * row_total),
        }

    def _beyond_l3(self, held: float) -> float:
        """Share of operands of that many bytes which a step does not find in the third-level cache."""
        return min(1.0, max(0.0, 0.5 + 0.5 * math.log2(max(held, 1.0) / self.machine.l3_bytes)))

    def _ties(self, request: Request) -> Price:
        """The gradient of max and min: like a product that reads two rows an edge."""
        matrix = request.matrix
        assert matrix is not None
        work = self._sparse_work(request, matrix)
        seconds = self.sparse_seconds(request, matrix, request.cols) * 2 * self.machine.extremum_factor
        return Price(seconds, work, "plait", "ties share the gradient, as in PyG")

    # Dense products ---------------------------------------------------------------------------

    def _gemm(self, request: Request) -> Price:
        is_transposed = request.op == "gemm_transposed"
        tables = self.machine.gemm_transposed if is_transposed else self.machine.gemm
        size = self.float_bytes
        # for the weight gradient rows are summed over: inner x cols is the weight's shape
        flops = 2.0 * request.rows * request.inner * request.cols
        moved = size * (
            request.rows * (request.inner + request.cols * (1 + request.addends))
            + request.inner * request.cols
        )
        work = Work(flops, moved, moved)
        cached = self.machine.gemm_transposed_cached if is_transposed else self.machine.gemm_cached
        far = self._beyond_l3(moved) if cached else 1.0
        streamed = far * moved / self.machine.stream_bytes_per_s
        options = []
        for backend in tables:
            cols = request.cols if is_transposed else self._columns(request.cols, backend)
            computed = 2.0 * request.rows * request.inner * cols
            near = computed / self._rate(cached or tables, request.inner, cols, backend)
            behind = computed / self._rate(tables, request.inner, cols, backend)
            seconds = max(near * (1.0 - far) + behind * far, streamed) + self.machine.call_seconds
            options.append((seconds, backend))
        seconds, backend = min(options)
        reason = "tall blocks in registers" if backend == "plait" else "MKL is faster at this shape"
        return Price(seconds, work, backend, reason)

    # Chains -------------------------------------------------------------------------------------

    def chain(self, request: ChainRequest) -> Price:
        """A gather whose rows stay in cache, and products that find them there."""
        m, size, rows = self.machine, self.float_bytes, request.rows
        flops = sum(2.0 * rows * a * b for a, b in (*request.products, *request.sums))
        whole = [(a, self._columns(b)) for a, b in request.products]
        products, sums = m.gemm_cached or m.gemm, m.gemm_transposed_cached or m.gemm_transposed
        compute = sum(2.0 * rows * a * b / self._rate(products, a, b) for a, b in whole)
        compute += sum(2.0 * rows * a * b / self._rate(sums, a, b) for a, b in request.sums)
        streamed = rows * request.beside * size
        seconds = max(compute, streamed / m.stream_bytes_per_s * self.slowdown)
        least = gathered = float(streamed)
        if request.gather is not None:
            part = self._chained_gather(request.gather, request)
            seconds, flops = seconds + part.seconds, flops + part.work.flops
            least, gathered = least + part.work.bytes_least, gathered + part.work.bytes_gathered
        parts = len(request.products) + len(request.sums)
        seconds += m.call_seconds * (1 + 0.1 * (parts - 1))
        reason = "one pass over blocks of rows in cache"
        work = Work(flops, least, gathered)
        if request.gather is None:
            price = Price(seconds, work, "plait", reason, request=request)
            return self._corrected(price, "chain", max(b for _, b in (*request.products, *request.sums)))
        price = Price(seconds, work, "plait", reason, 0, part.seconds, request.gather.cols, request=request)
        return self._corrected(price, "chain_gather", request.gather.cols)

    def _chained_gather(self, gather: Request, chain: ChainRequest) -> Price:
        """The sparse product inside: nothing is written unless kept; rows that pass by share the L2."""
        matrix = gather.matrix
        assert matrix is not None
        share = gather.cols / max(1, gather.cols + chain.beside)
        seconds = self.sparse_seconds(gather, matrix, gather.cols, share, chain.is_kept)
        seconds -= self.machine.call_seconds
        work = self._sparse_work(gather, matrix)
        if not chain.is_kept:
            written = matrix.rows * gather.cols * self.float_bytes
            work = Work(work.flops, work.bytes_least - written, work.bytes_gathered - written)
        return Price(max(seconds, 0.0), work, "plait", "")

    def _rate(self, tables: Mapping[str, Rates], inner: int, cols: int, backend: str = "plait") -> float:
        """Flops a second of a product by these tables."""
        return tables[backend].at(inner, cols) * 1e9 * 4 / self.float_bytes / self.slowdown

    def _columns(self, cols: int, backend: str = "plait") -> int:
        """Columns a dense product computes: plait's are whole vectors."""
        lanes = _LINE // self.float_bytes
        return -(-cols // lanes) * lanes if backend == "plait" and cols > lanes else cols

    # Everything that streams --------------------------------------------------------------------

    def _stream(self, request: Request) -> Price:
        moved = self.float_bytes * request.rows * request.cols * (1.0 + request.parts)
        work = Work(request.rows * request.cols * request.parts, moved, moved)
        seconds = moved / self.machine.stream_bytes_per_s * self.slowdown + self.machine.call_seconds
        return Price(seconds, work, "torch", "streams through memory once")


def uniform_matrix(rows: int, columns: int, edges: int, is_weighted: bool) -> Matrix:
    """A matrix of evenly drawn columns, for sparse features."""
    return Matrix(rows, columns, edges, is_weighted, Uniform(columns), Uniform(rows))
