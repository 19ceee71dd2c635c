"""Layers with learned messages: which thread does the work changes no bit of outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import EdgeConv, PNAConv, ResGatedGraphConv, RGCNConv

import plait

ROWS, EDGES, WIDTH = 2000, 40000, 24


def layers() -> dict[str, Any]:
    scalers = ["identity", "amplification"]
    histogram = torch.ones(30, dtype=torch.long)
    mlp = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return {
        "ResGatedGraphConv": ResGatedGraphConv(WIDTH, WIDTH),
        "RGCNConv": RGCNConv(WIDTH, WIDTH, 3, num_bases=2),
        "PNAConv": PNAConv(WIDTH, WIDTH, ["mean", "max", "min", "std"], scalers, histogram),
        "EdgeConv max": EdgeConv(mlp),
        "EdgeConv sum": EdgeConv(mlp, aggr="sum"),
    }


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", list(layers()))
def test_one_thread_and_three_give_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    compiled = plait.compile(layers()[name])
    given = torch.randint(0, ROWS, (2, EDGES))
    more = (torch.randint(0, 3, (EDGES,)),) if name == "RGCNConv" else ()
    x, direction = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        compiled.zero_grad()
        x.grad = None
        out = compiled(x, given, *more)
        out.backward(direction)
        assert x.grad is not None
        found.append([out.detach().clone(), x.grad.clone()])
        choice = compiled.plan.layers[0].choice
    assert choice
    for one, three in zip(*found, strict=True):
        torch.testing.assert_close(three, one, rtol=0, atol=0)
