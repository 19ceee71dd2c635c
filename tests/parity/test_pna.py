"""PNAConv compiled against PyG: outputs, gradients, aggregators, scalers, towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import Linear, PNAConv

import plait
from plait.cost.machine import default_profile
from plait.ops.work import Matrix, Uniform
from plait.plan.pna import Towers, ways
from plait.plan.search import Problem
from plait.plan.ways import Way, choose
from plait.runtime import orders
from tests.parity.harness import agree
from tests.parity.test_attention import WIDTH, N, WithEdges, drawn, edges, features

AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
HISTOGRAM = torch.tensor([2, 3, 5, 8, 6, 4, 2, 1, 1])


def layer(
    inner: int = WIDTH,
    outer: int = 6,
    aggregators: list[str] = AGGREGATORS,
    scalers: list[str] = SCALERS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> PNAConv:
    module = drawn(PNAConv(inner, outer, aggregators, scalers, HISTOGRAM, **options), dtype)
    module.aggr_module.reset_parameters()
    return module


def only(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one way alone."""

    def chosen(towers: Towers, is_training: bool) -> list[Way]:
        return [way for way in ways(towers, is_training) if way.name == choice]

    monkeypatch.setattr("plait.pyg.layers.pna.ways", chosen)


def test_answers_like_pyg() -> None:
    agree(layer(), features(), edges(), calls=2)


OPTIONS: list[dict[str, Any]] = [
    {"aggregators": ["sum"], "scalers": ["linear"]},
    {"aggregators": ["var", "sum", "max"], "scalers": ["inverse_linear", "identity"]},
    {"aggregators": ["std"], "scalers": ["identity"]},
    {"aggregators": ["mean", "sum", "var", "std", "max", "min"]},
    {"towers": 3},
    {"towers": 2, "divide_input": True, "aggregators": ["max", "std"]},
    {"post_layers": 2, "towers": 2},
    {"train_norm": True, "scalers": ["linear", "amplification", "attenuation"]},
]


