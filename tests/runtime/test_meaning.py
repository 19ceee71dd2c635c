"""runtime/meaning.py: a program run by its kernels is the program run in torch's own operations."""

from __future__ import annotations

import pytest
import torch

from plait.graph import Graph, generate
from plait.plan.attention import Attention
from plait.plan.attention import ways as attention_ways
from plait.plan.gated import ways as gated_ways
from plait.plan.search import Problem
from plait.plan.ways import Way, survey_ways
from plait.runtime import executor
from plait.runtime.buffers import Buffers
from plait.runtime.chain import Env
from plait.runtime.constants import Constants
from plait.runtime.machine import machine_in_use
from plait.runtime.meaning import evaluate_program
from plait.runtime.orders import EdgeOrders
from tests.plan.test_attention import WRT

DOUBLE = torch.float64
ATTENTION = Attention("gat", 5, 3, 3, has_bias=True)
WAYS = {
    **{f"gates {w.name}": w for w in gated_ways(5, None, 4, has_skip=True, has_bias=True, is_training=True)},
    **{w.name: w for w in attention_ways(ATTENTION, WRT)},
    **{w.name: w for w in attention_ways(Attention("leaky", 5, 3, 2, has_projection_bias=True), WRT)},
    **{w.name: w for w in attention_ways(Attention("dot", 5, 3, 2, 0.0, has_skip=True), WRT)},
}


def bound(way: Way, graph: Graph) -> tuple[executor.Run, dict[str, torch.Tensor]]:
    sizes = {"N": graph.num_nodes, "M": graph.num_nodes, "E": graph.num_edges}
    given = {}
    for name in way.program.inputs:
        rows, cols = way.program.shapes[name]
        shape = (sizes.get(str(rows), rows), int(cols))
        given[name] = torch.randn(shape, dtype=DOUBLE).requires_grad_()  # type: ignore[call-overload]
    constants = Constants(graph, None, {}, DOUBLE)
    problem = Problem((), sizes, constants.cost_matrix, machine_in_use(), tuple(given), float_bytes=8)
    (plan,) = survey_ways(problem, [way])
    return executor.Run(plan, constants, Buffers(), orders=EdgeOrders(graph)), given


@pytest.mark.parametrize("name", WAYS)
def test_kernels_compute_what_the_steps_mean_and_so_do_their_gradients(name: str) -> None:
    torch.manual_seed(0)
    run, given = bound(WAYS[name], generate.erdos(30, 120, 3))
    ours = executor.apply(run, given)
    meant = evaluate_program(run, Env(given))
    torch.testing.assert_close(ours, meant, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(out.square().sum(), list(given.values())) for out in (ours, meant)]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


def test_an_output_that_was_overwritten_is_computed_again() -> None:
    torch.manual_seed(0)
    run, given = bound(WAYS["leaky"], generate.erdos(30, 120, 3))
    assert run.outline.output is not None
    whole = torch.autograd.grad(executor.apply(run, given).sum(), given["W"])[0]
    out = executor.apply(run, given)
    total = out.sum()
    with torch.no_grad():
        out.zero_()
    torch.testing.assert_close(torch.autograd.grad(total, given["W"])[0], whole)
