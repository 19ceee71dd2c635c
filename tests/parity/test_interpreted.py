"""Linear layers by the kernels and graphs of a GPU, on a CPU in Triton's interpreter, against PyG."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a device tests/parity/test_cuda.py runs the same there", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

import plait
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, search
from tests.parity.harness import as_on_a_gpu, close
from tests.pyg.cases import CASES, Case, random_edges

OUTPUT, GRADIENT = 1e-10, 1e-9


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)


def unchained(problem: Problem) -> LayerPlan:
    """Chains are for CPUs, and sparse views of features too."""
    return search(replace(problem, may_chain=False, features={}))


def agree(case: Case, x: Tensor, edge_index: Tensor, calls: int) -> None:
    module = case.make().double()
    twin, compiled = copy.deepcopy(module), cast(Any, plait.compile(module))
    compiled._plait_plan_session.choose = unchained
    for _ in range(calls + bool(getattr(module, "cached", False))):
        answers: list[list[Tensor | None]] = []
        for net in (twin, compiled):
            torch.manual_seed(0)
            net.zero_grad()
            given = x.clone().requires_grad_()
            out = net(given, edge_index)
            if out.requires_grad:
                out.square().sum().backward()
            answers.append([out, given.grad, *(p.grad for p in net.parameters())])
        for k, (theirs, ours) in enumerate(zip(*answers, strict=True)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                close(ours, theirs, OUTPUT if k == 0 else GRADIENT, f"answer {k}", scale=0.01)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_linear_layer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stream is capturing, as in a captured step on mini-batches, no count of a graph is read."""
    rng = np.random.default_rng(1)
    for shape, nodes, is_capturing, calls in (("random", 12, True, 2), ("repeated", 6, False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda is_so=is_capturing: is_so)
        torch.manual_seed(0)
        x, edges = torch.randn(nodes, 5, dtype=torch.float64), random_edges(rng, shape, nodes, nodes)
        agree(case, x, edges, calls)
