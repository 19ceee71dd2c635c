"""A compiled model is still the module it was: state, copies, hooks, sharing, modes, other graphs."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    GAT,
    GCN,
    GIN,
    FeaStConv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphSAGE,
    HeteroConv,
    LEConv,
    LightGCN,
    SAGEConv,
    SAGPooling,
    Sequential,
    SGConv,
    SSGConv,
    TopKPooling,
)

import plait
from tests.parity.harness import GRADIENT, OUTPUT, agree, close

NODES, WIDTH, CLASSES = 30, 6, 4


def edges(seed: int = 0, count: int = 90, nodes: int = NODES) -> Tensor:
    return torch.randint(0, nodes, (2, count), generator=torch.Generator().manual_seed(seed))


def features(seed: int = 0, nodes: int = NODES) -> Tensor:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """What people write."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = SAGEConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        x = functional.dropout(x, p=0.5, training=self.training)
        return self.second(x, edge_index).log_softmax(dim=-1)


class Tied(nn.Module):
    """One layer used twice, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = GCNConv(WIDTH, WIDTH)
        self.other = GCNConv(WIDTH, WIDTH)
        self.other.lin.weight = self.again.lin.weight

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.again(x, edge_index).tanh()
        return self.other(self.again(x, edge_index).tanh(), edge_index)


class OfData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GCNConv(WIDTH, 8), FeaStConv(8, 8), GCNConv(8, CLASSES)])

    def forward(self, data: Data) -> Tensor:
        x = data.x
        for layer in self.layers:
            x = layer(x, data.edge_index).relu()
        return x


class Residual(nn.Module):
    """In-place arithmetic on a layer's output, and an output used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.convs = nn.ModuleDict({"a": GINConv(nn.Linear(8, 8)), "b": SAGEConv(8, 8, aggr="max")})

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.enter(x)
        for conv in self.convs.values():
            h = conv(x, edge_index)
            h += x
            x = nn.functional.relu_(h) + h.mean(dim=0)
        return x


def reference(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


# Models people have ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Net, Tied, Residual], ids=lambda m: m.__name__)
@pytest.mark.parametrize("is_training", [True, False])
def test_user_written_modules(make: Any, is_training: bool) -> None:
    torch.manual_seed(0)
    agree(make().train(is_training), features(), edges(), calls=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GCN(WIDTH, 8, num_layers=3, out_channels=CLASSES, dropout=0.3),
        lambda: GCN(WIDTH, 8, num_layers=2, norm="batch_norm", jk="cat"),
        lambda: GraphSAGE(WIDTH, 8, num_layers=2, jk="max", act_first=True, norm="layer_norm"),
        lambda: GraphSAGE(WIDTH, 8, num_layers=2, aggr="max", project=True),
        lambda: GIN(WIDTH, 8, num_layers=3, out_channels=CLASSES, norm="batch_norm"),
        lambda: GIN(WIDTH, 8, num_layers=2, train_eps=True, jk="last"),
    ],
)  # fmt: skip
def test_basic_gnn_models(make: Any) -> None:
    torch.manual_seed(0)
    agree(make(), features(), edges(), calls=2)


def test_pyg_sequential() -> None:
    torch.manual_seed(0)
    model = Sequential(
        "x, edge_index",
        [
            (GCNConv(WIDTH, 8), "x, edge_index -> x"),
            nn.ReLU(inplace=True),
            (SAGEConv(8, 4), "x, edge_index -> x"),
        ],
    )
    agree(model, features(), edges(), calls=2)


def test_layers_inside_torch_sequential_inside_a_module() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU())
            self.conv = GCNConv(8, CLASSES)
            self.out = nn.Sequential(nn.Dropout(0.5), nn.Linear(CLASSES, 2))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.out(self.conv(self.net(x), edge_index))

    torch.manual_seed(0)
    agree(Mixed(), features(), edges())


def test_a_model_that_takes_data_keeps_its_other_layers_in_pyg() -> None:
    torch.manual_seed(0)
    model, data = OfData(), Data(x=features(), edge_index=edges())
    twin = reference(model)
    compiled = plait.compile(model, data)
    close(compiled(data), twin(data), OUTPUT[torch.float32], "output")
    assert len(compiled.plan.layers) == 2
    assert "FeaStConv" in compiled.plan.not_planned[0].reason


