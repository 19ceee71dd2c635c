"""runtime/cuda_passes.py: the passes of attention and gates have a kernel on a GPU (parity: test_cuda.py)."""

from __future__ import annotations

import pytest

import plait.runtime.executor as executor
from plait.plan.attention import Attention, ways
from plait.plan.gated import ways as gated_ways
from plait.plan.program import differentiate
from plait.runtime.bind import kernels_of
from tests.plan.test_attention import WRT

assert executor  # enters the kernels


@pytest.mark.parametrize("kind", ["gat", "leaky", "dot"])
def test_every_step_of_attention_on_a_gpu_has_a_kernel_there(kind: str) -> None:
    for way in ways(Attention(kind, 8, 4, 2, has_bias=True, has_residual=True, device="cuda"), WRT):
        for program in (way.program, differentiate(way.program, WRT)):
            for step in program.steps:
                assert kernels_of(step.op, "cuda"), step.op


def test_every_step_of_gates_has_a_kernel_on_a_gpu() -> None:
    for way in gated_ways(8, None, 4, has_skip=True, has_bias=True, is_training=True):
        for program in (way.program, differentiate(way.program, ("X", "W", "b", "c"))):
            for step in program.steps:
                assert kernels_of(step.op, "cuda"), step.op
