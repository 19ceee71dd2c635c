"""EdgeConv compiled against PyG: outputs, gradients, maps, reductions, ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric import typing
from torch_geometric.nn import DynamicEdgeConv, EdgeConv

import plait
from plait.plan.edgewise import EdgeMap, ways
from plait.plan.ways import Way
from plait.runtime import orders
from tests.parity.harness import agree, close
from tests.parity.test_attention import WIDTH, N, drawn, edges, features


def linear() -> nn.Module:
    return nn.Linear(2 * WIDTH, 7)


def rectified() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * WIDTH, 9), nn.ReLU(), nn.Linear(9, 7))


def deep() -> nn.Module:
    inner = nn.Sequential(nn.Linear(9, 33), nn.LayerNorm(33), nn.Tanh())
    return nn.Sequential(
        nn.Linear(2 * WIDTH, 9, bias=False), nn.ELU(), inner, nn.Dropout(0.0), nn.Linear(33, 5), nn.ReLU()
    )


MAPS = {"linear": linear, "rectified": rectified, "deep": deep}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks on a small graph."""
    monkeypatch.setattr(orders, "_LEAST_EDGES", 64)
    monkeypatch.setattr(orders, "_BLOCK_BYTES", 1)


@pytest.mark.parametrize("aggr", ["add", "mean", "max", "min"])
@pytest.mark.parametrize("name", list(MAPS))
def test_answers_like_pyg(name: str, aggr: str) -> None:
    agree(drawn(EdgeConv(MAPS[name](), aggr=aggr)), features(), edges(count=2000), calls=2)


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("name", list(MAPS))
def test_double_precision_pairs_hubs_and_no_edges(name: str, aggr: str) -> None:
    def module() -> Any:
        return drawn(EdgeConv(MAPS[name](), aggr=aggr), torch.float64)

    x = features(dtype=torch.float64)
    hub = torch.stack([torch.randint(0, N, (1000,)), torch.zeros(1000, dtype=torch.int64)])
    agree(module(), x, hub)
    agree(module(), x, hub[:, :0])
    agree(module(), (features(30, dtype=torch.float64), x), torch.stack([hub[0] % 30, hub[0]]))
    agree(module(), x, edges().repeat(1, 2))


def test_zeros_that_tie_share_the_gradient_as_in_pyg() -> None:
    module = drawn(EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU()), aggr="max"))
    with torch.no_grad():
        module.nn[0].bias -= 4.0
    agree(module, features(), edges())


@pytest.mark.parametrize("count", [60, 2000])
@pytest.mark.parametrize("aggr", ["max", "min"])
def test_rows_of_zeros_are_no_tie_with_the_zeros_that_pyg_fills_in(aggr: str, count: int) -> None:
    x = features()
    x[::2] = 0.0  # projected, they are 0: the largest projected row often is; the message is not
    agree(drawn(EdgeConv(linear(), aggr=aggr)), x, edges(count=count))


def test_batch_norm_is_refused_in_training_and_run_in_evaluation() -> None:
    def module() -> Any:
        norm = nn.BatchNorm1d(9)
        return drawn(EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 9), norm, nn.ReLU(), nn.Linear(9, 5))))

    trained = agree(module(), features(), edges(), must_plan=False)
    assert "BatchNorm" in str(trained.plan.not_planned)
    agree(module().eval(), features(), edges())


def test_frozen_weights_and_inputs_without_gradients() -> None:
    agree(drawn(EdgeConv(deep())), features(), edges(), wants_grad=False)
    agree(drawn(EdgeConv(deep())).requires_grad_(False), features(), edges())
    agree(
        drawn(EdgeConv(rectified(), aggr="sum")).requires_grad_(False), features(), edges(), wants_grad=False
    )


@pytest.mark.parametrize(
    ("map_", "word"),
    [
        (nn.Sequential(nn.Linear(2 * WIDTH, 4), nn.Dropout(0.5)), "Dropout"),
        (nn.Sequential(nn.ReLU(), nn.Linear(2 * WIDTH, 4)), "begin"),
        (nn.Sequential(nn.Linear(2 * WIDTH, 4), nn.Softmax(0)), "Softmax"),
    ],
)
def test_what_is_not_lowered_runs_in_pyg_and_says_why(map_: nn.Module, word: str) -> None:
    compiled = agree(drawn(EdgeConv(map_)), features(), edges(), must_plan=False)
    assert word in str(compiled.plan.not_planned)


