"""runtime/ways.py: a layer that is a program is planned once and runs the way that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv

import plait
from plait.graph import Graph
from plait.plan.draft import Draft
from plait.plan.ways import Way
from plait.runtime import ways as programs
from plait.runtime.edges import Edges
from plait.runtime.session import MANY_GRAPHS, Options, Session
from plait.runtime.ways import Programs


def random_edges(seed: int, nodes: int = 30, edges: int = 90) -> Tensor:
    return torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def product(wrt: tuple[str, ...] | None) -> Sequence[Way]:
    """X @ W, by one way."""
    draft = Draft("N")
    return [Way("product", "", draft.program(draft.gemm(draft.input("X", "N", 5), draft.input("W", 5, 4))))]


def edges(seed: int, nodes: int = 30, count: int = 90) -> Edges:
    ends = random_edges(seed, nodes, count).numpy()
    return Edges(Graph.from_edge_index(ends[0], ends[1], nodes), ())


def test_the_value_and_its_gradients_are_the_programs() -> None:
    x, w = torch.randn(30, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    found = Programs("layer", (), product).value(Session(), edges(1), {"X": x, "W": w})
    torch.testing.assert_close(found, x @ w)
    grads = torch.autograd.grad(found.square().sum(), (x, w))
    for grad, expected in zip(grads, torch.autograd.grad((x @ w).square().sum(), (x, w)), strict=True):
        torch.testing.assert_close(grad, expected)


def test_the_inputs_of_a_way_alone_are_asked_for_by_its_name() -> None:
    x, w, asked = torch.randn(30, 5), torch.randn(5, 4, requires_grad=True), []

    def own(name: str) -> dict[str, Tensor]:
        asked.append(name)
        return {"W": w}

    found = Programs("layer", (), product, own).value(Session(), edges(1), {"X": x})
    torch.testing.assert_close(torch.autograd.grad(found.sum(), w)[0], x.sum(0)[:, None].expand(5, 4))
    assert set(asked) == {"product"}


@pytest.mark.parametrize(("limit", "plans"), [(None, MANY_GRAPHS), (1 << 30, MANY_GRAPHS + 3)])
def test_graphs_of_one_size_share_a_plan_unless_memory_is_limited(
    limit: int | None, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    choose = programs.choose
    monkeypatch.setattr(programs, "choose", lambda *given: planned.append(given) or choose(*given))
    session, w = Session(Options(memory_limit=limit)), torch.randn(5, 4)
    for seed in range(MANY_GRAPHS + 3):
        nodes = 20 + seed
        x = torch.randn(nodes, 5)
        found = Programs("layer", (), product).value(session, edges(seed, nodes), {"X": x, "W": w})
        torch.testing.assert_close(found, x @ w)
    assert len(planned) == plans
    session.forget("layer")
    assert not len(session.by_size)


def test_a_deep_model_in_pieces_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.ModuleList(GATv2Conv(4, 4, edge_dim=3) for _ in range(25))  # of three programs each
    x, edge_index, attr = torch.randn(30, 4), random_edges(1), torch.randn(90, 3)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edge_index, attr)
            return x

    model = plait.compile(Deep())
    model(x)
    planned: list[Any] = []
    choose = programs.choose
    monkeypatch.setattr(programs, "choose", lambda *given: planned.append(given) or choose(*given))
    model(x)
    assert not planned