def test_nothing_to_plan_is_still_the_model() -> None:
    agree(GAT(WIDTH, 7, num_layers=2), features(), edges(), must_plan=False)
    agree(nn.Linear(WIDTH, 3), features(), must_plan=False)


def test_hetero_conv() -> None:
    torch.manual_seed(0)
    convs = {("u", "to", "v"): SAGEConv((WIDTH, WIDTH), 8), ("v", "back", "u"): SAGEConv((WIDTH, WIDTH), 8)}
    model = HeteroConv(convs)
    x = {"u": features(0, 20), "v": features(1, 12)}
    rows = {("u", "to", "v"): edges(0, 40, 12), ("v", "back", "u"): edges(1, 40, 12)}
    expected = reference(model)(x, rows)
    result = plait.compile(model)(x, rows)
    for kind in x:
        close(result[kind], expected[kind], OUTPUT[torch.float32], kind)


def test_light_gcn_and_its_embeddings() -> None:
    torch.manual_seed(0)
    model = LightGCN(NODES, 8, num_layers=3)
    twin, compiled = reference(model), plait.compile(model)
    expected, result = twin.get_embedding(edges()), compiled.get_embedding(edges())
    close(result, expected, OUTPUT[torch.float32], "embedding")
    expected.sum().backward()
    result.sum().backward()
    close(compiled.embedding.weight.grad, twin.embedding.weight.grad, GRADIENT[torch.float32], "gradient")


@pytest.mark.parametrize("conv", [GCNConv(WIDTH, 4), APPNP(2, 0.1)], ids=["GCNConv", "APPNP"])
def test_a_single_layer_is_a_model(conv: nn.Module) -> None:
    agree(conv, features(), edges(), calls=2)


# State, copies and dtypes -----------------------------------------------------------------------------------


def test_state_and_parameters_are_those_of_the_model() -> None:
    model = Net()
    compiled = plait.compile(model)
    assert list(compiled.state_dict()) == list(Net().state_dict())
    for mine, other in zip(compiled.parameters(), model.parameters(), strict=True):
        assert mine is other
    assert isinstance(compiled, Net)
    assert isinstance(compiled.first, GCNConv)
    assert type(model.first) is GCNConv
    assert repr(compiled) == repr(model)


def test_loaded_weights_are_used() -> None:
    torch.manual_seed(0)
    other = Net().eval()
    compiled = plait.compile(Net().eval())
    compiled(features(), edges())
    compiled.load_state_dict(other.state_dict())
    close(compiled(features(), edges()), other(features(), edges()), OUTPUT[torch.float32], "output")


def test_replaced_parameters_are_used() -> None:
    model = Net().eval()
    twin, compiled = reference(model), plait.compile(model)
    compiled(features(), edges())
    fresh = torch.randn(8, WIDTH)
    for net in (twin, compiled):
        net.first.lin.weight = nn.Parameter(fresh.clone())
    close(compiled(features(), edges()), twin(features(), edges()), OUTPUT[torch.float32], "output")


def test_deep_copies_are_independent() -> None:
    torch.manual_seed(0)
    compiled = plait.compile(Net().eval())
    before = compiled(features(), edges()).detach().clone()
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    close(compiled(features(), edges()), before, 0.0, "output")
    assert not torch.equal(other(features(), edges()), before)


@pytest.mark.parametrize("make", [Net, Tied, lambda: GCNConv(WIDTH, 3)], ids=["Net", "Tied", "GCNConv"])
def test_pickles_come_back(make: Any) -> None:
    torch.manual_seed(0)
    compiled = plait.compile(make().eval())
    before = compiled(features(), edges())
    again = pickle.loads(pickle.dumps(compiled))
    close(again(features(), edges()), before, 0.0, "output")
    assert again.plan.layers
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    close(torch.load(file, weights_only=False)(features(), edges()), before, 0.0, "output")