@pytest.mark.parametrize("name", list(MAPS))
def test_plans_print_within_a_hundred_columns(name: str) -> None:
    compiled = agree(drawn(EdgeConv(MAPS[name]())), features(), edges())
    assert max(map(len, compiled.plan.layers[0].lines())) <= 100


def choose(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the way of this name alone."""

    def only(map_: EdgeMap, is_training: bool) -> list[Way]:
        return [way for way in ways(map_, is_training) if way.name == choice]

    monkeypatch.setattr("plait.pyg.layers.edgewise.ways", only)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("choice", ["rectified", "rectified again"])
def test_counts_that_are_kept_and_recomputed_give_the_same(
    choice: str, aggr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(choice, monkeypatch)
    for given in (edges(count=2000), edges()[:, :0]):
        compiled = agree(drawn(EdgeConv(rectified(), aggr=aggr)), features(), given)
        assert compiled.plan.layers[0].choice == choice


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", list(MAPS))
def test_a_target_without_edges_has_nothing_of_its_own_row(name: str, aggr: str) -> None:
    x = features()
    x[0, 0] = torch.nan
    listed = edges(count=2000)
    listed = listed[:, (listed != 0).all(0)]
    compiled = plait.compile(drawn(EdgeConv(MAPS[name](), aggr=aggr)))
    assert bool((compiled(x, listed)[0] == 0).all())


def leaky() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * WIDTH, 9), nn.LeakyReLU(), nn.Linear(9, 7))


@pytest.mark.parametrize(
    ("choice", "map_"),
    [("blocks", rectified), ("tiles", rectified), ("blocks", leaky), ("marked", leaky)],
)
@pytest.mark.parametrize("aggr", ["max", "min"])
def test_tiles_marks_and_recomputed_blocks_compute_the_same(
    choice: str, map_: Callable[[], nn.Module], aggr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(choice, monkeypatch)
    for given in (edges(count=2000), edges(), edges()[:, :0]):
        compiled = agree(drawn(EdgeConv(map_(), aggr=aggr)), features(), given)
        assert compiled.plan.layers[0].choice == choice
    frozen = drawn(EdgeConv(map_(), aggr=aggr)).requires_grad_(False)
    agree(frozen, features(), edges())
    if map_ is rectified:
        return
    wide = nn.Sequential(nn.Linear(2 * WIDTH, 9), nn.Linear(9, 17, bias=False), nn.ReLU(), nn.Linear(17, 21))
    agree(drawn(EdgeConv(wide, aggr=aggr), torch.float64), features(dtype=torch.float64), edges())


@pytest.mark.parametrize("batch", [None, torch.arange(N) // 17])
def test_dynamic_edges_are_the_nearest_neighbours(
    batch: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyG needs a compiled package for its own search, so the edges are found here by sorting."""
    monkeypatch.setattr(typing, "WITH_KNN", True)
    dynamic, x = drawn(DynamicEdgeConv(rectified(), k=8)), features()
    listed = []
    for i in range(N):
        distance = (x - x[i]).square().sum(1)
        inside = [j for j in distance.argsort().tolist() if batch is None or batch[i] == batch[j]]
        listed += [(j, i) for j in inside[:8]]
    expected = EdgeConv(dynamic.nn)
    wanted = x.clone().requires_grad_()
    drawn(dynamic)  # EdgeConv has drawn the shared weights anew
    out = expected(wanted, torch.tensor(listed).t())
    out.sum().backward()
    compiled = plait.compile(dynamic)
    own = x.clone().requires_grad_()
    result = compiled(own, batch)
    assert not compiled.plan.not_planned
    close(result, out, 1e-5, "output")
    result.sum().backward()
    assert own.grad is not None
    assert wanted.grad is not None
    close(own.grad, wanted.grad, 1e-4, "gradient of x")


@pytest.mark.parametrize("between", [nn.BatchNorm1d(4), nn.Dropout(0.5)], ids=["norm", "dropout"])
def test_gradients_are_those_of_the_mode_of_the_call(between: nn.Module) -> None:
    torch.manual_seed(0)
    layer = EdgeConv(nn.Sequential(nn.Linear(6, 4), between, nn.ELU())).eval()
    x, edges = torch.randn(9, 3), torch.randint(0, 9, (2, 30))
    gradients = []
    for model in (layer, plait.compile(layer)):
        layer.zero_grad()
        out = model.eval()(x, edges)
        model.train()
        out.square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)
