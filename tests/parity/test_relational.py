"""RGCNConv compiled against PyG: outputs, gradients, decompositions, every candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import FastRGCNConv, RGCNConv

import plait
from plait.cost.machine import default_profile
from plait.ops.work import Matrix, Uniform
from plait.plan.plan import LayerPlan
from plait.plan.relational import RelationalLayer, cost, ways
from plait.plan.search import Problem
from plait.plan.ways import choose
from tests.parity.chosen import only
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
def test_weights_alone_have_gradients_after_a_call_without(options: dict[str, Any]) -> None:
    module = drawn(RGCNConv(WIDTH, 8, R, bias=False, root_weight=False, **options))
    given = (features().detach(), edges(), kinds(edges()))
    compiled = plait.compile(module)
    with torch.no_grad():
        compiled(*given)
    out = compiled(*given)
    assert out.requires_grad
    found = torch.autograd.grad(out.square().sum(), list(module.parameters()))
    wanted = torch.autograd.grad(module(*given).square().sum(), list(module.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs, 1e-4, "gradient")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("choice", [*CHOICES, "bases"])
def test_every_candidate_computes_the_same(
    choice: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice == "bases" and "num_bases" not in options:
        return

    only(choice, monkeypatch)
    module = drawn(RGCNConv(WIDTH, 8, R, **options), torch.float64)
    compiled = agree(module, features(dtype=torch.float64), edges(), kinds(edges()))
    assert compiled.plan.layers[0].choice == choice
    bare = drawn(RGCNConv((WIDTH, 5), 8, R, aggr="sum", root_weight=False, bias=False, **options))
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    agree(bare, (features(30), features(N, 5)), given, kinds(given))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_without_nodes_has_gradients(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(choice, monkeypatch)
    given = torch.empty(2, 0, dtype=torch.int64)
    module = drawn(RGCNConv(1, 4, R, root_weight=False, bias=False))
    agree(module, torch.zeros(0, 1), given, kinds(given))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_single_block_is_the_whole_weight(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(choice, monkeypatch)
    agree(drawn(RGCNConv(WIDTH, 8, R, num_blocks=1)), features(), edges(), kinds(edges()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_checkpoint_sees_the_same_tensors_where_a_layer_is_planned_inside(options: dict[str, Any]) -> None:
    compiled = plait.compile(drawn(RGCNConv(WIDTH, 8, R, **options)))
    x = features().requires_grad_()
    checkpoint(compiled, x, edges(), kinds(edges()), use_reentrant=False).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_layer_is_planned_where_hooks_on_saved_tensors_are_forbidden(options: dict[str, Any]) -> None:
    compiled = plait.compile(drawn(RGCNConv(WIDTH, 8, R, **options)))
    with torch.autograd.graph.disable_saved_tensors_hooks("forbidden"):
        compiled(features(), edges(), kinds(edges())).sum().backward()
    assert not compiled.plan.not_planned


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


def planned(inner: int, width: int, relations: int, edges: int = 2000000, **more: Any) -> LayerPlan:
    rows = 50000
    matrix = Matrix(rows, rows, edges, True, Uniform(rows), Uniform(rows))
    pairs = min(edges, rows * relations)
    sizes = {"NR": rows * relations, "MR": rows * relations, "P": pairs, "Q": pairs}
    sizes |= {"N": rows, "M": rows, "E": edges}
    problem = Problem(
        (), sizes, lambda e: matrix if e.name == "A" else cost(e.name, matrix, sizes),  # type: ignore[attr-defined]
        default_profile(), ("X", "W", "T", "V", "K", "R", "b"),
    )  # fmt: skip
    return choose(problem, ways(RelationalLayer(inner, width, relations, **more), sizes))


def test_the_narrow_side_is_gathered_and_many_relations_go_by_pairs() -> None:
    assert planned(32, 256, 4).choice == "aggregate"
    assert planned(256, 32, 4).choice == "transform"
    assert planned(64, 64, 200, 100000).choice.endswith("pairs")
    assert planned(16, 64, 60, 400000, bases=2).choice == "bases"
    assert max(map(len, planned(32, 256, 4).lines())) <= 100


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_step_has_a_measured_time(options: dict[str, Any]) -> None:
    class Typed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = RGCNConv(WIDTH, 8, R, **options)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
            return self.layer(x, edge_index, kinds(edge_index))

    (found,) = plait.explain(Typed(), Data(x=features(), edge_index=edges()), analyze=True).layers
    assert all(row.measured is not None for row in found.rows())
    assert max(map(len, found.lines())) <= 100


@pytest.mark.parametrize("frozen", ["weight", "comp", "root", "bias"])
def test_frozen_weights_have_no_gradient_and_the_others_theirs(frozen: str) -> None:
    module = drawn(RGCNConv(WIDTH, 8, R, num_bases=2), torch.float64)
    getattr(module, frozen).requires_grad_(False)
    agree(module, features(dtype=torch.float64), edges(), kinds(edges()), wants_grad=False, calls=2)


@pytest.mark.parametrize("count", [0, 3])
def test_edges_may_come_as_an_edge_index_of_pyg(count: int) -> None:
    layer, x, listed = RGCNConv(4, 4, 2), torch.randn(5, 4), torch.tensor([[0, 1, 2], [1, 2, 0]])
    given, of_edges = EdgeIndex(listed[:, :count], sparse_size=(5, 5)), torch.zeros(count, dtype=torch.long)
    torch.testing.assert_close(plait.compile(layer)(x, given, of_edges), layer(x, given, of_edges))


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_a_parametrized_weight_is_read_as_often_as_in_pyg(aggr: str) -> None:
    reads = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            reads.append(1)
            return weight

    layer = RGCNConv(4, 2, num_relations=2, aggr=aggr)
    nn.utils.parametrize.register_parametrization(layer, "weight", Counted())
    x, edge_index, edge_type = torch.randn(6, 4), torch.randint(0, 6, (2, 12)), torch.randint(0, 2, (12,))
    seen = []
    for model in (layer, plait.compile(layer)):
        reads.clear()
        model(x, edge_index, edge_type)
        seen.append(len(reads))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("options", "name", "shape"),
    [
        ({}, "weight", (2 * WIDTH, WIDTH)),  # PyG refuses it, though it has as many numbers
        ({}, "weight", (4, WIDTH, WIDTH)),
        ({}, "root", (WIDTH, 1)),
        ({}, "bias", (1,)),
        ({}, "bias", (WIDTH, 1)),
        ({"num_bases": 2}, "comp", (1, 2, 2)),
        ({"num_blocks": 2}, "weight", (4, 2, WIDTH // 2, WIDTH // 2)),
    ],
)
def test_weights_of_another_shape_are_pygs(
    options: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    layer = RGCNConv(WIDTH, WIDTH, 2, **options)
    model = plait.compile(layer)
    x, ends = features(), edges()
    kind = torch.arange(ends.shape[1]) % 2
    model(x, ends, kind)
    assert model.plan.layers
    setattr(layer, name, nn.Parameter(torch.ones(shape)))

    def answer(run: Any) -> Any:
        layer.zero_grad()
        try:
            out = run(x, ends, kind)
        except (IndexError, RuntimeError, ValueError) as error:
            return str(error)
        out.sum().backward()
        return [out.detach(), *(p.grad for p in layer.parameters())]

    wanted, given = answer(layer), answer(model)
    assert (wanted == given) if isinstance(wanted, str) else all(map(torch.equal, wanted, given))