def test_another_dtype_and_back() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    twin = reference(model)
    compiled = plait.compile(model)
    compiled(features(), edges())
    close(
        compiled.to(torch.float64)(features().double(), edges()),
        twin.double()(features().double(), edges()),
        OUTPUT[torch.float64],
        "float64",
    )
    close(
        compiled.float()(features(), edges()),
        twin.float()(features(), edges()),
        OUTPUT[torch.float32],
        "float32",
    )


def test_bfloat16_is_near_pyg() -> None:
    # without a dense product: torch's own in bfloat16 dies on machines that list AMX and do not have it
    model = APPNP(K=3, alpha=0.2).bfloat16()
    x = features().bfloat16()
    expected = reference(model).float()(x.float(), edges())
    result = plait.compile(model)(x, edges())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("train_eps", [False, True])
def test_gin_is_as_wide_as_its_eps(train_eps: bool, is_pair: bool) -> None:
    # PyG's 1 + eps is a vector: a model in float64 takes float32
    model = GINConv(nn.Linear(WIDTH, CLASSES), eps=0.5, train_eps=train_eps).double()
    twin, compiled = reference(model), plait.compile(model)
    given = [features().requires_grad_() for _ in (twin, compiled)]
    outs = [net((x, x) if is_pair else x, edges()) for net, x in zip((twin, compiled), given, strict=True)]
    for out in outs:
        out.square().sum().backward()
    assert outs[1].dtype == torch.float64
    close(outs[1], outs[0], OUTPUT[torch.float32], "output")
    for mine, other in zip((given[1], *compiled.parameters()), (given[0], *twin.parameters()), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad, other.grad, GRADIENT[torch.float32], "gradient")


def test_training_follows_the_same_losses() -> None:
    torch.manual_seed(0)
    model = Net()
    twin, compiled = reference(model), plait.compile(model)
    y = torch.randint(0, CLASSES, (NODES,))
    losses: list[list[float]] = []
    for net in (twin, compiled):
        torch.manual_seed(1)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
        seen = []
        for _ in range(15):
            optimiser.zero_grad()
            loss = functional.nll_loss(net(features(), edges()), y)
            loss.backward()
            optimiser.step()
            seen.append(loss.item())
        losses.append(seen)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-4)


def test_frozen_parameters_get_no_gradient() -> None:
    model = Net()
    model.first.lin.weight.requires_grad_(False)
    agree(model, features(), edges(), wants_grad=False)


# Hooks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "first.lin", "norm", "second.lin_l", "second.lin_r", ""])
def test_forward_hooks_fire_and_may_change_the_output(place: str) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    seen: list[str] = []
    inner = model.get_submodule(place)
    inner.register_forward_pre_hook(lambda module, args: seen.append("before"))
    inner.register_forward_hook(lambda module, args, out: seen.append("after") or 0.5 * out)
    agree(model, features(), edges(), must_plan=False)
    assert seen == ["before", "after"] * 2


def test_hooks_added_and_removed_after_compiling() -> None:
    model = Net().eval()
    compiled = plait.compile(model)
    before = compiled(features(), edges())
    handle = compiled.first.lin.register_forward_hook(lambda module, args, out: 0 * out)
    assert not torch.allclose(compiled(features(), edges()), before)
    handle.remove()
    close(compiled(features(), edges()), before, 0.0, "output")


def test_backward_hooks_see_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    twin, compiled = reference(model), plait.compile(model)
    seen: list[Tensor] = []
    for net in (twin, compiled):
        net.second.register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
        net(features(), edges()).square().sum().backward()
    close(seen[1], seen[0], GRADIENT[torch.float32], "gradient")


def test_message_hooks_send_the_layer_back_to_pyg() -> None:
    model = Net().eval()
    seen: list[Any] = []
    compiled = plait.compile(model)
    compiled.first.register_message_forward_hook(lambda module, args, out: seen.append(out))
    compiled(features(), edges())
    assert seen
    assert any("hook" in skipped.reason for skipped in compiled.plan.not_planned)


# Calls ------------------------------------------------------------------------------------------------------


