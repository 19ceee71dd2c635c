"""Layers lowered to pieces against PyG: outputs, gradients of everything, options, what stays in PyG."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch_geometric.nn import (
    AGNNConv,
    CGConv,
    FAConv,
    FiLMConv,
    GatedGraphConv,
    GENConv,
    GMMConv,
    SuperGATConv,
)

import plait
from tests.parity.harness import agree, close
from tests.parity.test_attention import WIDTH, N, drawn, edges, features

DTYPES = [torch.float32, torch.float64]


class With(torch.nn.Module):
    """A layer with what it takes after the edges as parameters, so that their gradients are compared too."""

    def __init__(self, layer: Any, *more: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.more = torch.nn.ParameterList([torch.nn.Parameter(value) for value in more])

    def forward(self, x: Any, edge_index: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, FAConv):
            out: torch.Tensor = self.layer(x, self.more[0], edge_index, *self.more[1:])
            return out
        out = self.layer(x, edge_index, *self.more)
        return out


def attributes(count: int, width: int | None, dtype: torch.dtype) -> torch.Tensor:
    shape = (count,) if width is None else (count, width)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"requires_grad": False}, {"add_self_loops": False}], ids=str)
def test_agnn(options: dict[str, Any], dtype: torch.dtype) -> None:
    agree(drawn(AGNNConv(**options), dtype), features(dtype=dtype), edges(), calls=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"attention_type": "SD"}, {"concat": False, "bias": False}, {"heads": 1}], ids=str
)
def test_super_gat_outside_training(options: dict[str, Any], dtype: torch.dtype) -> None:
    module = drawn(SuperGATConv(WIDTH, 5, **{"heads": 3, **options}), dtype).eval()
    agree(module, features(dtype=dtype), edges(), calls=2)


class WithLoss(torch.nn.Module):
    """SuperGAT's output beside its loss on sampled edges."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, *more: Any) -> torch.Tensor:
        random.seed(0)  # PyG draws negative edges with it
        out: torch.Tensor = self.layer(x, edge_index, *more)
        return torch.cat([out.flatten(), self.layer.get_attention_loss().view(1)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"attention_type": "SD", "edge_sample_ratio": 0.5}, {"concat": False, "add_self_loops": False}],
    ids=str,
)
def test_super_gat_in_training_with_its_loss(options: dict[str, Any], dtype: torch.dtype) -> None:
    negative = torch.stack([torch.arange(20) % N, torch.arange(20) * 7 % N])
    for more in ((), (negative,)):  # a layer keeps what its loss is made of, and is not copied after that
        module = drawn(SuperGATConv(WIDTH, 5, heads=3, **options), dtype)
        agree(WithLoss(module), features(dtype=dtype), edges(), *more, calls=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"eps": 0.0}, {"add_self_loops": False}], ids=str)
def test_fa(options: dict[str, Any], dtype: torch.dtype) -> None:
    first = features(width=WIDTH, dtype=dtype).flip(0)
    agree(With(drawn(FAConv(WIDTH, **options), dtype), first), features(dtype=dtype), edges(), calls=2)


def test_fa_with_weights_of_edges_and_their_gradient() -> None:
    given = edges()
    module = With(
        drawn(FAConv(WIDTH, normalize=False)), features(), attributes(given.shape[1], None, torch.float32)
    )
    agree(module, features(), given)


def test_fa_hands_out_its_weights() -> None:
    module, given = drawn(FAConv(WIDTH)), edges()
    compiled = plait.compile(module)
    _, (listed, weights) = module(features(), features(), given, return_attention_weights=True)
    _, (mine, own) = compiled(features(), features(), given, return_attention_weights=True)
    assert torch.equal(mine, listed)
    close(own, weights, 1e-5, "weights")


def test_gradients_of_the_output_reach_the_weights_that_fa_handed_out() -> None:
    module, given, found = drawn(FAConv(WIDTH)), edges(), []
    for model in (module, plait.compile(module)):
        out, (_, weights) = model(features(), features(), given, return_attention_weights=True)
        found.append(torch.autograd.grad(out.square().sum(), weights)[0])
    close(found[1], found[0], 1e-4, "gradient of the weights")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"aggr": "add", "bias": False}], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_gmm(options: dict[str, Any], count: int, dtype: torch.dtype) -> None:
    given = edges()
    attr = attributes(given.shape[1], 3, dtype)
    module = With(drawn(GMMConv(WIDTH, 7, dim=3, kernel_size=count, **options), dtype), attr)
    agree(module, features(dtype=dtype), given, calls=2)


GEN_OPTIONS: list[dict[str, Any]] = [
    {},
    {"learn_t": True, "t": 0.5},
    {"aggr": "softmax_sg", "t": 2.0},
    {"aggr": "powermean"},
    {"aggr": "power", "learn_p": True, "p": 2.0},
    {"msg_norm": True, "learn_msg_scale": True},
]


def gen(width: int, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(4)
    return GENConv(WIDTH, width, norm="layer", **options).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [WIDTH, 7])
@pytest.mark.parametrize("options", GEN_OPTIONS, ids=str)
def test_gen(options: dict[str, Any], width: int, dtype: torch.dtype) -> None:
    agree(gen(width, dtype, **options), features(dtype=dtype), edges(), calls=2)