@pytest.mark.parametrize("choice", ["after", "before"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_agree_to_double_precision_in_every_candidate(
    options: dict[str, Any], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    compiled = agree(layer(dtype=torch.float64, **options), features(dtype=torch.float64), edges())
    assert compiled.plan.layers[0].choice == choice


def test_scalers_weigh_the_narrower_side() -> None:
    rows, count = 50000, 500000
    matrix = Matrix(rows, rows, count, True, Uniform(rows), Uniform(rows))
    sizes = {"N": rows, "M": rows, "E": count}
    wrt = ("X", "V", "C0", "c0", "D0", "d0", "U0", "u0", "W0")
    problem = Problem((), sizes, lambda expr: matrix, default_profile(), wrt)

    def choice(inner: int, outer: int) -> str:
        names = tuple(AGGREGATORS)
        towers = Towers(inner, outer, 1, names, names, 6, 3, is_divided=False, has_last=False)
        return choose(problem, ways(towers, is_training=True)).choice

    assert choice(256, 32) == "after"
    assert choice(32, 256) == "before"


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (33, 5), (40, 70)])
def test_odd_widths(inner: int, outer: int) -> None:
    agree(layer(inner, outer, dtype=torch.float64), features(width=inner, dtype=torch.float64), edges())


def test_single_precision_is_no_further_from_the_truth_than_pyg() -> None:
    """Deviations lose digits to cancellation in either; compared with double precision."""
    grads = []
    for dtype, is_compiled in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        module: Any = layer(33, 5, dtype=dtype)
        x = features(width=33, dtype=dtype).requires_grad_()
        out = (plait.compile(module) if is_compiled else module)(x, edges())
        out.sum().backward()
        grads.append(torch.cat([x.grad.flatten(), module.pre_nns[0][0].weight.grad.flatten()]).double())
    theirs, ours = ((grad - grads[0]).abs().amax() for grad in grads[1:])
    assert ours <= 2 * theirs


def test_a_hub_repeated_edges_and_no_edges_at_all() -> None:
    hub = torch.stack([torch.randint(0, N, (1000,)), torch.zeros(1000, dtype=torch.int64)])
    agree(layer(), features(), hub)
    agree(layer(), features(), edges().repeat(1, 3))
    agree(layer(), features(), hub[:, :0])


def test_inputs_without_gradients_and_target_to_source() -> None:
    agree(layer(flow="target_to_source"), features(), edges(), wants_grad=False)
    agree(layer().requires_grad_(False), features(), edges(), wants_grad=False)


@pytest.mark.parametrize("options", [{"act": "prelu", "pre_layers": 2}, {"aggregators": ["median"]}], ids=str)
def test_what_is_not_lowered_runs_in_pyg_and_says_why(options: dict[str, Any]) -> None:
    compiled = agree(layer(**options), features(), edges(), must_plan=False)
    assert "planned" in compiled.plan.not_planned[0].reason


def test_a_linear_layer_without_a_bias_put_inside_runs_in_pyg() -> None:
    module = layer()
    module.post_nns[0][0] = Linear(module.post_nns[0][0].in_channels, 6, bias=False)
    compiled = agree(module, features(), edges(), must_plan=False)
    assert "without a bias" in str(compiled.plan.not_planned)


HUB = torch.stack([torch.arange(1000) % N, torch.zeros(1000, dtype=torch.int64)])
IN_BLOCKS: list[dict[str, Any]] = [
    {"edge_dim": 3},
    {"edge_dim": 1, "towers": 3},
    {"edge_dim": 50, "towers": 2, "divide_input": True, "post_layers": 2},
    {"edge_dim": 4, "aggregators": ["sum", "var"], "scalers": ["linear", "identity"]},
    {"pre_layers": 2},
    {"pre_layers": 3, "towers": 2, "act": "leaky_relu", "aggregators": ["sum", "mean", "max"]},
    {"pre_layers": 2, "towers": 2, "divide_input": True, "edge_dim": 7, "post_layers": 2},
]


@pytest.mark.parametrize("choice", ["after", "before"])
@pytest.mark.parametrize("options", IN_BLOCKS, ids=str)
def test_messages_in_blocks_agree_to_double_precision(
    options: dict[str, Any], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    module = layer(dtype=torch.float64, **options)
    x, width = features(dtype=torch.float64), options.get("edge_dim")
    for given in (edges(), edges().repeat(1, 3), HUB, HUB[:, :0]):
        if width is None:
            agree(module, x, given)
        else:
            attr = torch.randn(given.shape[1], width, generator=torch.Generator().manual_seed(3)).double()
            agree(WithEdges(module, attr), x, given, calls=2)


@pytest.mark.parametrize("options", [{"edge_dim": 5}, {"pre_layers": 2}], ids=str)
def test_messages_in_blocks_in_single_precision(options: dict[str, Any]) -> None:
    module = layer(33, 6, ["mean", "min", "max"], **options)
    attr = torch.randn(edges().shape[1], 5, generator=torch.Generator().manual_seed(3))
    agree(WithEdges(module, attr) if "edge_dim" in options else module, features(width=33), edges())


def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_BLOCK_FLOATS", 1 << 8)
    module = layer(dtype=torch.float64, edge_dim=2, pre_layers=2)
    attr = torch.randn(edges().shape[1], 2).double()
    agree(WithEdges(module, attr), features(dtype=torch.float64), edges())


def test_a_layer_without_the_edge_features_it_was_made_for_runs_in_pyg() -> None:
    compiled = plait.compile(layer())
    with pytest.raises(AttributeError, match="edge_encoder"):
        compiled(features(), edges(), torch.randn(edges().shape[1], 2))


def test_the_plan_prints_within_a_hundred_columns() -> None:
    compiled = plait.compile(layer())
    compiled(features(), edges())
    lines = [*compiled.plan.layers[0].lines(), *str(compiled.plan).splitlines()]
    assert any("all aggregators" in line for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("options", [{}, {"towers": 2}, {"edge_dim": 3}], ids=str)
def test_every_step_has_a_measured_time(options: dict[str, Any]) -> None:
    module: Any = layer(**options)
    if "edge_dim" in options:
        module = WithEdges(module, torch.randn(edges().shape[1], 3))
    (found,) = plait.explain(module, Data(x=features(), edge_index=edges()), analyze=True).layers
    assert all(row.measured is not None for row in found.rows())


@pytest.mark.parametrize("frozen", ["pre_nns", "post_nns", "lin", "edge_encoder"])
def test_frozen_parts_have_no_gradient_and_the_others_theirs(frozen: str) -> None:
    module = layer(dtype=torch.float64, edge_dim=2, towers=2)
    getattr(module, frozen).requires_grad_(False)
    attr = torch.randn(edges().shape[1], 2).double()
    agree(WithEdges(module, attr), features(dtype=torch.float64), edges(), wants_grad=False)
