"""rows=: whatever is asked of the result, and whatever stands behind the last layer, is what PyG gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, GINConv, GraphConv, SAGEConv, SGConv, global_mean_pool

import plait
from plait.errors import InputError
from plait.runtime.deferred import Deferred, held_rows

NODES = 40
MASK = torch.zeros(NODES, dtype=torch.bool).index_fill(0, torch.tensor([1, 4, 5, 17, 30, 39]), True)
Y = torch.arange(NODES) % 3


def graph(seed: int = 0, nodes: int = NODES) -> Data:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 6, generator=rng, dtype=torch.float64)
    return Data(x=x, edge_index=torch.randint(0, nodes, (2, 4 * nodes), generator=rng))


class Net(nn.Module):
    """Two layers and whatever follows them."""

    def __init__(self, last: nn.Module | None = None, after: Callable[..., Any] = lambda h: h):
        super().__init__()
        self.first, self.last, self.after = GCNConv(6, 8), last or GCNConv(8, 3), after

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.after(self.last(self.first(x, edge_index).relu(), edge_index))


class Twice(nn.Module):
    """One layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.conv(self.conv(x, edge_index).tanh(), edge_index)


class Residual(nn.Module):
    """The layer's result changed in place, and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = GCNConv(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        h = functional.relu(self.conv(x, edge_index), inplace=True)
        h = h + x
        h[:2] = 0
        return self.lin(h)


def norm(h: Tensor) -> Tensor:
    return functional.batch_norm(h, None, None, training=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nothing": Net,
    "log_softmax": lambda: Net(after=lambda h: functional.log_softmax(h, dim=1)),
    "linear, in place": lambda: Net(
        GCNConv(8, 6), nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 3), nn.Dropout(0.5))
    ),
    "less the mean": lambda: Net(after=lambda h: h - h.mean(0)),
    "batch_norm": lambda: Net(after=norm),
    "softmax over nodes": lambda: Net(after=lambda h: h.softmax(0)),
    "scatter": lambda: Net(after=lambda h: torch.zeros_like(h).index_add(0, Y, h) + h),
    "pooled and back": lambda: Net(after=lambda h: h + global_mean_pool(h, Y)[Y]),
    "used twice": Twice,
    "residual": Residual,
    "sage": lambda: Net(SAGEConv(8, 3, normalize=True)),
    "gin": lambda: Net(GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))),
    "one layer": lambda: SGConv(6, 3, K=2),
    "deep": lambda: GCN(6, 8, 3, 3, norm="batch_norm", jk="cat"),
    "as wide as the graph": lambda: GCN(6, NODES, 2, 3),
}

ASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "the rows": lambda out: out[MASK],
    "their numbers": lambda out: out[MASK.nonzero().reshape(-1)],
    "some of them": lambda out: out[torch.tensor([39, 5, 5, -1])],
    "a smaller mask": lambda out: out[MASK & (Y == 1)],
    "index_select": lambda out: out.index_select(0, torch.tensor([4, 1])),
    "other rows": lambda out: out[~MASK],
    "all": lambda out: out,
    "both": lambda out: out[MASK].sum() + out.square().mean(0),
    "a column": lambda out: out[:, 0],
    "loss of all": lambda out: functional.cross_entropy(out, Y),
    "a pair": lambda out: out[MASK, Y[MASK]],
}


def gradients(model: nn.Module, out: Tensor) -> list[Tensor | None]:
    weights = torch.linspace(0.2, 1.4, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [*torch.autograd.grad((out * weights).sum(), [*model.parameters()], allow_unused=True)]


def close(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.fixture(params=[True, False], ids=["training", "evaluation"])
def is_training(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def compiled(name: str, is_training: bool = True) -> tuple[nn.Module, nn.Module, Data]:
    torch.manual_seed(3)
    data, model = graph(), MODELS[name]().double()
    fast = plait.compile(copy.deepcopy(model), data, rows=MASK, mode="training")
    return model.train(is_training), fast.train(is_training), data


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", MODELS)
def test_whatever_is_asked_for_is_pyg_s(name: str, asked: str, is_training: bool) -> None:
    model, fast, data = compiled(name, is_training)
    torch.manual_seed(5)
    expected = ASKED[asked](model(data.x, data.edge_index))
    torch.manual_seed(5)
    out = ASKED[asked](fast(data.x, data.edge_index))
    torch.testing.assert_close(out, expected)
    close(gradients(fast, out), gradients(model, expected))


@pytest.mark.parametrize("seed_and_nodes", [(1, NODES), (2, 55), (3, 12), (4, 1)])
def test_another_graph(seed_and_nodes: tuple[int, int]) -> None:
    model, fast, _ = compiled("nothing")
    other = graph(*seed_and_nodes)
    expected, out = model(other.x, other.edge_index), fast(other.x, other.edge_index)
    torch.testing.assert_close(out[::2], expected[::2])
    close(gradients(fast, out), gradients(model, expected))


def test_only_the_wanted_rows_are_computed_in_training() -> None:
    _, fast, data = compiled("log_softmax")
    out = fast(data.x, data.edge_index)
    loss = functional.nll_loss(out[MASK], Y[MASK])
    loss.backward()
    assert isinstance(out, Deferred)
    rows = held_rows(out)
    assert rows is not None
    assert rows.shape == (6, 3)
    with torch.no_grad():
        assert type(fast(data.x, data.edge_index)) is Tensor


@pytest.mark.parametrize("name", ["linear, in place", "as wide as the graph"])
def test_rows_asked_for_after_the_optimiser_s_step_are_those_of_before(name: str) -> None:
    model, fast, data = compiled(name)
    results = []
    for each in (model, fast):
        each.eval()
        optimiser = torch.optim.SGD(each.parameters(), lr=0.5)
        out = each(data.x, data.edge_index)
        functional.cross_entropy(out[MASK], Y[MASK]).backward()
        optimiser.step()
        results.append(out.detach().clone())
    torch.testing.assert_close(results[1], results[0])


def test_an_input_changed_since_is_an_error_not_another_answer() -> None:
    _, fast, data = compiled("one layer")
    out = fast(data.x, data.edge_index)
    data.x.mul_(2)
    with pytest.raises(InputError, match=r"rows.*changed in place"):
        out.sum()


def test_edge_weights_changed_since_are_an_error() -> None:
    data = graph()
    order = torch.argsort(data.edge_index[1] * NODES + data.edge_index[0])
    edges, weight = data.edge_index[:, order], torch.rand(4 * NODES, dtype=torch.float64)
    data = Data(x=data.x, edge_index=edges, edge_weight=weight)
    fast = plait.compile(GraphConv(6, 3).double(), data, rows=MASK)
    out = fast(data.x, edges, weight)
    weight.mul_(2)
    with pytest.raises(InputError, match="changed in place"):
        out.sum()


def test_what_is_written_to_the_rows_handed_out_stays_there() -> None:
    model, fast, data = compiled("nothing")
    out = fast(data.x, data.edge_index)
    with torch.no_grad():
        out[MASK].zero_()
        out[MASK].data.zero_()
    torch.testing.assert_close(out[MASK], model(data.x, data.edge_index)[MASK])


@pytest.mark.parametrize("name", ["nothing", "log_softmax"])
def test_gradients_of_the_result_itself(name: str) -> None:
    found = []
    for each in compiled(name)[:2]:
        data = graph()
        out = each(data.x, data.edge_index)
        loss = functional.cross_entropy(out[MASK], Y[MASK])
        found.append([*torch.autograd.grad(loss, [out, *each.parameters()], retain_graph=True)])
        heard: list[Tensor] = []
        out.register_hook(heard.append)
        out.retain_grad()
        loss.backward()
        found[-1] += [*heard, out.grad]
    close(found[1], found[0])


def test_rows_are_dropped_where_all_are_asked_for_again_and_again() -> None:
    _, fast, data = compiled("nothing")
    for _ in range(5):
        fast(data.x, data.edge_index).sum().backward()
    plan: Any = fast.plan
    assert any("rows= is not used: sum" in note for note in plan.notes)
    assert type(fast(data.x, data.edge_index)) is Tensor


def test_what_follows_the_last_layer_is_named() -> None:
    plan: Any = compiled("batch_norm")[1].plan
    assert any("rows= is not used: batch_norm" in note for note in plan.notes)


def test_a_layer_without_neighbours_computes_all_rows() -> None:
    data = graph()
    model = SGConv(6, 3, K=0).double()
    compiled = plait.compile(model, data, rows=MASK, mode="training")
    for asked in (MASK, ~MASK):
        torch.testing.assert_close(
            compiled(data.x, data.edge_index)[asked], model(data.x, data.edge_index)[asked]
        )
