"""Sums of messages whose function is known by name: film, crystal, gated, softmax (reference.py: FORMS)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from plait.errors import InputError
from plait.kernels import launch
from plait.kernels.compiled import stored
from plait.kernels.messages import cpu
from plait.kernels.messages.reference import FORMS
from plait.kernels.operands import float_bits, read_flat, read_numbers, read_rows, write_rows
from plait.kernels.spmm import Pattern

__all__ = ["FORMS", "sums", "sums_sources", "sums_targets"]

_SERIAL_BELOW = 1 << 16  # edges times columns


_USES = ("gate", "spmm")
_ADDRESSES = {
    "sums": stored("messages-sums", cpu.sums, _USES),
    "targets": stored("messages-targets", cpu.targets, _USES),
    "sources": stored("messages-sources", cpu.sources, _USES),
}


class _Call:
    """The arguments that all passes of a form share, checked and placed."""

    def __init__(
        self,
        at: Any,
        pattern: Pattern,
        form: str,
        ends: tuple[int, int],
        near: torch.Tensor,
        far: torch.Tensor,
        edge: torch.Tensor | None,
        numbers: torch.Tensor,
    ):
        of_near, of_far, of_edge, self.out = FORMS[form]
        if edge is not None and of_edge != of_far:
            raise InputError(f"edge: messages of the form {form!r} read nothing of edges; leave it out")
        self.at, self.pattern, self.form, self.has_edges = at, pattern, form, edge is not None
        self.dtype, self.width = far.dtype, far.shape[1] // of_far
        words = self.words = at.over(pattern.addresses)
        words[at.last_edge], words[at.width] = max(0, pattern.num_edges - 1), self.width
        self.held = [
            read_flat(words, at.numbers, "numbers", numbers, self.dtype, 2),
            read_rows(words, at.near, "near", near, self.dtype, ends[0], of_near * self.width, True),
            read_rows(words, at.far, "far", far, self.dtype, ends[1], of_far * self.width, True),
            read_rows(words, at.edge, "edge", edge, self.dtype, pattern.num_edges, of_far * self.width),
        ]

    def read(self, place: int, name: str, tensor: torch.Tensor, rows: int) -> None:
        """Place the gradient of the result."""
        width = self.out * self.width
        self.held.append(read_rows(self.words, place, name, tensor, self.dtype, rows, width))

    def run(self, name: str) -> None:
        """Run the pass of this name."""
        bits = float_bits("far", self.held[2])  # type: ignore[arg-type]  # far is always given
        work = self.pattern.num_edges * self.width
        address = _ADDRESSES[name](bits, self.pattern.index_bits, self.form, self.has_edges)
        self.at.run(address, self.words, launch.num_threads() if work > _SERIAL_BELOW else 1)


def sums(
    pattern: Pattern,
    form: str,
    near: torch.Tensor,
    far: torch.Tensor,
    edge: torch.Tensor | None,
    numbers: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[i] = the sum of the messages of row i's edges (reference.py); numbers: the temperature and eps."""
    at = cpu.SUMS
    call = _Call(at, pattern, form, (pattern.num_rows, pattern.num_columns), near, far, edge, numbers)
    write_rows(call.words, at.out, "out", out, call.dtype, pattern.num_rows, call.out * call.width)
    call.run("sums")
    return out


def sums_targets(
    pattern: Pattern,
    form: str,
    near: torch.Tensor,
    far: torch.Tensor,
    edge: torch.Tensor | None,
    numbers: torch.Tensor,
    grad: torch.Tensor,
    near_grad: torch.Tensor | None,
    edge_grad: torch.Tensor | None,
) -> None:
    """The gradients of the targets' rows and of the edges', where they are asked for."""
    at = cpu.TARGETS
    call = _Call(at, pattern, form, (pattern.num_rows, pattern.num_columns), near, far, edge, numbers)
    call.read(at.grad, "grad", grad, pattern.num_rows)
    for place, name, like, made in (
        (at.out, "near_grad", near, near_grad), (at.edge_out, "edge_grad", edge, edge_grad),
    ):  # fmt: skip
        shape = (0, 0) if like is None else like.shape
        write_rows(call.words, place, name, made, call.dtype, shape[0], shape[1])
    call.run("targets")


def sums_sources(
    transpose: Pattern,
    order: np.ndarray[Any, Any] | None,
    form: str,
    near: torch.Tensor,
    far: torch.Tensor,
    edge: torch.Tensor | None,
    numbers: torch.Tensor,
    grad: torch.Tensor,
    far_grad: torch.Tensor,
) -> torch.Tensor:
    """The gradients of the sources' rows; order[t]: whose row of `edge` the transpose's edge t reads."""
    at, rows = cpu.SOURCES, (transpose.num_columns, transpose.num_rows)
    call = _Call(at, transpose, form, rows, near, far, edge, numbers)
    read_numbers(call.words, at.order, "order", order, transpose.index_bits, transpose.num_edges)
    call.read(at.grad, "grad", grad, transpose.num_columns)
    write_rows(call.words, at.out, "far_grad", far_grad, call.dtype, rows[1], far.shape[1])
    call.run("sources")
    return far_grad
