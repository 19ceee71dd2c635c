"""runtime/twins: whole models on representatives equal PyG's, and are used only where they pay."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GCNConv, GINConv, SAGEConv, SGConv, global_mean_pool

import plait
from plait.runtime import twins
from plait.runtime.deferred import Deferred, held_rows


def cliques_with_tails(dtype: torch.dtype = torch.float64) -> Data:
    """Cliques that share no nodes, each with a tail, one isolated node."""
    rng = np.random.default_rng(5)
    pairs, first, batch = [], 0, []
    for k, size in enumerate([7, 1, 12, 5, 9]):
        u, v = np.nonzero(1 - np.eye(size, dtype=int))
        pairs += [np.stack([u, v]) + first, np.array([[0, size], [size, 0]]) + first]
        first += size + 1
        batch += [k] * (size + 1)
    edges = np.concatenate(pairs, 1)
    batch.append(5)
    x = torch.from_numpy(rng.standard_normal((first + 1, 6))).to(dtype)
    return Data(
        x=x, edge_index=torch.from_numpy(edges[:, rng.permutation(edges.shape[1])]), batch=torch.tensor(batch)
    )


class Net(nn.Module):
    """Two layers and whatever stands between them."""

    def __init__(self, first: nn.Module, second: nn.Module, between: Any = torch.relu, after: Any = None):
        super().__init__()
        self.first, self.second = first, second
        self.between, self.after = between, after

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.second(self.between(self.first(x, edge_index)), edge_index)
        return h if self.after is None else self.after(h)


def mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))


class Scramble(torch.autograd.Function):
    """Code that plait cannot see through: it mixes rows below torch's functions."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.flip(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0)


BATCH = cliques_with_tails().batch
MODELS = {
    "gcn": lambda: GCN(6, 8, 2, 3),
    "gcn of three layers": lambda: GCN(6, 8, 3, 3, jk="cat"),
    "gin": lambda: GIN(6, 8, 2, 3, norm=None),
    "gin by hand": lambda: Net(GINConv(mlp(6, 8)), GINConv(mlp(8, 8))),
    "sg": lambda: Net(SGConv(6, 8, K=2), SGConv(8, 4, K=3)),
    "gcn, then attention": lambda: Net(GCNConv(6, 8), GATConv(8, 4, heads=3)),
    "gcn, then sage": lambda: Net(GCNConv(6, 8), SAGEConv(8, 4)),
    "batch norm": lambda: GCN(6, 8, 2, 3, norm="batch_norm"),
    "dropout": lambda: GCN(6, 8, 2, 3, dropout=0.5),
    "residual": lambda: Net(GCNConv(6, 6), GCNConv(6, 6), lambda h: h + cliques_with_tails().x),
    "a layer alone": lambda: GCNConv(6, 5),
    "no bias, improved": lambda: Net(GCNConv(6, 6, bias=False), GCNConv(6, 6, improved=True)),
    "no loops": lambda: Net(GCNConv(6, 6, add_self_loops=False), GCNConv(6, 6)),
    "pooled": lambda: Net(GCNConv(6, 8), GCNConv(8, 4), after=lambda h: global_mean_pool(h, BATCH)),
    "attention": lambda: GAT(6, 8, 2, 3, heads=4),
}


def outputs(model: nn.Module, data: Data) -> list[Tensor]:
    x = data.x.clone().requires_grad_(model.training)
    out = model(x, data.edge_index)
    if not model.training:
        return [out]
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *model.parameters()], allow_unused=True)]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_on_representatives_equal_pyg(name: str, is_training: bool) -> None:
    data = cliques_with_tails()
    torch.manual_seed(0)
    model = MODELS[name]().double().train(is_training)
    fast = plait.compile(model, data, forms=["twins"])
    for seed in range(2):
        torch.manual_seed(seed)
        expected = outputs(model, data)
        torch.manual_seed(seed)
        for ours, theirs in zip(outputs(fast, data), expected, strict=True):
            assert type(ours) is type(theirs)
            if theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_rows_computed_are_the_representatives() -> None:
    data = cliques_with_tails()
    seen: list[Any] = []
    model = Net(GCNConv(6, 8), GCNConv(8, 4), lambda h: seen.append(h) or h.relu()).double()
    fast: Any = plait.compile(model, data, forms=["twins"])
    fast(data.x, data.edge_index)
    assert isinstance(seen[-1], Deferred)
    assert seen[-1].shape == (40, 8)
    rows = held_rows(seen[-1])
    assert rows is not None
    assert rows.shape[0] < 20
    assert any("twins is forced" in note for note in fast.plan.notes)


def test_code_below_torch_s_functions_sees_whole_matrices() -> None:
    data = cliques_with_tails()
    model = Net(GCNConv(6, 8), GCNConv(8, 4), Scramble.apply).double()
    fast: Any = plait.compile(model, data, forms=["twins"])
    assert any("twins is forced" in note for note in fast.plan.notes)
    for ours, theirs in zip(outputs(fast, data), outputs(model, data), strict=True):
        torch.testing.assert_close(ours, theirs)