@pytest.mark.parametrize("edge_dim", [7, 3])
@pytest.mark.parametrize("options", GEN_OPTIONS[1:5], ids=str)
def test_gen_edge_features_and_their_gradient(options: dict[str, Any], edge_dim: int) -> None:
    given = edges()
    module = gen(7, torch.float64, edge_dim=edge_dim, **options)
    agree(
        With(module, attributes(given.shape[1], edge_dim, torch.float64)),
        features(dtype=torch.float64),
        given,
    )


def test_gen_with_large_messages_does_not_overflow() -> None:
    agree(gen(WIDTH, torch.float32, t=1.0), features() * 1e3, edges())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"act": None}, {"aggr": "add"}, {"act": torch.nn.Tanh()}], ids=str)
def test_film(options: dict[str, Any], dtype: torch.dtype) -> None:
    agree(drawn(FiLMConv(WIDTH, 7, **options), dtype), features(dtype=dtype), edges(), calls=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"act": None}, {"aggr": "add"}, {"flow": "target_to_source"}], ids=str
)
def test_film_of_several_relations(options: dict[str, Any], dtype: torch.dtype) -> None:
    module = drawn(FiLMConv(WIDTH, 33, num_relations=3, **options), dtype)
    for given in (edges(), edges().repeat(1, 3), edges()[:, :0]):
        # relation 1 has no edge, and one is out of range, which PyG passes over
        kind = torch.where(torch.arange(given.shape[1]) % 2 == 0, 0, 2)
        kind[:1] = 5
        agree(module, features(dtype=dtype), given, kind, calls=2)


def test_film_of_several_relations_between_pairs() -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    module = drawn(FiLMConv((WIDTH, 7), 5, num_relations=2))
    agree(module, (features(30), features(N, 7)), given, torch.arange(200) % 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 4])
@pytest.mark.parametrize("options", [{}, {"aggr": "mean", "bias": False}, {"batch_norm": True}], ids=str)
def test_crystal_graphs(options: dict[str, Any], dim: int, dtype: torch.dtype) -> None:
    given = edges()
    more = (attributes(given.shape[1], dim, dtype),) if dim else ()
    module = drawn(CGConv(WIDTH, dim=dim, **options), dtype)
    agree(With(module, *more), features(dtype=dtype), given, calls=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"aggr": "mean"}], ids=str)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_gated_graphs(options: dict[str, Any], is_weighted: bool, dtype: torch.dtype) -> None:
    given = edges()
    more = (attributes(given.shape[1], None, dtype),) if is_weighted else ()
    module = drawn(GatedGraphConv(WIDTH + 3, 3, **options), dtype)
    agree(With(module, *more), features(dtype=dtype), given, calls=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CGConv((WIDTH, 7)),
        lambda: FiLMConv((WIDTH, 7), 5),
        lambda: GENConv((WIDTH, 7), 6, norm="layer"),
    ],
)
def test_pairs_of_features(make: Any) -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    torch.manual_seed(0)
    agree(make(), (features(30), features(N, 7)), given)


LAYERS = [
    lambda: AGNNConv(),
    lambda: SuperGATConv(WIDTH, 5, heads=3).eval(),
    lambda: GENConv(WIDTH, 7, norm="layer"),
    lambda: FiLMConv(WIDTH, 7),
    lambda: CGConv(WIDTH),
    lambda: GatedGraphConv(WIDTH, 2),
]


@pytest.mark.parametrize("make", LAYERS)
def test_a_hub_no_edges_and_swapped_flow(make: Any) -> None:
    torch.manual_seed(0)
    hub = torch.stack(
        [torch.randint(0, N, (3200,)), torch.cat([torch.zeros(3000).long(), torch.arange(200) % N])]
    )
    # in double precision: a sum of 3000 float32 in another order moves a saturated cell by more than 1e-5
    agree(make().double(), features(dtype=torch.float64), hub)
    agree(make(), features(), torch.zeros((2, 0), dtype=torch.int64))
    swapped = make()
    swapped.flow = "target_to_source"
    agree(swapped, features(), edges())


@pytest.mark.parametrize("make", LAYERS)
def test_the_plan_names_its_steps_and_analyze_measures_them(make: Any) -> None:
    from torch_geometric.data import Data

    data = Data(x=features().requires_grad_(), edge_index=edges())
    plan = plait.explain(make(), data, analyze=True, mode="training")
    steps = plan.to_dict()["layers"][0]["steps"]
    assert [step["op"] for step in steps if step["measured_seconds"] is None] == []


@pytest.mark.parametrize(
    ("make", "more", "reason"),
    [
        (lambda: GENConv(WIDTH, 5, aggr="max"), (), "softmax and powermean only"),
        (lambda: FiLMConv(WIDTH, 5, act=torch.nn.PReLU()), (), "activation"),
        (lambda: AGNNConv(aggr="mean"), (), "sums only"),
    ],
)
def test_what_stays_in_pyg_says_why(make: Any, more: Any, reason: str) -> None:
    compiled: Any = plait.compile(make())
    compiled(features(), edges(), *more)
    assert reason in compiled.plan.not_planned[0].reason
