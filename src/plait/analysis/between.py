"""Seconds of what happens outside layers: activations, the loss, the optimiser, drawing mini-batches.

Rates of torch's operations on rows are the machine profile's. Seconds of Python are those of torch 2.13 on
one core of Zen 4. What fills more than the allocator keeps is written to fresh pages, which costs more than
the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.analysis.layers import Layer
from plait.cost.machine import MachineProfile
from plait.cost.price import Pricer
from plait.ops.work import Request

__all__ = [
    "BATCH_SECONDS",
    "DRAWN_EDGE_SECONDS",
    "LOADED_SECONDS",
    "PASSES_SECONDS",
    "SAMPLED_EDGE_SECONDS",
    "SPREAD_SECONDS",
    "STEP_SECONDS",
    "Beside",
    "Passed",
    "after",
    "looked_up_row_seconds",
    "loss_seconds",
]

STEP_SECONDS = 0.3e-3  # Python of a training step outside its layers: autograd, the optimiser
SPREAD_SECONDS = 0.5e-3  # added by a step over ranks: gradients are flattened, the loss is a share of a mean
BATCH_SECONDS = 2.6e-3  # of a step on a mini-batch: its graph is new, and Python draws and assembles it
LOADED_SECONDS = 0.6e-3  # of a mini-batch of a few nodes: Python that draws and assembles it, and no more
PASSES_SECONDS = 0.4e-3  # Python of a layer that is a program of passes, beside the calls of its steps
SAMPLED_EDGE_SECONDS = 30e-9  # one edge drawn, its end numbered, put in a new graph and its transpose
DRAWN_EDGE_SECONDS = 14e-9  # the same without the graph
_COPIES_PER_ROW = 4  # out of the store and into the batch
# of the number of a row: found near or far, searched for among those that came (numpy: 75 to 110 ns of a
# number that is sorted or searched for)
_NUMBER_SECONDS = 60e-9
# Time of operations over relu's, forward and backward: 20 MB, 64 columns, one core of a Zen 5, torch 2.13.
# Dropout draws its random numbers one after the other.
_TIMES = {
    "batch_norm": (2.7, 1.7), "layer_norm": (3.9, 1.1), "gelu": (3.5, 1.8), "elu": (6.6, 1.2),
    "tanh": (16.0, 1.3), "dropout": (79.0, 1.1),
}  # fmt: skip
_VECTOR = 16  # numbers; of a narrower row torch's softmax takes one number after the other
_FORWARD_SHARE = 0.65
_KEPT_BYTES = 32 << 20  # glibc gives larger blocks back to the system
_FRESH_BYTE_SECONDS = 0.4e-9
_FLOAT_BYTES = 4


def loss_seconds(rows: int, width: int, machine: MachineProfile) -> tuple[float, float]:
    """Seconds of softmax and cross-entropy of this many rows on one core, forward and backward."""
    is_narrow = width < _VECTOR
    total = rows * (machine.loss_row_seconds if is_narrow else width * machine.loss_number_seconds)
    fresh = _fresh_seconds(rows * width * _FLOAT_BYTES)
    return total * _FORWARD_SHARE + fresh, total * (1 - _FORWARD_SHARE) + fresh


def looked_up_row_seconds(machine: MachineProfile, width: int) -> float:
    """To copy one row of features from memory, on one core."""
    size = width * _FLOAT_BYTES
    moved = size / machine.gather_memory_bytes_per_s + size / machine.write_bytes_per_s
    return _NUMBER_SECONDS + _COPIES_PER_ROW * machine.threads * (machine.memory_row_seconds + moved)


def _fresh_seconds(size: float) -> float:
    return size * _FRESH_BYTE_SECONDS if size > _KEPT_BYTES else 0.0


@dataclass(frozen=True)
class Passed:
    """One operation of torch on rows of nodes: bytes read and written, and a dense product's sizes."""

    bytes_in: int
    bytes_out: int
    has_gradient: bool = True
    product: tuple[int, int, int] | None = None  # rows, columns, inner
    name: str = ""  # torch's, where it is known

    def seconds(self, pricer: Pricer, threads: int) -> tuple[float, float]:
        """Forward, and backward: the gradient of what was read is written, from that of what was written."""
        if self.product is not None:
            rows, cols, inner = self.product
            pricer = _of_torch(pricer)
            ahead = pricer.price(Request("gemm", rows, cols, inner)).seconds
            behind = pricer.price(Request("gemm", rows, inner, cols)).seconds
            behind += pricer.price(Request("gemm_transposed", inner, cols, rows)).seconds
            return ahead, behind if self.has_gradient else 0.0
        machine = pricer.machine
        call = machine.call_seconds
        times = _TIMES.get(self.name, (1.0, 1.0))
        ahead = times[0] * (self.bytes_in + self.bytes_out) * machine.passed_byte_seconds
        ahead += _fresh_seconds(self.bytes_out)
        behind = times[1] * (2 * self.bytes_in + self.bytes_out) * machine.returned_byte_seconds
        behind += _fresh_seconds(self.bytes_in)
        return call + ahead / threads, call + behind / threads if self.has_gradient else 0.0


def _of_torch(pricer: Pricer) -> Pricer:
    """Prices of dense products that torch runs, however fast plait's own kernel would be."""
    machine = pricer.machine
    tables = {
        name: {"torch": table["torch"]} if "torch" in table else table
        for name, table in (("gemm", machine.gemm), ("gemm_transposed", machine.gemm_transposed))
    }
    return pricer.on(replace(machine, **tables))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Beside:
    """What a model does outside its layers: operations by the layer before them, and its result's width."""

    after: Mapping[str, Sequence[Passed]]
    width: int | None = None
    layers: tuple[str, ...] = ()  # in the order of their calls
    plan_seconds: float = 0.0  # of the layers as they were planned


def after(
    rows: int, pricer: Pricer, threads: int, beside: Beside | None = None
) -> Callable[[Layer, bool], tuple[float, float]]:
    """Seconds of what follows a layer with this many rows, forward and backward; `True`: the last layer.

    Where nothing was recorded, an activation is assumed to follow, and the loss after the last layer.
    """

    def followed(layer: Layer, is_last: bool) -> Sequence[Passed]:
        if beside is not None:
            return beside.after.get(layer.name, ())
        size = rows * layer.width_out * _FLOAT_BYTES
        return () if is_last else (Passed(size, size),)

    def seconds(layer: Layer, is_last: bool) -> tuple[float, float]:
        is_training = "backward" in layer.phases
        parts = [passed.seconds(pricer, threads) for passed in followed(layer, is_last)]
        python = PASSES_SECONDS / 2 if layer.has_passes else 0.0
        ahead, behind = (python + sum(part[way] for part in parts) for way in (0, 1))
        if is_last and is_training:
            width = layer.width_out if beside is None or beside.width is None else beside.width
            loss = loss_seconds(rows, width, pricer.machine)
            ahead, behind = ahead + loss[0] / threads, behind + loss[1] / threads
        return ahead, behind if is_training else 0.0

    return seconds
