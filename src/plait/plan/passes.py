"""The steps of a layer with passes of its own, priced as they are added."""

from __future__ import annotations

from plait.cost.machine import MachineProfile
from plait.cost.price import Price, Pricer
from plait.ops.work import Matrix, Request, Work
from plait.plan.fused import FusedStep

__all__ = ["Steps"]


class Steps:
    """Steps in the order they run, forward and then backward."""

    def __init__(self, machine: MachineProfile, float_bytes: int, threads: int | None):
        self.machine = machine
        self.pricer = Pricer(machine, float_bytes, threads)
        self.made: list[FusedStep] = []

    def gemm(
        self,
        title: str,
        phase: str,
        rows: int,
        inner: int,
        cols: int,
        calls: int = 1,
        is_transposed: bool = False,
    ) -> None:
        """`calls` products on plait's own kernel; is_transposed: a weight gradient, summed over the rows."""
        price = self.pricer.price(Request("gemm_transposed" if is_transposed else "gemm", rows, cols, inner))
        table = self.machine.gemm_transposed if is_transposed else self.machine.gemm
        rate = table["plait"].at(inner, cols) * 1e9 * 4 / self.pricer.float_bytes / self.pricer.slowdown
        floor = price.work.bytes_least / self.machine.stream_bytes_per_s
        seconds = max(price.work.flops / rate, floor) + self.machine.call_seconds
        work = price.work
        total = Work(work.flops * calls, work.bytes_least * calls, work.bytes_gathered * calls)
        self.made.append(
            FusedStep(title, phase, Price(seconds * calls, total, "plait", "tall blocks in registers"))
        )

    def gather(
        self,
        title: str,
        phase: str,
        matrix: Matrix,
        cols: int,
        factor: float = 1.0,
        because: str = "one gather",
    ) -> None:
        """A pass over the edges that gathers `cols` columns, in `factor` times a sparse product's time."""
        base = self.pricer.price(Request("spmm", matrix.rows, cols, matrix=matrix, addends=1))
        self.made.append(FusedStep(title, phase, Price(base.seconds * factor, base.work, "plait", because)))

    def stream(self, title: str, phase: str, rows: int, cols: int, parts: int = 1) -> None:
        """A pass over rows in order, `parts` of them read for one written."""
        self.made.append(
            FusedStep(title, phase, self.pricer.price(Request("stream", rows, cols, parts=parts)))
        )
