"""runtime/expressions.py: an expression is planned once, and nothing is hoisted for what comes once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import plait
from plait.runtime.session import Session


def random_edges(seed: int, nodes: int = 30, edges: int = 90) -> Tensor:
    return torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def session_of(model: nn.Module) -> Session:
    found: Session = model._plait_plan_session  # type: ignore[assignment]
    return found


def counted(session: Session) -> list[Any]:
    """The problems that are searched from here on."""
    made: list[Any] = []
    choose = session.choose
    session.choose = lambda problem: made.append(problem) or choose(problem)  # type: ignore[func-returns-value]
    return made


def test_a_plan_is_made_once_for_a_graph_and_its_shapes() -> None:
    model, x, edge_index = plait.compile(GCNConv(5, 4)), torch.randn(30, 5), random_edges(1)
    made = counted(session_of(model))
    for _ in range(5):
        model(x, edge_index).sum().backward()
    assert len(made) <= 2  # before and after x turned out to stay the same
    with torch.no_grad():
        model(x, edge_index)
    assert made[-1].wrt is None


def test_nothing_is_hoisted_for_a_graph_that_comes_once_until_it_comes_back() -> None:
    torch.manual_seed(0)
    nodes, model = 40, GCNConv(6, 3)
    x = torch.randn(nodes, 6)
    graphs = [torch.randint(0, nodes, (2, 150)) for _ in range(8)]
    fast = plait.compile(model, Data(x=x, edge_index=graphs[0], num_nodes=nodes))
    session = session_of(fast)

    def hoisted(edge_index: torch.Tensor) -> bool:
        torch.testing.assert_close(fast(x, edge_index), model(x, edge_index))
        return any(plan.hoisted.steps for plan in session.plans.values())

    assert [hoisted(graph) for graph in graphs[:3]] == [True] * 3  # few graphs: each is taken to stay
    assert [hoisted(graph) for graph in graphs[4:]] == [False] * 4
    assert len(session.by_size) == 1
    assert [hoisted(graph) for graph in graphs[4:]] == [True] * 4


def test_graphs_of_one_size_share_a_plan_and_of_another_do_not() -> None:
    torch.manual_seed(0)
    layer = GCNConv(5, 4)
    model = plait.compile(layer)
    made = counted(session_of(model))
    session_of(model).aside.is_off = True
    session_of(model).lists_values = lambda: False  # type: ignore[method-assign]  # not read as listed
    for seed in range(6):
        x = torch.randn(30, 5)
        torch.testing.assert_close(model(x, random_edges(seed)), layer(x, random_edges(seed)))
    before = len(made)
    model(torch.randn(29, 5), random_edges(7, 29, 87))
    assert len(made) == before
    model(torch.randn(300, 5), random_edges(8, 300, 900))
    assert len(made) == before + 1
