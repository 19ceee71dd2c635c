"""Seconds of what happens beside layers: activations, the loss, the optimiser, drawing mini-batches.

Rates of torch 2.13 on one core of Zen 4, forward and backward together; what fills more than the allocator
keeps is written to fresh pages, which costs more than the numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.analysis.layers import Layer
from plait.cost.machine import MachineProfile
from plait.cost.price import Pricer
from plait.ops.work import Request

__all__ = [
    "BATCH_SECONDS",
    "STEP_SECONDS",
    "after",
    "looked_up_row_seconds",
    "loss_seconds",
    "sampled_edge_seconds",
]

STEP_SECONDS = 0.3e-3  # Python of a training step beside its layers: autograd, the optimiser
BATCH_SECONDS = 1.5e-3  # the same of a mini-batch: its graph is new, and Python draws and assembles it
_READS_PER_SAMPLED_EDGE = 1.25  # random reads of memory; the others find what they look for in cache
_COPIES_PER_ROW = 2  # out of the store, and into the batch
_LOSS_NUMBER_SECONDS = 2.0e-9  # of a row as wide as a vector or wider
_LOSS_ROW_SECONDS = 180e-9  # of a narrower row, which torch takes number by number
_VECTOR = 16
_FORWARD_SHARE = 0.6
_KEPT_BYTES = 32 << 20  # glibc gives larger blocks back to the system
_FRESH_BYTE_SECONDS = 0.5e-9
_FLOAT_BYTES = 4


def loss_seconds(rows: int, width: int) -> tuple[float, float]:
    """Seconds of softmax and cross-entropy of so many rows on one core, forward and backward."""
    narrow = width < _VECTOR
    total = rows * (_LOSS_ROW_SECONDS if narrow else width * _LOSS_NUMBER_SECONDS)
    fresh = _fresh(rows, width)
    return total * _FORWARD_SHARE + fresh, total * (1 - _FORWARD_SHARE) + fresh


def sampled_edge_seconds(machine: MachineProfile) -> float:
    """To draw one edge of a neighbourhood and find its end among the nodes drawn before, on one core."""
    return _READS_PER_SAMPLED_EDGE * machine.threads * machine.memory_row_seconds


def looked_up_row_seconds(machine: MachineProfile, width: int) -> float:
    """To copy one row of features from memory, on one core."""
    size = width * _FLOAT_BYTES
    moved = size / machine.gather_memory_bytes_per_s + size / machine.write_bytes_per_s
    return _COPIES_PER_ROW * machine.threads * (machine.memory_row_seconds + moved)


def _fresh(rows: int, width: int) -> float:
    size = rows * width * _FLOAT_BYTES
    return size * _FRESH_BYTE_SECONDS if size > _KEPT_BYTES else 0.0


def after(rows: int, pricer: Pricer, threads: int) -> Callable[[Layer, bool], tuple[float, float]]:
    """Seconds of what follows a layer with so many rows, forward and backward; `True`: the last layer."""

    def seconds(layer: Layer, is_last: bool) -> tuple[float, float]:
        is_training = "backward" in layer.phases
        if is_last:
            ahead, behind = loss_seconds(rows, layer.width_out)
            return (ahead / threads, behind / threads) if is_training else (0.0, 0.0)
        fresh = _fresh(rows, layer.width_out) / threads
        ahead = pricer.price(Request("relu", rows, layer.width_out)).seconds + fresh
        behind = pricer.price(Request("relu_backward", rows, layer.width_out)).seconds + fresh
        return ahead, behind if is_training else 0.0

    return seconds
