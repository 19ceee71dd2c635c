"""Seconds of a step on a machine: work over measured rates, on the cheapest backend and blocking.

A sparse product is priced by where its gathered rows are found. The graph's footprint (graph/stats.py) says
which share of them misses a cache of given size; each level has its measured bandwidth. Walking the columns
in slabs makes rows narrower, so more of them fit: whether that pays is part of the price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.cost.machine import MachineProfile, Rates
from plait.ops.work import ChainRequest, Matrix, Request, Uniform, Work, dense_flops, row_flops, sparse_flops

__all__ = ["Price", "Pricer", "uniform_matrix"]

# Times of passes over the edges relative to a sparse product of the same width, by operation and kind: from
# a few timings on a busy machine, at widths 64 and 256; not fitted.
_PASSES = {
    "gate": 1.1, "gate kept": 1.4, "gate_targets": 1.1, "gate_sources": 1.8,
    "attend gat": 1.1, "attend leaky": 1.9, "attend dot": 0.8,
    "attend_sources gat": 1.6, "attend_sources leaky": 1.45, "attend_sources dot": 1.3,
    "attend_targets leaky": 1.3, "attend_targets dot": 1.1,
    "attend_again gat": 1.4, "attend_again leaky": 2.7, "attend_again dot": 1.1,
    "aggregate": 1.5, "aggregate_sources": 1.2,
    "basis_sums": 1.1, "basis_sources": 1.1, "basis_shares": 2.0,
    "gate relu": 1.1, "gate relu kept": 1.2, "gate_targets relu": 1.1, "gate_sources relu": 1.2,
    "edge_dots": 1.0, "edge_sums": 1.0,
}  # fmt: skip


# Seconds one length of a recurrence costs on top of its arithmetic: some dozen torch calls, where torch's own
# LSTM makes few. Measured on lists of 30 to 60 elements of 40 to 100 nodes, one thread.
_LENGTHS = {
    "sequence": 60e-6, "sequence padded": 17e-6, "sequence_back": 110e-6, "sequence_back padded": 40e-6,
}  # fmt: skip
# passes over blocks of edges with products per edge
_BLOCKS = ("messages", "messages_back", "attained", "attained_back", "leaky_scores", "leaky_scores_back")
# time of a pass of a known message relative to a sparse product of as many columns; not fitted
_FORMS = {"score": 1.0, "film": 1.2, "softmax": 2.0, "gated": 1.5, "crystal": 2.5}
_KEPT = 0.6  # of a pass over sources, where the weights and slopes of its edges were kept
_BY_BIT = 2.0  # time of a product by set bits relative to one in tall blocks
_SCORE = 5.0  # edge times of one score: exponential, weight


def _targets_first(edges_per_target: float) -> float:
    """Backward passes of attention that begin with the targets relative to those that begin with the sources.

    Timed on one core, 4 heads of 16: 0.57-0.82 at 2 edges per target, 0.77-0.95 at 4.5, 0.94-1.04 at 9,
    1.12-1.19 at 31.
    """
    return min(1.2, max(0.6, 0.55 + 0.14 * math.log2(max(1.0, edges_per_target))))


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
    copy_seconds: float = 0.0  # the part of an exchange that is spent at this end, packing and unpacking


class Pricer:
    """Prices steps for one machine, element size and number of threads."""

    def __init__(self, machine: MachineProfile, float_bytes: int = 4, threads: int | None = None):
        self.machine = machine
        self.float_bytes, self._threads = float_bytes, threads
        # rates were measured with machine.threads; fewer threads share the work less
        self.slowdown = machine.threads / max(1, min(threads or machine.threads, machine.threads))
        self._ops: Mapping[str, Callable[[Request], Price]] = {
            "spmm": self._spmm,
            "extremum": self._spmm,
            "extremum_gather": self._ties,
            "gemm": self._gemm,
            "gemm_transposed": self._gemm,
            "spmm_features": self._sparse_features,
            "heads": self._heads,
            "relate": self._gemms,
            "relate_weights": self._gemms,
            "aggregate_messages": self._blocks,
            "aggregate_messages_back": self._blocks,
            **dict.fromkeys({name.partition(" ")[0] for name in _PASSES}, self._pass),
            **dict.fromkeys({name.partition(" ")[0] for name in _LENGTHS}, self._recurrence),
            **dict.fromkeys(_BLOCKS, self._messages),
            **dict.fromkeys(("edge_dots", "edge_sums", "edge_softmax", "edge_softmax_back"), self._piece),
        }

    def on(self, machine: MachineProfile) -> Pricer:
        """The same for another machine."""
        return Pricer(machine, self.float_bytes, self._threads)

    def price(self, request: Request | ChainRequest | None) -> Price:
        """The price of a step; None stands for a step that moves no data."""
        if request is None:
            return self._view()
        if isinstance(request, ChainRequest):
            return self._chain(request)
        price = self._ops.get(request.op, self._stream)(request)
        return self._corrected(price, self._kind(request), request.cols)

    def copy_seconds(self, numbers: float) -> float:
        """The price of copying this many numbers in one call."""
        moved = 2 * numbers * self.float_bytes
        return self.machine.call_seconds + moved * self.slowdown / self.machine.stream_bytes_per_s

    def _view(self) -> Price:
        """The price of a step that moves no data: Python only."""
        seconds = self.machine.view_seconds or 0.2 * self.machine.call_seconds
        return Price(seconds, Work(0.0, 0.0, 0.0), "view", "no data moves")

    def _kind(self, request: Request) -> str:
        """The kind of step a correction was fitted for.

        All ways to scale a sparse product are one kind, because pruning relies on their order in the model.
        """
        if request.op not in self._ops:
            return f"stream:{request.op}"
        return f"{request.op} {request.kind}" if request.kind else request.op

    def _corrected(self, price: Price, kind: str, cols: int) -> Price:
        """The modelled price, times the ratio of measured to modelled time on this machine."""
        features = self._features(price.work.bytes_least, cols)
        factor, call = self.machine.correction_of(kind, features), self.machine.call_seconds
        factor *= self.machine.pass_factor(kind)
        beyond = max(0.0, price.seconds - call)  # the cost of the call is not corrected
        return replace(
            price, seconds=price.seconds + beyond * (factor - 1.0), kind=kind, features=features,
            gather_seconds=price.gather_seconds * factor, uncorrected=price.seconds,
        )  # fmt: skip

    def _features(self, moved: float, cols: int) -> tuple[float, ...]:
        """The features of the correction: 1, bytes relative to the L3, columns; sizes as log2."""
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
            ((self._sparse_seconds(request, matrix, slab), slab) for slab in self._slabs(request.cols)),
            key=lambda pair: (pair[0], -pair[1]),
        )
        seconds, slab = best
        is_slabbed = slab < request.cols
        because = (
            f"columns in slabs of {slab}: gathered rows then fit the cache" if is_slabbed else "vector rows"
        )
        torch_seconds = self._sparse_seconds(request, matrix, request.cols) * self.machine.torch_spmm_factor
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
        """The product in the chosen form of the matrix: the CSR kernel's seconds over the timed gain."""
        form = {"spmm": matrix.form, "extremum": matrix.form_of_extrema}.get(request.op)
        if form is None or matrix.is_weighted or form.gain(request.cols) <= 1.0:
            return None
        seconds = min(self._sparse_seconds(request, matrix, slab) for slab in self._slabs(request.cols))
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
        flops = sparse_flops(matrix.edges, request.cols, matrix.is_weighted or request.has_source)
        return Work(float(flops), least, gathered)

    def _sparse_seconds(self, request: Request, matrix: Matrix, slab: int, l2_share: float = 1.0) -> float:
        m, size = self.machine, self.float_bytes
        passes = -(-request.cols // max(1, slab)) if request.cols else 0
        row_bytes = max(1, min(slab, request.cols) * size)
        line_bytes = max(64, row_bytes)  # a narrower row still occupies a cache line
        miss2 = matrix.locality.miss_rate(int(m.l2_bytes * l2_share * 0.8 / line_bytes))
        miss3 = min(miss2, matrix.locality.miss_rate(int(m.l3_bytes * 0.8 / line_bytes)))
        gathered = (matrix.edges - matrix.loops) * passes * max(row_bytes, 32.0)
        levels = (
            (1 - miss2) / m.gather_l2_bytes_per_s
            + (miss2 - miss3) / m.gather_l3_bytes_per_s
            + miss3 / m.gather_memory_bytes_per_s
        )
        rows = (matrix.edges - matrix.loops) * passes
        found = rows * ((miss2 - miss3) * m.l3_row_seconds + miss3 * m.memory_row_seconds)
        lanes_bytes = 512.0
        tiles = max(0.0, row_bytes / lanes_bytes - 1.0)
        per_edge = m.edge_seconds + m.tile_seconds * tiles
        if matrix.is_weighted:
            # between two products of a step the edge weights leave the cache: they stream from memory
            per_edge += m.edge_weight_seconds + size / m.stream_bytes_per_s
        elif request.has_source:
            per_edge += m.source_scale_seconds
        row_total = request.cols * size
        in_order = (matrix.loops + matrix.rows * request.addends) * row_total
        seconds = (
            gathered * levels
            + found
            + matrix.edges * passes * per_edge
            + matrix.rows * passes * m.row_seconds
            + matrix.rows * row_total / m.write_bytes_per_s
            + in_order / m.stream_bytes_per_s
            + passes * m.pass_seconds
        )
        if request.op == "extremum":
            seconds *= m.extremum_factor
        # a further pass is one more kernel call, a tenth of what a step costs on top of its kernel
        return seconds * self.slowdown + m.call_seconds * (1 + 0.1 * max(0, passes - 1))

    def _sparse_features(self, request: Request) -> Price:
        """A product with sparse features, or with their transpose for the weight's gradient.

        PyG stores weights as [out, in]: the kernel gathers rows of a transposed copy, and the gradient it
        computes is transposed back. What is gathered is summed first, because 0 * NaN is NaN.
        """
        matrix, m, size = request.matrix, self.machine, self.float_bytes
        assert matrix is not None
        weight_rows = matrix.rows if request.kind == "transposed" else matrix.columns
        each = m.turned_byte_seconds or 1.0 / m.stream_bytes_per_s
        turned = 2 * weight_rows * request.cols * size * each
        summed = matrix.columns * request.cols * size / m.stream_bytes_per_s * self.slowdown
        product = self._sparse_seconds(request, matrix, request.cols)
        work = self._sparse_work(request, matrix)
        return Price(product + turned + summed, work, "plait", "only the non-zeros of the features")

    def _ties(self, request: Request) -> Price:
        """The gradient of max and min: like a product that reads two rows per edge."""
        matrix = request.matrix
        assert matrix is not None
        work = self._sparse_work(request, matrix)
        seconds = self._sparse_seconds(request, matrix, request.cols) * 2 * self.machine.extremum_factor
        return Price(seconds, work, "plait", "ties share the gradient, as in PyG")

    def _pass(self, request: Request) -> Price:
        """A pass over the edges that gathers rows and does more with them than add them up."""
        matrix = request.matrix
        assert matrix is not None
        kind, _, variant = request.kind.partition(" ")
        work = self._sparse_work(request, matrix)
        if request.op.startswith("attend"):
            seconds = self._attention(request, matrix, kind, variant)
        else:
            factor = _PASSES[f"{request.op} {request.kind}".rstrip()]
            seconds = self._gather(request, request.cols) * factor * request.parts
            work = _times(work, request.parts)
        return Price(seconds, work, "plait", "one pass over the edges")

    def _piece(self, request: Request) -> Price:
        """A pass over edges that gathers `inner` columns, or reads rows per edge in their order."""
        matrix = request.matrix
        if matrix is not None and not request.kind:
            return self._pass(replace(request, cols=request.inner))
        rows = (request.rows, request.cols) if matrix is None else (matrix.edges, request.inner)
        streamed = self._stream(Request(request.op, *rows, parts=request.parts))
        return replace(streamed, backend="plait", because="rows per edge are read in order")

    def _blocks(self, request: Request) -> Price:
        """Rows per edge computed in blocks: their products, and what is streamed with them."""
        matrix = request.matrix
        assert matrix is not None
        streamed = self._stream(request)
        if not request.inner:
            return replace(streamed, backend="plait", because="blocks of edges in cache")
        product = self._gemm(replace(request, op="gemm", matrix=None))
        work = _total(product.work, [streamed])
        return Price(product.seconds + streamed.seconds, work, "plait", "blocks of edges in cache")

    def _gather(self, request: Request, cols: int) -> float:
        """Seconds of a sparse product that gathers this many columns, by the same matrix."""
        return self.price(Request("spmm", request.rows, cols, matrix=request.matrix, addends=1)).seconds

    def _attention(self, request: Request, matrix: Matrix, kind: str, variant: str) -> float:
        """Seconds of a pass of attention; `variant` where the backward pass begins with the targets.

        In that case both passes take the time of the passes that begin with the sources, times a measured
        ratio that depends on the edges per target.
        """
        scored = matrix.edges * request.parts * _SCORE * self.machine.edge_seconds * self.slowdown
        sharing = 1.0 + self.machine.head_share * (request.inner - 1)
        if request.inner > 1 and kind == "dot" and request.op != "attend_targets":
            sharing *= 2.0  # the factors are those of keys and values; a shared row is both
        if not variant:
            return self._gather(request, request.cols) * _PASSES[f"{request.op} {kind}"] * sharing + scored
        targets = matrix.columns if variant == "kept" else matrix.rows
        beside = _targets_first(matrix.edges / max(1, targets))
        doubled = request.cols * 2 if kind == "leaky" and variant == "first" else request.cols
        sources = self._gather(request, doubled) * _PASSES[f"attend_sources {kind}"] + scored
        if variant == "kept":
            return beside * _KEPT * sources
        columns = request.parts if kind == "gat" else request.cols // (2 if kind == "dot" else 1)
        factor = 1.0 if kind == "gat" else _PASSES[f"attend_targets {kind}"]
        near = self._gather(request, columns) * factor + (0.0 if kind == "gat" else scored)
        dots = self._stream(Request("attend_dots", matrix.rows, request.cols, parts=1)).seconds
        return beside * (near + dots + (1.0 - _KEPT) * sources)

    def _heads(self, request: Request) -> Price:
        """`parts` products by head on plait's own kernel, in one pass over the rows."""
        one = self._gemm(replace(request, op="gemm"))
        rate = self._rate(self.machine.gemm, request.inner, request.cols)
        floor = one.work.bytes_least / self.machine.stream_bytes_per_s
        seconds = max(one.work.flops / rate, floor) * request.parts + self.machine.call_seconds
        work = _times(one.work, request.parts)
        return Price(seconds, work, "plait", "tall blocks in registers, head by head")

    def _messages(self, request: Request) -> Price:
        """Blocks of edges: rows of both ends, products by edge, sums; and all of it back."""
        matrix, is_back = request.matrix, request.op.endswith("back")
        assert matrix is not None
        if request.kind in _FORMS:
            return self._form(request, matrix, is_back)
        if request.kind == "rectified":
            return self._tiles(request, matrix, is_back)
        edges, columns = matrix.edges, request.inner
        gather = replace(request, op="spmm", cols=columns)
        products = [self._gemm(Request("gemm", edges, b, a)) for a, b in request.products]
        products *= 3 if is_back else 1
        if request.kind == "marked":
            products.pop()  # which edge attained the extremum is known without the last product
        streams = [Request("stream", edges, columns, parts=4 if is_back else 2)]
        streams.append(Request("stream", edges, request.cols, parts=3 if is_back else 1))
        parts = products + [self._stream(part) for part in streams]
        seconds = self._sparse_seconds(gather, matrix, columns) + sum(part.seconds for part in parts)
        return Price(seconds, _total(self._sparse_work(gather, matrix), parts), "plait", "blocks in cache")

    def _form(self, request: Request, matrix: Matrix, is_back: bool) -> Price:
        """Messages of a known form: a pass over the edges; backwards over targets, and over sources."""
        columns = (1 + is_back) * request.inner
        seconds = self._gather(request, columns) * _FORMS[request.kind] * (1.0 + 0.5 * is_back)
        work = self._sparse_work(replace(request, cols=columns), matrix)
        return Price(seconds, work, "plait", "one pass over the edges")

    def _tiles(self, request: Request, matrix: Matrix, is_back: bool) -> Price:
        """Tiles of edges: their product stays in cache; backwards two gathers, and products of set bits."""
        ((inner, outer),) = request.products
        gather = replace(request, op="spmm", cols=inner)
        rows, times = (min(matrix.rows, matrix.edges), 3 * _BY_BIT) if is_back else (matrix.edges, 1.0)
        flops = 2.0 * rows * inner * outer
        seconds = times * flops / self._rate(self.machine.gemm, inner, outer)
        seconds += (1 + is_back) * self._sparse_seconds(gather, matrix, inner)
        reduced = self._stream(Request("stream", matrix.rows, outer, parts=2))
        work = _total(self._sparse_work(gather, matrix), [reduced])
        work = replace(work, flops=work.flops + (3 if is_back else 1) * flops)
        return Price(seconds + reduced.seconds, work, "plait", "tiles in cache")

    def _recurrence(self, request: Request) -> Price:
        """Gates of this many steps, all of one length together: products of states, passes over the gates."""
        states = Request("gemm", request.rows, request.cols, request.inner)
        gates = replace(request, op="gates")
        parts = [self._gemm(states)] * (2 if request.op.endswith("back") else 1) + [self._stream(gates)]
        work = _total(Work(0.0, 0.0, 0.0), parts)
        each = _LENGTHS[f"{request.op} {request.kind}".rstrip()]
        seconds = sum(part.seconds for part in parts) + request.calls * each
        return Price(seconds, work, "torch", "one list length after another")

    # Dense products ---------------------------------------------------------------------------

    def _gemm(self, request: Request) -> Price:
        is_transposed = request.op == "gemm_transposed"
        tables = self.machine.gemm_transposed if is_transposed else self.machine.gemm
        size = self.float_bytes
        # for the weight gradient rows are summed over: inner x cols is the weight's shape
        flops = float(dense_flops(request.rows, request.inner, request.cols))
        moved = size * (
            request.rows * (request.inner + request.cols * (1 + request.addends))
            + request.inner * request.cols
        )
        work = Work(flops, moved, moved)
        options = []
        for backend, rates in tables.items():
            rate = rates.at(request.inner, request.cols) * 1e9 * 4 / size / self.slowdown
            rate /= self._reread(request.inner, request.cols) if backend == "plait" else 1.0
            seconds = max(flops / rate, moved / self.machine.stream_bytes_per_s) + self.machine.call_seconds
            options.append((seconds, backend))
        seconds, backend = min(options)
        by_torch = "MKL is faster at this shape" if "plait" in tables else "torch's dense product"
        reason = "tall blocks in registers" if backend == "plait" else by_torch
        return Price(seconds, work, backend, reason)

    def _gemms(self, request: Request) -> Price:
        """One product per part, each on its share of the rows."""
        op = "gemm_transposed" if request.op == "relate_weights" else "gemm"
        one = self._gemm(replace(request, op=op, rows=max(1, request.rows // request.parts)))
        work = _times(one.work, request.parts)
        return Price(one.seconds * request.parts, work, "plait", "one product per relation")

    # Chains -------------------------------------------------------------------------------------

    def _chain(self, request: ChainRequest) -> Price:
        """A gather whose rows stay in cache, and products that find them there."""
        m, size, rows = self.machine, self.float_bytes, request.rows
        flops = float(sum(dense_flops(rows, a, b) for a, b in (*request.products, *request.sums)))
        compute = sum(2.0 * rows * a * b / self._rate(m.gemm, a, b) for a, b in request.products)
        compute += sum(2.0 * rows * a * b / self._rate(m.gemm_transposed, a, b) for a, b in request.sums)
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
            price = Price(seconds, work, "plait", reason)
            return self._corrected(price, "chain", max(b for _, b in (*request.products, *request.sums)))
        price = Price(seconds, work, "plait", reason, 0, part.seconds, request.gather.cols)
        return self._corrected(price, "chain_gather", request.gather.cols)

    def _chained_gather(self, gather: Request, chain: ChainRequest) -> Price:
        """The sparse product inside: nothing is written unless kept; the chain's other rows share the L2."""
        matrix = gather.matrix
        assert matrix is not None
        share = gather.cols / max(1, gather.cols + chain.beside)
        seconds = (
            self._sparse_seconds(gather, matrix, gather.cols, l2_share=share) - self.machine.call_seconds
        )
        work = self._sparse_work(gather, matrix)
        if not chain.is_kept:
            written = matrix.rows * gather.cols * self.float_bytes
            seconds -= written / self.machine.write_bytes_per_s * self.slowdown
            work = Work(work.flops, work.bytes_least - written, work.bytes_gathered - written)
        return Price(max(seconds, 0.0), work, "plait", "")

    def _rate(self, tables: Mapping[str, Rates], inner: int, cols: int) -> float:
        """Multiply-adds of plait's own kernel, in flops per second."""
        rate = tables["plait"].at(inner, cols) * 1e9 * 4 / self.float_bytes / self.slowdown
        return rate / self._reread(inner, cols)

    def _reread(self, inner: int, cols: int) -> float:
        """How much longer plait's kernel takes with a weight larger than the caches.

        Each of its blocks of rows reads all of the weight: 1.5 to 4 times MKL's time from 2048 x 2048 on.
        """
        return 3.0 if inner * cols * self.float_bytes > self.machine.l3_bytes / 2 else 1.0

    # Everything that streams --------------------------------------------------------------------

    def _stream(self, request: Request) -> Price:
        moved = self.float_bytes * request.rows * request.cols * (1.0 + request.parts)
        work = Work(row_flops(request.rows, request.cols, request.parts), moved, moved)
        seconds = moved / self.machine.stream_bytes_per_s * self.slowdown + self.machine.call_seconds
        return Price(seconds, work, "torch", "streams through memory once")


def _times(work: Work, count: int) -> Work:
    return Work(count * work.flops, count * work.bytes_least, count * work.bytes_gathered)


def _total(first: Work, parts: Sequence[Price]) -> Work:
    works = [first, *(part.work for part in parts)]
    return Work(
        sum(work.flops for work in works),
        sum(work.bytes_least for work in works),
        sum(work.bytes_gathered for work in works),
    )


def uniform_matrix(rows: int, columns: int, edges: int, is_weighted: bool) -> Matrix:
    """A matrix with columns drawn uniformly, as a model of sparse features."""
    return Matrix(rows, columns, edges, is_weighted, Uniform(columns), Uniform(rows))
