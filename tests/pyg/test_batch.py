"""pyg/batch.py: a step on a mini-batch, priced or timed, and the model left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, GAT, GCN, GraphSAGE

import plait
from plait.cost.machine import default_profile
from plait.pyg import batch as module
from plait.pyg.batch import Batches
from plait.runtime.aside import SETTLED_AFTER
from plait.runtime.machine import using_machine
from tests.analysis.test_growth import random_graph

MODELS = {
    "gcn": lambda: GCN(12, 8, 2, 4, norm="batch_norm", dropout=0.5),
    "sage": lambda: GraphSAGE(12, 8, 2, 4),
    "gat": lambda: GAT(12, 8, 2, 4, heads=2),
}
NODES = 300


def batches(model: nn.Module, mode: str = "training") -> Batches:
    graph = random_graph(NODES, 2000)
    source, target = torch.from_numpy(graph.indices.astype("int64")), torch.from_numpy(graph.edge_rows())
    data = Data(x=torch.randn(NODES, 12), edge_index=torch.stack((source, target.to(torch.int64))))
    return Batches(model, data, graph, 32, (4, 4), mode)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_step_is_timed_and_the_model_left_as_it_was(name: str, mode: str) -> None:
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = batches(model, mode)
    assert found.can_run
    drawn = torch.get_rng_state()
    seconds = found.seconds()
    assert seconds is not None
    assert min(seconds) >= 0
    assert sum(seconds) > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_model_of_which_nothing_is_learned_is_timed_too() -> None:
    assert batches(APPNP(2, 0.1)).seconds() is not None


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = GCN(12, 8, 2, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.inner(x, edge_index), x


def test_a_model_that_returns_no_rows_is_not_timed() -> None:
    assert batches(Pair()).seconds() is None


def test_with_the_profile_of_another_machine_mini_batches_are_priced() -> None:
    given = batches(GraphSAGE(12, 8, 2, 4))
    with using_machine(default_profile()):
        first, second = (
            plait.analyze(given.model, given.data, 2, batch_size=32, fanouts=(4, 4)) for _ in range(2)
        )
        assert first.options.batch_seconds == pytest.approx(given.price())
    assert first.options.timed_batch_seconds is None
    assert [s.seconds_per_epoch for s in first.strategies] == [s.seconds_per_epoch for s in second.strategies]
    assert plait.analyze(given.model, given.data, 2, batch_size=32).options.timed_batch_seconds is not None


def test_steps_that_count_come_after_trials_in_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is tried in PyG runs there in every other block of steps, until it is decided."""
    monkeypatch.delenv("PLAIT_ASIDE", raising=False)
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 1e9)
    seen: list[tuple[int, bool]] = []
    before = module._Step.seconds

    def noted(step: Any, given: Batches, batch: Any, demand: Any) -> float | None:
        seen.append((len(batch.nodes), step.run._plait_plan_session.aside.is_off))
        return before(step, given, batch, demand)

    monkeypatch.setattr(module._Step, "seconds", noted)
    assert batches(GraphSAGE(12, 8, 2, 4)).seconds() is not None
    counted = module._TIMED * 2 * module._EACH
    whole = [is_off for nodes, is_off in seen[:-counted] if nodes > seen[-1][0]]
    assert len(whole) >= SETTLED_AFTER
    assert not any(is_off for _, is_off in seen[:-counted])
    assert all(is_off for _, is_off in seen[-counted:])
