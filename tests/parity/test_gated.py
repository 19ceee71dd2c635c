"""ResGatedGraphConv compiled against PyG: outputs, gradients, options, and what stays in PyG."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch_geometric.nn import ResGatedGraphConv

from plait.cost.machine import default_profile
from plait.ops.work import Matrix, Uniform
from plait.plan.gated import ways
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem
from plait.plan.ways import Way, choose
from tests.parity.harness import agree
from tests.parity.test_attention import WIDTH, N, WithEdges, drawn, edges, features

HUB = torch.stack([torch.arange(1000) % N, torch.zeros(1000, dtype=torch.int64)])


def named(options: dict[str, Any]) -> str:
    """The options without addresses: workers of one run must agree on the names of tests."""
    return re.sub(r"<.*? (\w+) of .*?>", r"\1", str(options))


@pytest.mark.parametrize(
    "options",
    [{}, {"root_weight": False}, {"bias": False}, {"act": torch.sigmoid}],
    ids=named,
)
def test_answers_like_pyg(options: dict[str, Any]) -> None:
    agree(drawn(ResGatedGraphConv(WIDTH, 5, **options)), features(), edges(), calls=2)


@pytest.mark.parametrize(("inner", "width"), [(1, 1), (7, 33), (40, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odd_widths_in_both_precisions(inner: int, width: int, dtype: torch.dtype) -> None:
    agree(drawn(ResGatedGraphConv(inner, width), dtype), features(width=inner, dtype=dtype), edges())


def test_pairs_of_features() -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    agree(drawn(ResGatedGraphConv((WIDTH, 7), 5)), (features(30), features(N, 7)), given)


def test_a_hub_of_a_thousand_edges_and_no_edges_at_all() -> None:
    agree(drawn(ResGatedGraphConv(WIDTH, 5)), features(), HUB)
    agree(drawn(ResGatedGraphConv(WIDTH, 5)), features(), HUB[:, :0])


def test_target_to_source_and_inputs_without_gradients() -> None:
    module = drawn(ResGatedGraphConv(WIDTH, 5, flow="target_to_source"))
    agree(module, features(), edges(), wants_grad=False)


@pytest.mark.parametrize("choice", ["keep", "gate again"])
def test_every_candidate_computes_the_same(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def only(*sizes: Any, **options: Any) -> list[Way]:
        return [way for way in ways(*sizes, **options) if way.name == choice]

    monkeypatch.setattr("plait.pyg.layers.gated.ways", only)
    compiled = agree(drawn(ResGatedGraphConv(WIDTH, 5)), features(), edges())
    assert compiled.plan.layers[0].choice == choice


def test_inference_equals_pyg_and_plans_one_pass() -> None:
    module = drawn(ResGatedGraphConv(WIDTH, 5)).requires_grad_(False)
    compiled = agree(module, features(), edges(), wants_grad=False)
    assert compiled.plan.layers[0].choice == "infer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 19])
@pytest.mark.parametrize(
    "options",
    [{}, {"root_weight": False, "bias": False}],
    ids=named,
)
def test_edge_features_and_their_gradient(options: dict[str, Any], width: int, dtype: torch.dtype) -> None:
    module = drawn(ResGatedGraphConv(WIDTH, 33, edge_dim=width, **options), dtype)
    for given in (edges(), edges().repeat(1, 3), HUB, HUB[:, :0]):
        attr = torch.randn(given.shape[1], width, generator=torch.Generator().manual_seed(3))
        agree(WithEdges(module, attr.to(dtype)), features(dtype=dtype), given, calls=2)


def test_edge_features_between_pairs_and_against_the_flow() -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    module = drawn(ResGatedGraphConv((WIDTH, 7), 5, edge_dim=3))
    agree(WithEdges(module, torch.randn(200, 3)), (features(30), features(N, 7)), given)
    turned = drawn(ResGatedGraphConv(WIDTH, 5, edge_dim=3, flow="target_to_source"))
    agree(WithEdges(turned, torch.randn(edges().shape[1], 3)), features(), edges())


@pytest.mark.parametrize(
    "options",
    [{"act": torch.tanh}, {"aggr": "max"}],
    ids=named,
)
def test_what_is_not_lowered_runs_in_pyg_and_says_why(options: dict[str, Any]) -> None:
    compiled = agree(drawn(ResGatedGraphConv(WIDTH, 5, **options)), features(), edges(), must_plan=False)
    assert "planned" in compiled.plan.not_planned[0].reason


def planned(limit: int | None = None) -> LayerPlan:
    rows, count = 50000, 2000000
    matrix = Matrix(rows, rows, count, True, Uniform(rows), Uniform(rows))
    sizes = {"N": rows, "M": rows, "E": count}
    problem = Problem((), sizes, lambda expr: matrix, default_profile(), ("X", "W"), memory_limit=limit)
    return choose(problem, ways(64, None, 64, has_skip=True, has_bias=True, is_training=True))


def test_slopes_are_kept_unless_memory_is_short() -> None:
    plan = planned()
    assert plan.choice == "keep"
    assert planned(plan.peak_bytes - 1).choice == "gate again"
    assert max(map(len, plan.lines())) <= 100