def test_plait_disable_gives_back_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().eval()
    expected = reference(model)(features(), edges())
    compiled = plait.compile(model)
    monkeypatch.setenv("PLAIT_DISABLE", "1")
    assert torch.equal(compiled(features(), edges()), expected)
    assert not compiled.plan.layers
    monkeypatch.setenv("PLAIT_DISABLE", "0")
    close(compiled(features(), edges()), expected, OUTPUT[torch.float32], "output")
    assert compiled.plan.layers


def test_other_graphs_and_sizes_are_noticed() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    twin, compiled = reference(model), plait.compile(model, Data(x=features(), edge_index=edges()))
    for seed in range(40):
        nodes = 5 + seed
        x, rows = features(seed, nodes), edges(seed, 3 * nodes, nodes)
        close(compiled(x, rows), twin(x, rows), OUTPUT[torch.float32], f"graph {seed}")


def test_a_freed_graph_is_not_mistaken_for_the_next() -> None:
    model = GCNConv(WIDTH, 3)
    twin, compiled = reference(model), plait.compile(model)
    x = features()
    for seed in range(60):
        rows = edges(seed)  # the allocator hands out the same address again and again
        close(compiled(x, rows), twin(x, rows), OUTPUT[torch.float32], f"graph {seed}")
        del rows


@pytest.mark.parametrize("what", ["edges", "weights", "features", "features by data", "parameters"])
def test_changes_in_place_are_noticed(what: str) -> None:
    torch.manual_seed(0)
    model = GCNConv(WIDTH, 3)
    twin, compiled = reference(model), plait.compile(model)
    x, rows, weight = features(), edges(), torch.rand(90)
    for _ in range(3):
        compiled(x, rows, weight)
    if what == "edges":
        rows[0, :30] = 0
    elif what == "weights":
        weight[:40] = 2.0
    elif what == "features":
        x.mul_(2.0)
    elif what == "features by data":
        x.data = features(5)
    else:
        with torch.no_grad():
            for net in (twin, compiled):
                net.lin.weight.fill_(0.25)
    for _ in range(3):
        close(compiled(x, rows, weight), twin(x, rows, weight), OUTPUT[torch.float32], what)


def test_a_gradient_for_edge_weights_is_planned() -> None:
    model = GCNConv(WIDTH, 3)
    twin, compiled = reference(model), plait.compile(model)
    slopes = []
    for net in (twin, compiled):
        weight = torch.linspace(0.1, 1.0, 90).requires_grad_()
        net(features(), edges(), weight).square().sum().backward()
        slopes.append(weight.grad)
    close(slopes[1], slopes[0], GRADIENT[torch.float32], "gradient")
    assert not compiled.plan.not_planned


def test_cached_layers_keep_their_first_graph() -> None:
    model = GCNConv(WIDTH, 3, cached=True)
    twin, compiled = reference(model), plait.compile(model)
    for seed in range(3):
        close(
            compiled(features(), edges(seed)), twin(features(), edges(seed)), OUTPUT[torch.float32], "output"
        )
    for net in (twin, compiled):
        torch.manual_seed(0)
        net.reset_parameters()
    close(compiled(features(), edges(7)), twin(features(), edges(7)), OUTPUT[torch.float32], "after a reset")


def test_cached_layers_keep_their_first_weights() -> None:
    model = APPNP(2, 0.1, cached=True)
    twin, compiled = reference(model), plait.compile(model)
    for seed in range(3):
        weight = torch.rand(90, generator=torch.Generator().manual_seed(seed))
        close(
            compiled(features(), edges(seed), weight), twin(features(), edges(seed), weight), 1e-5, "output"
        )
    close(compiled(features(), edges()), twin(features(), edges()), 1e-5, "without weights")