class Wrapped(nn.Module):
    """Hands inner results out in containers, by another method and through hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(6, 8), GCNConv(8, 4)
        self.kept: Any = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = self.first(x, edge_index)
        self.kept = {"inner": [h]}
        h = functional.relu(input=h) if x.requires_grad else h.relu()
        return Data(h=h), (self.second(h, edge_index), {"h": h})

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Tensor = self.first(x, edge_index)
        h[0] = 0
        return h


def test_results_in_containers_and_of_other_methods_are_whole() -> None:
    data = cliques_with_tails()
    model = Wrapped().double()
    fast: Any = plait.compile(model, data, forms=["twins"])
    assert any("twins" in note for note in fast.plan.notes)
    other, (out, parts) = fast(data.x, data.edge_index)
    expected, (theirs, _) = model(data.x, data.edge_index)
    for ours, plain in ((other.h, expected.h), (parts["h"], expected.h), (out, theirs)):
        assert ours.detach().numpy().shape == plain.shape
        torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(fast.kept["inner"][0], model.kept["inner"][0])
    torch.testing.assert_close(fast.embed(data.x, data.edge_index), model.embed(data.x, data.edge_index))


def written(module: nn.Module, args: Any, out: Tensor) -> None:
    out.data[1:3] = 0


HOOKS: dict[str, Any] = {
    "written": lambda m: m.register_forward_hook(written),
    "replaced": lambda m: m.register_forward_hook(lambda _, __, out: out.flip(0)),
    "read": lambda m: m.register_forward_hook(lambda _, __, out: out.detach().numpy().sum() and None),
    "gradient": lambda m: m.register_full_backward_hook(lambda _, grads, __: None),
    "result's gradient": lambda m: m.register_forward_hook(
        lambda _, __, out: out.register_hook(lambda grad: grad.flip(0)) and None
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_a_layer_see_the_whole_matrix(name: str) -> None:
    data = cliques_with_tails()
    model = Net(GCNConv(6, 8), GCNConv(8, 4)).double()
    fast: Any = plait.compile(copy.deepcopy(model), data, forms=["twins"])
    for each in (model, fast):
        HOOKS[name](each.first)
    for ours, theirs in zip(outputs(fast, data), outputs(model, data), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_layer_with_an_own_row_keeps_whole_matrices() -> None:
    data = cliques_with_tails()
    fast: Any = plait.compile(Net(SAGEConv(6, 8), SAGEConv(8, 4)).double(), data, forms=["twins"])
    assert any("no layer gives twins equal rows" in note for note in fast.plan.notes)


def test_another_graph_is_computed_whole() -> None:
    data = cliques_with_tails()
    model = GCN(6, 8, 2, 3).double()
    fast = plait.compile(model, data, forms=["twins"])
    edges = data.edge_index[:, ::2]
    torch.testing.assert_close(fast(data.x, edges), model(data.x, edges))


def test_wanted_rows_are_computed_as_before() -> None:
    data = cliques_with_tails()
    model = GCN(6, 8, 2, 3).double()
    rows = torch.tensor([0, 3, 9, 39])
    fast = plait.compile(model, data, forms=["twins"], rows=rows)
    torch.testing.assert_close(fast(data.x, data.edge_index)[rows], model(data.x, data.edge_index)[rows])


def test_copies_and_pickles_start_afresh() -> None:
    data = cliques_with_tails()
    model = GCN(6, 8, 2, 3).double()
    fast = plait.compile(model, data, forms=["twins"])
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(twin(data.x, data.edge_index), model(data.x, data.edge_index))


def test_shared_sums_of_the_whole_graph_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(1.5, 1.0), (0.8, 1.0)])
    monkeypatch.setattr(twins, "_timed", lambda *_: next(seconds))
    monkeypatch.setattr(twins, "_not_worth_looking", lambda *_: None)
    monkeypatch.setattr(twins, "_most_by_sums", lambda *_: 2.0)
    monkeypatch.setattr(twins, "_shares_sums", lambda *_: True)
    fast: Any = plait.compile(GCN(6, 8, 2, 3).double(), cliques_with_tails())
    assert not fast._plait_plan_session.has_twins
    assert any("0.80x as fast as with shared sums" in note for note in fast.plan.notes)


@pytest.mark.parametrize(("gain", "is_used"), [(1.5, True), (0.9, False)])
def test_a_timed_step_decides(gain: float, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "_timed", lambda *_: (gain, 1.0))
    monkeypatch.setattr(twins, "_most_by_sums", lambda *_: 1.0)
    monkeypatch.setattr(twins, "_not_worth_looking", lambda *_: None)
    data = cliques_with_tails()
    fast: Any = plait.compile(GCN(6, 8, 2, 3).double(), data)
    assert fast._plait_plan_session.has_twins is is_used
    verdict = "form twins pays: 40 nodes" if is_used else "form twins not used: 40 nodes"
    assert any(note.startswith(verdict) for note in fast.plan.notes)


def test_the_check_times_both_sides() -> None:
    data = cliques_with_tails()
    fast: Any = plait.compile(GCN(6, 8, 2, 3).double(), data, forms=["twins"])
    session = fast._plait_plan_session
    edges = next(iter(session.edges.values()))
    seen = []

    def run(backward: bool = False) -> None:
        seen.append((edges.quotients is not None, backward))

    assert min(twins._timed(session, edges, edges.quotients, run)) > 0
    assert {(True, True), (False, True)} == set(seen)


def test_few_calls_look_for_nothing() -> None:
    data = cliques_with_tails()
    fast: Any = plait.compile(GCN(6, 8, 2, 3).double(), data, epochs=5)
    assert not any("twins" in note for note in fast.plan.notes)
    short: Any = plait.compile(GCN(6, 8, 2, 3).double(), data, epochs=60)
    assert any("not searched for" in note for note in short.plan.notes)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_code_without_a_derivative_between_layers(mode: str) -> None:
    def between(h: Tensor) -> Tensor:
        return torch.igamma(h.abs() + 1, h.abs()) if mode == "training" else h.set_(2 * h.detach().cumsum(0))

    data = cliques_with_tails()
    model = Net(GCNConv(6, 8), GCNConv(8, 4), between).double()
    fast = plait.compile(model, data, forms=["twins"], mode=mode)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(data.x, data.edge_index), model(data.x, data.edge_index))
