"""probe.py: every candidate can be run and computes the same; a clock sees every step of the plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv

import plait
from plait.plan.search import search
from plait.pyg.probe import Probe, machine_in_use, using_machine

EDGES = torch.tensor([[0, 1, 2, 3, 3, 0], [1, 2, 3, 0, 3, 2]])


def features() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


def layers() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return {"gcn": GCNConv(8, 4), "gat": GATConv(8, 4, heads=2)}


@pytest.mark.parametrize("name", layers())
def test_every_candidate_runs_and_computes_the_same(name: str) -> None:
    layer, x = layers()[name], features()
    wanted = layer(x, EDGES)
    seen: set[str] = set()
    count = rank = 0
    while rank == 0 or rank < count:
        compiled: Any = plait.compile(copy.deepcopy(layer), None)
        probe = Probe(compiled)
        probe.take(rank, lambda: compiled(x, EDGES))  # noqa: B023  # called at once
        ((label, plan),) = probe.plans.items()
        count = probe.count(label)
        seen.add(plan.describe())
        torch.testing.assert_close(compiled(x, EDGES), wanted)
        assert probe.plans[label].describe() == plan.describe()  # it stays
        rank += 1
    assert len(seen) == count > 1


def test_a_candidate_may_be_taken_of_one_layer_alone() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([GCNConv(8, 8), GCNConv(8, 4)])

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.convs[1](self.convs[0](x, EDGES).relu(), EDGES)

    x, compiled = features(), plait.compile(Two(), None)
    probe = Probe(compiled)
    probe.take(0, lambda: compiled(x))
    planned = {name: plan.describe() for name, plan in probe.plans.items()}
    first, second = planned
    probe.take(1, lambda: compiled(x), first)
    assert probe.plans[first].describe() == probe.candidates(first)[1].describe() != planned[first]
    assert probe.plans[second].describe() == planned[second]
    probe.choose_by(search)
    compiled(x)
    assert {name: plan.describe() for name, plan in probe.plans.items()} == planned


@pytest.mark.parametrize("name", layers())
def test_the_clock_sees_the_steps_as_often_as_it_was_asked_to(name: str) -> None:
    x, compiled = features(), plait.compile(layers()[name], None)
    probe = Probe(compiled)
    seen = probe.clock(lambda: compiled(x, EDGES).sum().backward(), warm=1, repeats=3)
    (label,) = probe.plans
    assert seen
    assert {layer for layer, _ in seen} == {label}
    assert {len(samples) for samples in seen.values()} == {3}
    assert all(seconds > 0 for samples in seen.values() for seconds in samples)
    assert probe._session.trace is None


def test_a_borrowed_machine_is_given_back() -> None:
    own = machine_in_use()
    other = own.without_overheads()
    with using_machine(other):
        assert machine_in_use() is other
    assert machine_in_use() is own