def test_a_cache_keeps_the_weights_as_they_were_when_it_was_made() -> None:
    model = GCNConv(WIDTH, 3, cached=True)
    twin, compiled = reference(model), plait.compile(model)
    weights = [torch.rand(90, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    for _ in range(3):
        outs = [
            net(features(), edges(), weight) for net, weight in zip((compiled, twin), weights, strict=True)
        ]
        close(*outs, 1e-5, "output")
        for weight in weights:
            weight.mul_(0.5)


@pytest.mark.parametrize("rows", [3, 50])
def test_a_cache_of_another_number_of_nodes_is_pygs_to_apply(rows: int) -> None:
    model = APPNP(2, 0.1, cached=True)
    twin, compiled = reference(model), plait.compile(model)
    small = torch.tensor([[0, 1, 2], [1, 2, 0]])
    for net in (twin, compiled):
        net(features(nodes=3), small)
    x = features(nodes=rows)
    close(compiled(x, edges()), twin(x, edges()), 1e-5, "output")


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("make", [SGConv, functools.partial(SSGConv, alpha=0.1)])
def test_a_cache_of_features_answers_edges_that_do_not_fit(make: Any, is_typed: bool) -> None:
    model = make(WIDTH, 3, K=2, cached=True)
    twin, compiled = reference(model), plait.compile(model)
    ends = EdgeIndex(edges(), sparse_size=(NODES, NODES)) if is_typed else edges()
    for rows in (NODES, NODES - 1, 1, NODES):
        x = features()[:rows]
        close(compiled(x, ends), twin(x, ends), OUTPUT[torch.float32], f"{rows} rows")


def test_a_cache_made_for_the_other_flow_is_pygs_to_apply() -> None:
    model = GCNConv(WIDTH, 3, cached=True)
    twin, compiled = reference(model), plait.compile(model)
    for flow in ("source_to_target", "target_to_source", "source_to_target"):
        for net in (twin, compiled):
            net.flow = flow
        for _ in range(2):
            close(compiled(features(), edges()), twin(features(), edges()), 1e-5, flow)


def test_a_cache_in_double_precision_promotes_single() -> None:
    model = APPNP(2, 0.1, cached=True)
    twin, compiled = reference(model), plait.compile(model)
    for dtype in (torch.float64, torch.float32, torch.float32):
        made, expected = compiled(features().to(dtype), edges()), twin(features().to(dtype), edges())
        assert made.dtype == expected.dtype == torch.float64
        close(made, expected, 1e-5, "output")


@pytest.mark.parametrize("calls", [1, 2])
def test_a_checkpoint_around_the_call_that_makes_the_cache(calls: int) -> None:
    model = Sequential(
        "x, edge_index", [(GCNConv(WIDTH, WIDTH, cached=True), "x, edge_index -> x"), nn.Tanh()]
    )
    twin, compiled = reference(model), plait.compile(model)
    for net in (twin, compiled):
        x = features().requires_grad_()
        for _ in range(calls):
            x = checkpoint(net, x, edges(), use_reentrant=False)
        x.square().sum().backward()
    for mine, other in zip(compiled.parameters(), twin.parameters(), strict=True):
        close(mine.grad, other.grad, GRADIENT[torch.float32], "gradient")


def test_the_layers_of_a_pyg_sequential_are_planned_in_copies_too() -> None:
    layers = [(GCNConv(WIDTH, 6), "x, edge_index -> x"), nn.ReLU(), (GCNConv(6, 3), "x, edge_index -> x")]
    model = Sequential("x, edge_index", layers)
    twin = reference(model)
    compiled = plait.compile(model, Data(x=features(), edge_index=edges()))
    assert [part.layer for part in compiled.plan.layers] == ["module_0 GCNConv", "module_2 GCNConv"]
    for mine in (compiled, copy.deepcopy(compiled)):
        close(mine(features(1), edges(2)), twin(features(1), edges(2)), OUTPUT[torch.float32], "output")
        assert len(mine.plan.layers) == 2


def test_looking_ahead_leaves_a_cached_layer_as_it_was() -> None:
    model = Sequential("x, edge_index", [(GCNConv(WIDTH, 3, cached=True), "x, edge_index -> x")])
    twin = reference(model)
    compiled = plait.compile(model, Data(x=features(), edge_index=edges(1)))
    close(compiled(features(), edges(2)), twin(features(), edges(2)), OUTPUT[torch.float32], "output")


def test_backward_twice_through_a_kept_graph() -> None:
    model = Net().eval()
    twin, compiled = reference(model), plait.compile(model)
    for net in (twin, compiled):
        out = net(features(), edges()).square().sum()
        out.backward(retain_graph=True)
        out.backward()
    for mine, other in zip(compiled.parameters(), twin.parameters(), strict=True):
        close(mine.grad, other.grad, GRADIENT[torch.float32], "gradient")


def test_a_penalty_on_the_gradient_of_a_whole_model() -> None:
    model = Net().eval()
    twin, compiled = reference(model), plait.compile(model)
    for net in (twin, compiled):
        x = features().requires_grad_()
        (slope,) = torch.autograd.grad(net(x, edges()).tanh().sum(), x, create_graph=True)
        slope.square().sum().backward()
    for mine, other in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            close(mine.grad, other.grad, GRADIENT[torch.float32], "gradient", 1.0)


def test_inference_mode() -> None:
    model = Net().eval()
    expected = reference(model)(features(), edges())
    compiled = plait.compile(model)
    with torch.inference_mode():
        x, rows = features(), edges()
        for _ in range(3):
            close(compiled(x, rows), expected.detach(), OUTPUT[torch.float32], "output")
    close(compiled(features(), edges()), expected, OUTPUT[torch.float32], "after it")


def test_edge_index_class_and_int32_indices() -> None:
    model = Net().eval()
    twin, compiled = reference(model), plait.compile(model)
    rows = edges()
    special = EdgeIndex(rows, sparse_size=(NODES, NODES)).sort_by("col").values
    close(compiled(features(), special), twin(features(), special), OUTPUT[torch.float32], "EdgeIndex")
    close(compiled(features(), rows.int()), twin(features(), rows), OUTPUT[torch.float32], "int32")


def test_lazy_layers_run_once_in_pyg_then_planned() -> None:
    torch.manual_seed(0)
    model = SAGEConv(-1, 3)
    compiled = plait.compile(model)
    first = compiled(features(), edges())
    close(compiled(features(), edges()), first, OUTPUT[torch.float32], "output")
    assert compiled.plan.layers


def test_a_widths_error_is_an_error_as_in_pyg() -> None:
    compiled = plait.compile(GCNConv(WIDTH, 3))
    with pytest.raises((RuntimeError, ValueError)):
        compiled(torch.rand(NODES, WIDTH + 1), edges())


def test_a_batched_input_runs_in_pyg() -> None:
    model = GCNConv(WIDTH, 3)
    x = torch.rand(2, NODES, WIDTH)
    close(plait.compile(model)(x, edges()), reference(model)(x, edges()), 1e-6, "output")


def test_outputs_and_results_do_not_share_memory_with_later_calls() -> None:
    compiled = plait.compile(Net().eval())
    kept = [compiled(features(seed, 400), edges(seed, 1200, 400)) for seed in range(4)]
    copies = [out.clone() for out in kept]
    for seed in range(4, 8):
        compiled(features(seed, 400), edges(seed, 1200, 400))
    for out, was in zip(kept, copies, strict=True):
        assert torch.equal(out, was)


# Forms of input ---------------------------------------------------------------------------------------------

LAYERS = [
    lambda: GCNConv(WIDTH, 3),
    lambda: SAGEConv(WIDTH, 3),
    lambda: SAGEConv(WIDTH, 3, aggr="max"),
    lambda: GraphConv(WIDTH, 3),
    lambda: GINConv(nn.Linear(WIDTH, 3)),
    lambda: LEConv(WIDTH, 3),
]


def unsorted_matrix(is_repeated: bool) -> Tensor:
    """A torch COO matrix as people build them, straight from an edge list."""
    rows = edges(3).flip(0)
    if not is_repeated:
        rows = torch.unique(rows, dim=1).flip(1)
    values = torch.rand(rows.size(1), generator=torch.Generator().manual_seed(4))
    return torch.sparse_coo_tensor(rows, values, (NODES, NODES))


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("make", LAYERS, ids=lambda make: type(make()).__name__)
def test_coo_matrices_in_any_order(make: Any, is_repeated: bool) -> None:
    torch.manual_seed(0)
    model, matrix = make(), unsorted_matrix(is_repeated)
    # PyG marks a matrix as sorted without sorting it, so its answer is taken from a sorted one
    expected = reference(model)(features(), matrix.coalesce())
    close(plait.compile(model)(features(), matrix), expected, OUTPUT[torch.float32], "output")


@pytest.mark.filterwarnings("ignore:Sparse CSC", "ignore:Converting sparse tensor")
@pytest.mark.parametrize("make", [LAYERS[k] for k in (1, 3, 4)], ids=lambda make: type(make()).__name__)
def test_csc_matrices(make: Any) -> None:
    torch.manual_seed(0)
    agree(make(), features(), unsorted_matrix(True).to_sparse_csc(), must_plan=False)


def test_values_beside_a_sparse_matrix_are_read_as_in_pyg() -> None:
    matrix = unsorted_matrix(True).coalesce().to_sparse_csr()
    weight = torch.rand(matrix.values().numel())
    for make in (LAYERS[0], LAYERS[5]):
        agree(make(), features(), matrix, weight, must_plan=False)


def test_dtypes_that_do_not_fit_are_an_error_as_in_pyg() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"dtype|float64|double"):
        plait.compile(GCNConv(WIDTH, 3))(features().double(), edges())


def test_weights_of_another_dtype_decide_the_output_as_in_pyg() -> None:
    agree(GCNConv(WIDTH, 3), features(), edges(), torch.rand(90, dtype=torch.float64), must_plan=False)


# Other users of autograd ------------------------------------------------------------------------------------


def test_checkpointing() -> None:
    model = Net().eval()
    twin, compiled = reference(model), plait.compile(model)
    for net in (twin, compiled):
        checkpoint(net, features(), edges(), use_reentrant=False).square().sum().backward()
    for mine, other in zip(compiled.parameters(), twin.parameters(), strict=True):
        close(mine.grad, other.grad, GRADIENT[torch.float32], "gradient", scale=0.01)


def test_functional_gradients() -> None:
    model = GCNConv(WIDTH, 3)
    slopes = []
    for net in (reference(model), plait.compile(model)):

        def loss(parameters: dict[str, Tensor], net: nn.Module = net) -> Tensor:
            return torch.func.functional_call(net, parameters, (features(), edges())).square().sum()

        slopes.append(torch.func.grad(loss)({name: p.detach() for name, p in net.named_parameters()}))
    for name, slope in slopes[0].items():
        close(slopes[1][name], slope, GRADIENT[torch.float32], name)


def test_several_threads_may_call_one_model() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    compiled = plait.compile(model)
    graphs = [(features(k, 400), edges(k, 2000, 400)) for k in range(4)]
    with torch.no_grad():
        expected = [reference(model)(*graph) for graph in graphs]

    def answers(first: int) -> list[bool]:
        with torch.no_grad():
            order = [(first + k) % 4 for k in range(24)]
            return [torch.allclose(compiled(*graphs[k]), expected[k], atol=1e-4) for k in order]

    with ThreadPoolExecutor(4) as pool:
        assert all(all(right) for right in pool.map(answers, range(4)))


class _Pooled(nn.Module):
    """Layers between poolings that keep the nodes with the highest scores, as in PyG's example on ENZYMES."""

    def __init__(self, pooling: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = GraphConv(WIDTH, 8), GraphConv(8, CLASSES)
        self.pool = pooling(8, ratio=0.8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, edge_index, *_ = self.pool(self.first(x, edge_index).relu(), edge_index)
        return self.second(x, edge_index).mean(dim=0)


@pytest.mark.parametrize("pooling", [TopKPooling, SAGPooling])
def test_training_through_selected_nodes_is_pygs_up_to_rounding(pooling: type[nn.Module]) -> None:
    """In float64: a selection that a rounding error changes would make the two differ for good."""
    torch.manual_seed(0)
    model = _Pooled(pooling).double()
    both = [model, copy.deepcopy(model)]
    calls = [both[0], plait.compile(both[1])]
    optimisers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in both]
    for step in range(40):  # both sides of whatever is timed against PyG
        x, listed = features(step).double(), edges(step)
        for call, optimiser in zip(calls, optimisers, strict=True):
            optimiser.zero_grad()
            (call(x, listed) ** 2).sum().backward()
            optimiser.step()
    for theirs, ours in zip(*(one.parameters() for one in both), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
