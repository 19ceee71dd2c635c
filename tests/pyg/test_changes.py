"""Whatever a user changes between two calls is seen: the compiled model answers as PyG does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    ChebConv,
    ClusterGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MaxAggregation,
    MixHopConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.utils import coalesce, to_torch_csr_tensor

import plait

NODES, EDGES, WIDTH = 30, 90, 5


def drawn_edges(seed: int) -> Tensor:
    return torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(seed))


def drawn(seed: int, *size: int) -> Tensor:
    return torch.rand(*size, generator=torch.Generator().manual_seed(seed))


def same(made: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    return GCNConv(WIDTH, 4)


# Tensors without a version counter ------------------------------------------------------------------------


def test_changes_inside_inference_mode_are_seen(layer: nn.Module) -> None:
    with torch.inference_mode():
        x, edge_index, weight = drawn(1, NODES, WIDTH), drawn_edges(1), drawn(2, EDGES)
        model = plait.compile(layer, Data(x=x, edge_index=edge_index), mode="inference")
        for turn in range(3):
            for _ in range(3):
                same(model(x, edge_index, weight), layer(x, edge_index, weight))
                same(model(x, edge_index), layer(x, edge_index))
            [x.mul_(2.0), edge_index[1, :10].fill_(turn), weight.mul_(0.5)][turn]
        edge_index[:, 40] = 3  # an element that no sample of the tensor hits
        weight[41] = 9.0
        same(model(x, edge_index, weight), layer(x, edge_index, weight))


def test_a_plain_tensor_changed_inside_inference_mode_is_seen(layer: nn.Module) -> None:
    x, edge_index = drawn(1, NODES, WIDTH), drawn_edges(1)
    model = plait.compile(layer, Data(x=x, edge_index=edge_index))
    with torch.inference_mode():
        for turn in range(4):
            same(model(x, edge_index), layer(x, edge_index))
            x.mul_(1.5)
            edge_index[0, turn] = 2


def test_what_is_detached_from_a_tensor_of_inference_mode_is_one_too(layer: nn.Module) -> None:
    with torch.inference_mode():
        made = drawn(1, NODES, WIDTH)
    x, edge_index = made.detach(), drawn_edges(1)  # has a counter, which no write turns
    model = plait.compile(layer, Data(x=x, edge_index=edge_index))
    for _ in range(3):
        model(x, edge_index).sum().backward()
        with torch.inference_mode():
            x.mul_(1.5)
            same(model(x, edge_index), layer(x, edge_index))


def test_weights_of_one_call_are_not_those_of_the_next(layer: nn.Module) -> None:
    x, edge_index, weight = drawn(1, NODES, WIDTH), drawn_edges(1), drawn(2, EDGES)
    model = plait.compile(layer)
    for given in [(weight,), (), (weight,), ()]:
        same(model(x, edge_index, *given), layer(x, edge_index, *given))


# Memory that is exchanged ---------------------------------------------------------------------------------


def by_data(tensor: Tensor, new: Tensor) -> None:
    tensor.data = new


def by_set(tensor: Tensor, new: Tensor) -> None:
    tensor.set_(new)


@pytest.mark.parametrize("exchange", [by_data, by_set])
@pytest.mark.parametrize("which", ["x", "edge_index", "edge_weight"])
def test_exchanged_memory_is_seen_when_addresses_repeat(
    layer: nn.Module, exchange: Callable[[Tensor, Tensor], None], which: str
) -> None:
    given = {"x": drawn(1, NODES, WIDTH), "edge_index": drawn_edges(1), "edge_weight": drawn(2, EDGES)}
    model = plait.compile(layer, Data(x=given["x"], edge_index=given["edge_index"]))
    with torch.no_grad():
        for seed in range(12):
            for _ in range(2):
                same(model(**given), layer(**given))
            make = {"x": lambda s: drawn(s, NODES, WIDTH), "edge_index": drawn_edges}
            exchange(given[which], make.get(which, lambda s: drawn(s, EDGES))(100 + seed))


@pytest.mark.parametrize("write", [lambda t: t.data.mul_(2), lambda t: t.numpy().__imul__(2)])
@pytest.mark.parametrize("which", ["x", "edge_weight"])
def test_writes_that_no_counter_sees_are_seen_where_they_reach_far(
    layer: nn.Module, write: Callable[[Tensor], Any], which: str
) -> None:
    given = {"x": drawn(1, NODES, WIDTH), "edge_index": drawn_edges(1), "edge_weight": drawn(2, EDGES)}
    model = plait.compile(layer, Data(x=given["x"], edge_index=given["edge_index"]))
    for _ in range(3):
        for _ in range(2):
            same(model(**given), layer(**given))
        write(given[which])


def test_values_of_a_sparse_matrix_changed_in_place_are_seen(layer: nn.Module) -> None:
    matrix = torch.zeros(NODES, NODES)
    matrix[drawn_edges(1)[1], drawn_edges(1)[0]] = 1.0
    for adj_t in (matrix.to_sparse_csr(), matrix.to_sparse_coo().coalesce()):
        model, x = plait.compile(layer), drawn(1, NODES, WIDTH)
        for _ in range(3):
            same(model(x, adj_t), layer(x, adj_t))
            adj_t.values().mul_(1.25)


# Results are the user's ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        LGConv,
        lambda: LGConv(normalize=False),
        lambda: APPNP(3, 0.2),
        lambda: GINConv(nn.Identity()),
        lambda: GINConv(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, 3))),
        lambda: SGConv(WIDTH, 3, K=2),
        lambda: GraphConv(WIDTH, 3),
    ],
)
def test_a_result_may_be_written_to(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer = make()
    x, edge_index = drawn(1, NODES, WIDTH) - 0.5, drawn_edges(1)
    expected = layer(x, edge_index).detach().clone()
    model = plait.compile(layer, Data(x=x, edge_index=edge_index))
    for with_grad in (False, True, False):
        for _ in range(3):
            with torch.set_grad_enabled(with_grad):
                out = model(x, edge_index)
            same(out.detach(), expected)
            with torch.no_grad():
                out.mul_(0.0)
                nn.functional.dropout(out, 0.5, inplace=True)


# NaN and infinity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [GCNConv, SAGEConv, GraphConv, lambda a, b: SGConv(a, b, K=2)])
def test_what_is_not_finite_in_a_weight_spreads_over_sparse_features(make: Any, value: float) -> None:
    torch.manual_seed(0)
    layer = make(1500, 16)
    x = (drawn(1, 500, 1500) < 0.01).float()
    edge_index = drawn_edges(1)
    model = plait.compile(layer, Data(x=x, edge_index=edge_index))
    same(model(x, edge_index), layer(x, edge_index))
    if type(layer) in (GCNConv, SAGEConv):  # else nothing is tested
        assert "sparse features" in model.plan.formulas()
    with torch.no_grad():
        next(p for p in layer.parameters() if p.dim() == 2)[2, 3] = value
    expected, made = layer(x, edge_index), model(x, edge_index)
    assert expected.isnan().sum() >= 250
    same(made, expected)


def test_what_is_not_finite_in_a_gradient_spreads_over_sparse_features() -> None:
    torch.manual_seed(0)
    layer = GCNConv(1500, 16)
    x, edge_index = (drawn(1, 500, 1500) < 0.01).float(), drawn_edges(1)
    model = plait.compile(layer, Data(x=x, edge_index=edge_index))
    grads = []
    for net in (layer, model):
        layer.zero_grad()
        out = net(x, edge_index)
        grad = torch.ones_like(out)
        grad[3, 2] = float("nan")
        out.backward(grad)
        grads.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    for expected, made in zip(*grads, strict=True):
        same(made, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_what_is_not_finite_in_the_features_spreads_as_in_pyg(aggr: str, value: float) -> None:
    torch.manual_seed(0)
    layer = SAGEConv(WIDTH, 4, aggr=aggr)
    x, edge_index = drawn(1, NODES, WIDTH), drawn_edges(1)
    x[4, 2] = value
    same(plait.compile(layer)(x, edge_index), layer(x, edge_index))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("make", [GCNConv, GraphConv, lambda a, b: LGConv(), lambda a, b: ChebConv(a, b, 3)])
def test_edge_weights_that_are_no_numbers_spread_as_in_pyg(make: Any, value: float) -> None:
    torch.manual_seed(0)
    layer = make(WIDTH, 4)
    x, edge_index, weight = drawn(1, NODES, WIDTH), drawn_edges(1), drawn(2, EDGES)
    weight[7] = value
    model = plait.compile(layer)
    for _ in range(2):
        same(model(x, edge_index, weight), layer(x, edge_index, weight))


# The layer itself ------------------------------------------------------------------------------------------


class OwnNorm(ChebConv):
    def __norm__(self, *args: Any, **kwargs: Any) -> Any:
        edge_index, norm = super().__norm__(*args, **kwargs)
        return edge_index, 3.0 * norm


class OwnDefaults(GCNConv):
    """Brings nothing that changes what is computed."""

    def reset_parameters(self) -> None:
        super().reset_parameters()

    def extra_repr(self) -> str:
        return "own"


def test_a_method_of_a_subclass_that_forward_calls_is_seen() -> None:
    torch.manual_seed(0)
    layer = OwnNorm(WIDTH, 4, 3)
    model, x, edge_index = plait.compile(layer), drawn(1, NODES, WIDTH), drawn_edges(1)
    same(model(x, edge_index), layer(x, edge_index))
    assert "__norm__" in str(model.plan)


def test_a_subclass_that_computes_the_same_is_planned() -> None:
    layer = OwnDefaults(WIDTH, 4)
    model, x, edge_index = plait.compile(layer), drawn(1, NODES, WIDTH), drawn_edges(1)
    same(model(x, edge_index), layer(x, edge_index))
    assert model.plan.layers


def test_a_method_set_on_a_layer_is_seen() -> None:
    layer = ChebConv(WIDTH, 4, 3)
    model, x, edge_index = plait.compile(layer), drawn(1, NODES, WIDTH), drawn_edges(1)
    same(model(x, edge_index), layer(x, edge_index))
    norm = layer.__norm__
    for net in (layer, model):
        net.__dict__["__norm__"] = lambda *a, **k: (lambda e, n: (e, 2.0 * n))(*norm(*a, **k))
    same(model(x, edge_index), layer(x, edge_index))


def test_an_option_that_is_a_list_may_be_edited() -> None:
    torch.manual_seed(0)
    layer = MixHopConv(WIDTH, 4, powers=[0, 1, 2], bias=False)
    model, x, edge_index = plait.compile(layer), drawn(1, NODES, WIDTH), drawn_edges(1)
    for _ in range(3):
        same(model(x, edge_index), layer(x, edge_index))
    layer.powers.pop()
    same(model(x, edge_index), layer(x, edge_index))


@pytest.mark.parametrize("change", [0.05, 0.3, 0.0])
@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: APPNP(3, 0.1), "alpha"), (lambda: SSGConv(WIDTH, 4, 0.1, K=3), "alpha"),
     (lambda: GINConv(nn.Linear(WIDTH, 4)), "eps")],
)  # fmt: skip
def test_a_number_of_a_layer_may_change(make: Any, name: str, change: float) -> None:
    torch.manual_seed(0)
    layer = make()
    model, x, edge_index = plait.compile(layer), drawn(1, NODES, WIDTH), drawn_edges(1)
    for turn in range(6):
        for _ in range(2):
            same(model(x, edge_index), layer(x, edge_index))
        value = getattr(layer, name) + change * (turn + 1)
        for net in (layer, model):
            setattr(net, name, value)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("make", [lambda: SAGEConv(WIDTH, 4, aggr="sum"), lambda: GCNConv(WIDTH, 4)])
def test_another_aggregation_in_the_place_of_one(make: Callable[[], Any], is_sparse: bool) -> None:
    layer, edges = make(), coalesce(drawn_edges(1))
    given = to_torch_csr_tensor(edges.flip(0), size=(NODES, NODES)) if is_sparse else edges
    model, x = plait.compile(layer), drawn(1, NODES, WIDTH)
    same(model(x, given), layer(x, given))
    layer.aggr_module = MaxAggregation()
    same(model(x, given), layer(x, given))


@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize("make", [lambda: GINConv(nn.Linear(WIDTH, 4)), lambda: GATConv(WIDTH, 4)])
def test_an_inference_tensor_with_other_data_has_no_counter_and_says_it_is_none(
    make: Callable[[], Any], wants_grad: bool
) -> None:
    layer, edge_index = make(), drawn_edges(1)
    model = plait.compile(layer)
    with torch.inference_mode():
        x = drawn(1, NODES, WIDTH)
    x.data = 2 * x.data
    expected = layer(x.clone(), edge_index)
    with torch.set_grad_enabled(wants_grad):
        for _ in range(3):
            made = model(x, edge_index)
            same(made, expected)
    if wants_grad:
        made.sum().backward()


@pytest.mark.parametrize("make", [lambda: TAGConv(WIDTH, 4), lambda: GCNConv(WIDTH, 4)])
def test_other_features_on_a_graph_that_followed_many_others(make: Callable[[], Any]) -> None:
    layer, edge_index = make(), drawn_edges(1)
    model, x = plait.compile(layer), drawn(1, NODES, WIDTH)
    model(x, edge_index).sum().backward()  # shows that inputs are not written to: they need no copies
    x = torch.zeros(NODES, WIDTH)
    for _ in range(5):
        model(x, edge_index.clone())
    edge_index = edge_index.clone()
    same(model(x, edge_index), layer(x, edge_index))
    for seed in range(3):
        other = drawn(seed, NODES, WIDTH)
        same(model(other, edge_index), layer(other, edge_index))
    same(model(x, edge_index), layer(x, edge_index))


def test_a_cache_that_a_transform_filled_is_no_memory_to_look_at() -> None:
    """PyG's cache then holds what the transform wrapped, and is used after it."""
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 0]])
    x = torch.randn(3, 4)
    model = torch.nn.Sequential()
    model.conv = GCNConv(4, 2, cached=True)
    model.forward = lambda x: model.conv(x, edge_index)  # type: ignore[method-assign]
    compiled = plait.compile(model)
    torch.func.jacrev(lambda x: compiled(x).sum(dim=0))(x)
    torch.testing.assert_close(compiled(x), model(x))


