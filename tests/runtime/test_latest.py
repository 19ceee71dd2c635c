"""runtime/latest.py: the next call runs like the latest one only while all that decides it is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import plait
from plait.runtime import expressions
from plait.runtime.executor import Run
from plait.runtime.session import Session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(5, 4), GCNConv(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)  # type: ignore[no-any-return]


@pytest.fixture
def found_anew(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose run was found anew."""
    found: list[str] = []
    run_of = expressions._run_of

    def noted(session: Session, layer: str, *rest: Any) -> Run:
        found.append(layer)
        return run_of(session, layer, *rest)

    monkeypatch.setattr(expressions, "_run_of", noted)
    monkeypatch.setenv("PLAIT_ASIDE", "0")
    return found


@pytest.mark.parametrize("with_grad", [False, True])
def test_what_may_change_between_two_calls_is_seen(with_grad: bool, found_anew: list[str]) -> None:
    torch.manual_seed(0)
    model, x, edge_index = Net(), torch.randn(30, 5), torch.randint(0, 30, (2, 90))
    fast = plait.compile(model)

    def is_new(what: str = "") -> list[str]:
        found_anew.clear()
        with torch.set_grad_enabled(with_grad):
            out = fast(x, edge_index)
            torch.testing.assert_close(out, model(x, edge_index), msg=what)
            if with_grad:
                out.sum().backward()
        return [name.split()[0] for name in found_anew]

    for _ in range(6):
        is_new("at first")
    assert not is_new()
    with torch.no_grad():
        x.mul_(2)
        assert is_new("features changed in place") == ["first"]
        model.second.lin.weight.mul_(2)
    is_new("a weight changed in place")
    for _ in range(8):
        is_new()
    assert not is_new()
    model.first.lin.weight.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    assert is_new("no gradient is wanted") == (["first", "second"] if with_grad else [])
    x = x.clone()
    is_new("other features")
    model.second.bias.data = torch.randn(3)
    is_new("other memory")
    fast._plait_plan_session.use_twins(next(iter(fast._plait_plan_session.edges.values())), None)
    assert is_new("the graph's runs are gone") == ["first", "second"]


def test_an_input_that_comes_after_one_that_is_gone_is_noticed_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PLAIT_ASIDE", "0")
    model, edge_index = GCNConv(5, 4), torch.randint(0, 30, (2, 90))
    fast = plait.compile(model)
    session = fast._plait_plan_session
    with torch.no_grad():
        for _ in range(6):
            fast(torch.randn(30, 5), edge_index)
        assert not session.plans["model GCNConv"].hoisted.steps
        x = torch.randn(30, 5)
        for _ in range(5):
            torch.testing.assert_close(fast(x, edge_index), model(x, edge_index))
        assert session.plans["model GCNConv"].hoisted.steps
        given = [torch.randn(30, 5), x]
        for k in range(10):
            torch.testing.assert_close(fast(given[k % 2], edge_index), model(given[k % 2], edge_index))
            assert session.plans["model GCNConv"].hoisted.steps or k < 6
