"""RGCNConv compiled against PyG: outputs, gradients, decompositions, every candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn import FastRGCNConv, RGCNConv

import plait
from plait.cost.machine import default_profile
from plait.ops.work import Matrix, Uniform
from plait.plan.relational import RelationalProblem, choose
from tests.parity.harness import agree, close
from tests.parity.test_attention import WIDTH, N, drawn, edges, features

R = 3
OPTIONS: list[dict[str, Any]] = [{}, {"num_bases": 2}, {"num_blocks": 4}]
CHOICES = ["aggregate", "transform", "aggregate pairs", "transform pairs"]


def kinds(given: torch.Tensor, count: int = R) -> torch.Tensor:
    return torch.randint(0, count, (given.shape[1],), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_answers_like_pyg(options: dict[str, Any], aggr: str) -> None:
    module = drawn(RGCNConv(WIDTH, 8, R, aggr=aggr, **options))
    agree(module, features(), edges(), kinds(edges()), calls=2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("choice", [*CHOICES, "bases"])
def test_every_candidate_computes_the_same(
    choice: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from plait.plan import relational as plan

    if choice == "bases" and "num_bases" not in options:
        return
    found = plan.candidates
    monkeypatch.setattr(plan, "candidates", lambda p: [c for c in found(p) if c.name == choice])
    module = drawn(RGCNConv(WIDTH, 8, R, **options), torch.float64)
    compiled = agree(module, features(dtype=torch.float64), edges(), kinds(edges()))
    assert compiled.plan.layers[0].choice == choice
    bare = drawn(RGCNConv((WIDTH, 5), 8, R, aggr="sum", root_weight=False, bias=False, **options))
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    agree(bare, (features(30), features(N, 5)), given, kinds(given))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_without_nodes_has_gradients(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.plan import relational as plan

    found = plan.candidates
    monkeypatch.setattr(plan, "candidates", lambda p: [c for c in found(p) if c.name == choice])
    given = torch.empty(2, 0, dtype=torch.int64)
    module = drawn(RGCNConv(1, 4, R, root_weight=False, bias=False))
    agree(module, torch.zeros(0, 1), given, kinds(given))


def test_pairs_of_features_have_roots_of_their_own() -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    agree(drawn(RGCNConv((WIDTH, 7), 5, R)), (features(30), features(N, 7)), given, kinds(given))


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("x", [None, torch.randperm(N)], ids=["all", "chosen"])
def test_row_numbers_stand_for_embeddings(x: torch.Tensor | None, options: dict[str, Any]) -> None:
    module = drawn(RGCNConv(N, 5, R, **options))
    given = (x, edges(), kinds(edges()))
    expected = module(*given)
    expected.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    compiled = plait.compile(module)
    result = compiled(*given)
    assert not compiled.plan.not_planned
    result.square().sum().backward()
    close(result, expected, 1e-5, "output")
    for name, parameter in compiled.named_parameters():
        assert parameter.grad is not None
        close(parameter.grad, grads[name], 1e-4, name)


def test_relations_without_edges_hubs_and_graphs_without_any() -> None:
    module = drawn(RGCNConv(WIDTH, 5, 40))
    agree(module, features(), edges(), kinds(edges(), 30) + 4)
    hub = torch.stack([torch.randint(0, N, (1000,)), torch.zeros(1000, dtype=torch.int64)])
    agree(drawn(RGCNConv(WIDTH, 5, R)), features(), hub, kinds(hub))
    nothing = hub[:, :0]
    agree(drawn(RGCNConv(WIDTH, 5, R, num_blocks=None, aggr="sum")), features(), nothing, kinds(nothing))


def test_relations_out_of_range_are_passed_over_as_in_pyg() -> None:
    agree(drawn(RGCNConv(WIDTH, 8, R, num_blocks=2)), features(), edges(), kinds(edges(), R + 2))


def test_target_to_source_and_inputs_without_gradients() -> None:
    module = drawn(RGCNConv(WIDTH, 5, R, flow="target_to_source"))
    agree(module, features(), edges(), kinds(edges()), wants_grad=False)
    agree(drawn(RGCNConv(WIDTH, 5, R)).requires_grad_(False), features(), edges(), kinds(edges()))


def test_other_aggregations_and_subclasses_run_in_pyg() -> None:
    module = drawn(RGCNConv(WIDTH, 5, R, aggr="max"))
    compiled = agree(module, features(), edges(), kinds(edges()), must_plan=False)
    assert "max" in str(compiled.plan.not_planned)
    fast = agree(drawn(FastRGCNConv(WIDTH, 5, R)), features(), edges(), kinds(edges()), must_plan=False)
    assert fast.plan.not_planned


def problem(inner: int, width: int, relations: int, edges: int = 2000000, **more: Any) -> RelationalProblem:
    rows = 50000
    matrix = Matrix(rows, rows, edges, True, Uniform(rows), Uniform(rows))
    pairs = min(edges, rows * relations)
    return RelationalProblem(
        "layer", matrix, relations, pairs, pairs, inner, width, default_profile(), **more
    )


def test_the_narrow_side_is_gathered_and_many_relations_go_by_pairs() -> None:
    assert choose(problem(32, 256, 4)).choice == "aggregate"
    assert choose(problem(256, 32, 4)).choice == "transform"
    assert choose(problem(64, 64, 200, 100000)).choice.endswith("pairs")
    assert choose(problem(16, 64, 60, 400000, bases=2)).choice == "bases"
    assert max(map(len, choose(problem(32, 256, 4)).lines())) <= 100