# Weights that another network makes ------------------------------------------------------------------------


def as_attribute(owner: nn.Module, name: str, weight: Tensor) -> None:
    owner._parameters.pop(name, None)
    setattr(owner, name, weight)


def as_buffer(owner: nn.Module, name: str, weight: Tensor) -> None:
    owner._parameters.pop(name, None)
    owner._buffers[name] = weight


@pytest.mark.parametrize("put", [as_attribute, as_buffer])
@pytest.mark.parametrize("are_all", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: GCNConv(WIDTH, 4),
        lambda: GATConv(WIDTH, 2, heads=2),
        lambda: GATv2Conv(WIDTH, 2, heads=2, concat=False),
        lambda: TransformerConv(WIDTH, 2, heads=2, concat=False),
    ],
)
def test_weights_made_by_another_network_have_gradients(
    make: Callable[[], nn.Module], are_all: bool, put: Callable[[nn.Module, str, Tensor], None]
) -> None:
    layer = make().double().requires_grad_(False)
    model, x, edge_index = plait.compile(layer), drawn(1, NODES, WIDTH).double(), drawn_edges(1)
    places = [(owner, name, p) for owner in layer.modules() for name, p in [*owner._parameters.items()]]
    held = [(owner, name, weight.clone()) for owner, name, weight in places if weight is not None]
    for is_learned in (True, False, True):  # a call between has no gradient
        scale = torch.ones((), dtype=torch.float64, requires_grad=is_learned)
        for owner, name, weight in held if are_all else held[-1:]:
            put(owner, name, weight * scale)
        made, expected = model(x, edge_index), layer(x, edge_index)
        same(made, expected)
        assert made.requires_grad == expected.requires_grad == is_learned
        if is_learned:
            sums = (out.square().sum() for out in (made, expected))
            same(*(torch.autograd.grad(total, scale, retain_graph=True)[0] for total in sums))


@pytest.fixture
def default() -> Iterator[torch.dtype]:
    """torch's default dtype, as it is again afterwards."""
    before = torch.get_default_dtype()
    yield before
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("layer", "dtype", "other"),
    [
        (ClusterGCNConv(WIDTH, 3), torch.float64, torch.bfloat16),  # counts neighbours in the default dtype
        (RGCNConv(WIDTH, 3, num_relations=2), torch.float32, torch.float64),  # adds to zeros of that dtype
    ],
)
def test_another_default_dtype_is_seen(
    layer: nn.Module, dtype: torch.dtype, other: torch.dtype, default: torch.dtype
) -> None:
    layer, x, edges = layer.to(dtype), drawn(1, NODES, WIDTH).to(dtype), drawn_edges(0)
    kinds = [torch.arange(EDGES) % 2] if isinstance(layer, RGCNConv) else []
    compiled = plait.compile(layer)
    for now in (default, other, default):
        torch.set_default_dtype(now)
        torch.testing.assert_close(compiled(x, edges, *kinds), layer(x, edges, *kinds))
    assert list(compiled.plan.layers)
