"""Plans of layers lowered to pieces: one way to compute them, its steps priced and shown."""

from __future__ import annotations

from collections.abc import Mapping

from plait.cost.machine import MachineProfile
from plait.cost.price import Pricer
from plait.ops.work import Matrix, Request
from plait.plan.fused import FusedCandidate, FusedPlan, FusedStep, choose_among

__all__ = ["Pieces"]


class Pieces:
    """The steps of one layer, priced as they are named; backward steps are left out of inference."""

    def __init__(
        self,
        layer: str,
        matrix: Matrix,
        machine: MachineProfile,
        *,
        is_training: bool,
        wants_input_grad: bool,
        float_bytes: int,
        threads: int,
        memory_limit: int | None,
    ):
        self.layer, self.matrix, self.machine = layer, matrix, machine
        self.is_training, self.wants_input_grad = is_training, wants_input_grad
        self.float_bytes, self.memory_limit = float_bytes, memory_limit
        self.pricer = Pricer(machine, float_bytes, threads)
        self.steps: list[FusedStep] = []
        self.held = 0  # numbers kept or made

    def project(self, rows: int, inner: int, cols: int) -> Pieces:
        """x W once a node, and its gradients."""
        self._add(f"project -> {rows}x{cols}", "fwd", Request("gemm", rows, cols, inner))
        if self.is_training and self.wants_input_grad:
            self._add("input gradient", "bwd", Request("gemm", rows, inner, cols))
        if self.is_training:
            self._add("weight gradient", "bwd", Request("gemm_transposed", rows, cols, inner))
        self.held += rows * cols * (2 if self.is_training else 1)
        return self

    def gather(self, title: str, phase: str, cols: int) -> Pieces:
        """A pass over the edges that reads a row of `cols` columns for each."""
        if phase == "bwd" and not self.is_training:
            return self
        matrix = self.matrix if phase == "fwd" else self.matrix.transposed()
        price = self.pricer.price(Request("spmm", matrix.rows, cols, matrix=matrix, addends=1))
        self.steps.append(FusedStep(title, phase, price))
        self.held += matrix.rows * cols
        return self

    def of_edges(self, title: str, phase: str, cols: int, parts: int = 1) -> Pieces:
        """`cols` numbers of every edge, made and read by `parts` operations."""
        if phase == "fwd" or self.is_training:
            self._add(title, phase, Request("stream", self.matrix.edges, cols, parts=parts))
            self.held += self.matrix.edges * cols
        return self

    def plan(self, kind: str, text: str, because: str, sizes: Mapping[str, int]) -> FusedPlan:
        """The plan of these steps."""
        only = FusedCandidate(kind, text, tuple(self.steps), int(self.held * self.float_bytes), because)
        return choose_among(
            [only], layer=self.layer, kind=kind, sizes=sizes, machine=self.machine,
            is_training=self.is_training, memory_limit=self.memory_limit,
        )  # fmt: skip

    def _add(self, title: str, phase: str, request: Request) -> None:
        self.steps.append(FusedStep(title, phase, self.pricer.price(request)))
