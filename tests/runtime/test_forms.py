"""runtime/forms: parity with PyG through a forced form; when a form is looked for, and what is said."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GINConv, GraphConv, SAGEConv

import plait
from plait.errors import InputError
from plait.graph import Graph, hag
from plait.graph.hag import search, tile_schedule
from plait.kernels.partial import Sums
from plait.kernels.spmm import Pattern
from plait.runtime import forms
from plait.runtime.forms import Direction, Forms, Use


def clique_edges(
    sizes: list[int], rng: np.random.Generator, is_directed: bool, has_loops: bool
) -> torch.Tensor:
    """Cliques side by side, some edges dropped, a node without any; loops and repeated edges where asked."""
    pairs, first = [], 0
    for size in sizes:
        u, v = np.nonzero(np.ones((size, size)) - (0 if has_loops else np.eye(size)))
        pairs.append(np.stack([u + first, v + first]))
        first += size
    edges = np.concatenate(pairs, 1)
    if is_directed:
        edges = edges[:, rng.random(edges.shape[1]) < 0.8]
        edges = np.concatenate([edges, edges[:, :5]], 1)
    return torch.from_numpy(edges[:, rng.permutation(edges.shape[1])])


def data_of(is_directed: bool, has_loops: bool, width: int, dtype: torch.dtype) -> Data:
    rng = np.random.default_rng(7)
    edges = clique_edges([9, 12, 5, 14], rng, is_directed, has_loops)
    x = torch.from_numpy(rng.standard_normal((41, width))).to(dtype)
    return Data(x=x, edge_index=edges)


def _gin() -> nn.Module:
    return GINConv(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 19)), train_eps=True)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(6, 19),
    "gcn wide": lambda: GCNConv(6, 3),
    "gcn no loops": lambda: GCNConv(6, 19, add_self_loops=False),
    "sage": lambda: SAGEConv(6, 19),
    "sage sum": lambda: SAGEConv(6, 19, aggr="sum"),
    "graph": lambda: GraphConv(6, 19),
    "gin": _gin,
}


@pytest.mark.parametrize("is_directed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", ["hag", "diff"])
def test_a_forced_form_computes_what_pyg_does(form: str, name: str, is_directed: bool) -> None:
    torch.manual_seed(0)
    data = data_of(is_directed, has_loops=is_directed, width=6, dtype=torch.float64)
    layer = LAYERS[name]().double()
    compiled = plait.compile(copy.deepcopy(layer), data, forms=[form])
    ours, theirs = (data.x.clone().requires_grad_() for _ in range(2))
    out, expected = compiled(ours, data.edge_index), layer(theirs, data.edge_index)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(expected)
    out.backward(seed)
    expected.backward(seed)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    for mine, other in zip(compiled.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10)
    backends = {
        step.price.backend for plan in compiled.plan.layers for step in plan.steps if step.step.op == "spmm"
    }
    assert backends == {form}


def test_the_plan_says_that_a_form_was_forced_and_its_counts() -> None:
    data = data_of(False, False, 6, torch.float32)
    plan = plait.explain(GCNConv(6, 19), data, forms=["hag"])
    assert any("form hag is forced" in note and "shared sums" in note for note in plan.notes)


def test_a_model_of_two_layers_trains_alike_with_and_without_the_form() -> None:
    data = data_of(False, False, 6, torch.float64)
    losses = []
    for names in (["csr"], ["hag"]):
        torch.manual_seed(1)
        model = nn.ModuleList([GCNConv(6, 16), SAGEConv(16, 4)]).double()
        root = _Two(model)
        compiled = plait.compile(root, data, forms=names)
        optimiser = torch.optim.SGD(compiled.parameters(), lr=0.1)
        history = []
        for _ in range(10):
            optimiser.zero_grad()
            loss = compiled(data.x, data.edge_index).square().mean()
            loss.backward()
            optimiser.step()
            history.append(loss.item())
        losses.append(history)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


class _Two(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x, edge_index).relu(), edge_index)


def test_weighted_edges_keep_csr() -> None:
    data = data_of(False, False, 6, torch.float32)
    weight = torch.rand(data.edge_index.shape[1])
    layer = GraphConv(6, 19)
    compiled = plait.compile(layer, data, forms=["hag"])
    out = compiled(data.x, data.edge_index, weight)
    torch.testing.assert_close(out, layer(data.x, data.edge_index, weight), rtol=1e-4, atol=1e-4)
    assert not any(s.price.backend == "hag" for plan in compiled.plan.layers for s in plan.steps)


def test_small_graphs_and_few_epochs_are_never_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.hag, "search", lambda *a, **k: pytest.fail("searched"))
    data = data_of(False, False, 6, torch.float32)
    for options in ({}, {"epochs": 10}, {"forms": ["csr"]}):
        plan = plait.explain(GCNConv(6, 19), data, **options)
        assert not any("pays" in note for note in plan.notes)


def test_the_environment_overrules_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_FORMS", "csr")
    assert forms.chosen_names(["hag"]) == ("csr",)
    monkeypatch.setenv("PLAIT_FORMS", "cbm")
    with pytest.raises(InputError, match=r"PLAIT_FORMS.*csr, hag, diff"):
        forms.chosen_names(None)


@pytest.mark.parametrize("bad", [["coo"], [], "csr"])
def test_unknown_forms_are_refused(bad: object) -> None:
    with pytest.raises(InputError, match="forms"):
        plait.compile(GCNConv(2, 2), forms=bad)


def many_cliques() -> Graph:
    u, v = np.nonzero(1 - np.eye(30, dtype=int))
    first = 30 * np.arange(20)[:, None]
    return Graph.from_edge_index((first + u).ravel(), (first + v).ravel(), 600)


def pattern_of(graph: Graph) -> Callable[[bool], Pattern]:
    return lambda is_transposed: Pattern(graph.indptr, graph.indices, graph.num_sources)


@pytest.mark.parametrize(("gain", "is_used"), [(1.5, True), (1.04, False), (0.7, False)])
def test_a_form_is_used_only_where_the_timed_check_says_so(
    gain: float, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "timed", lambda *a: (gain, 1.0))
    graph, found = many_cliques(), Forms(calls=1_000_000)
    uses = [Use(False, 64), Use(True, 64)]
    form = found.find(graph, torch.float32, (0.5, 0.5), uses, pattern_of(graph))
    assert (form is not None) == is_used
    assert ("form hag pays" if is_used else "form hag does not pay") in found.notes[0]
    assert f"{gain:.2f}x forward at width 64" in found.notes[0]
    again = found.find(graph, torch.float32, (0.5, 0.5), uses, pattern_of(graph))
    assert again is form
    assert len(found.notes) == 1


def test_one_way_may_gain_where_the_other_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        forms, "timed", lambda pattern, sums, use, dtype: (0.8 if use.width > 32 else 2.0, 1.0)
    )
    graph = many_cliques()
    uses = [Use(False, 16), Use(False, 128)]
    form = Forms(calls=1_000_000).find(graph, torch.float32, (0.5, 0.5), uses, pattern_of(graph))
    assert form is not None
    assert form.forward.gain(16) == 2.0
    assert form.forward.gain(128) == 1.0


def test_gains_hold_near_the_width_they_were_timed_at() -> None:
    direction = Direction(Sums(tile_schedule(search(many_cliques()))), "", {64: 2.0})
    assert [direction.gain(w) for w in (0, 1, 31, 32, 64, 128, 129)] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0]


def test_random_graphs_are_refused_by_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.hag, "search", lambda *a, **k: pytest.fail("searched"))
    rng = np.random.default_rng(0)
    graph = Graph.from_edge_index(rng.integers(0, 2000, 20000), rng.integers(0, 2000, 20000), 2000)
    found = Forms(calls=1_000_000)
    assert found.find(graph, torch.float32, (1.0, 1.0), [Use(False, 64)], pattern_of(graph)) is None
    assert "little in common" in found.notes[0]


def test_of_two_forms_that_pay_the_one_that_saves_more_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        forms, "timed", lambda pattern, sums, use, dtype: (2.0, 0.5 if sums.is_signed else 1.0)
    )
    graph = many_cliques()
    found = Forms(("csr", "hag", "diff"), calls=1_000_000)
    form = found.find(graph, torch.float32, (0.5, 0.5), [Use(False, 16)], pattern_of(graph))
    assert form is not None
    assert form.name == "diff"
    assert len(found.notes) == 2


def test_differences_are_used_only_where_they_are_named() -> None:
    assert "diff" not in forms.chosen_names(None)
    assert "diff" not in Forms().names


def test_a_batch_of_graphs_is_a_union_and_one_component_is_none() -> None:
    assert forms.is_union(many_cliques())
    path = Graph.from_edge_index(np.arange(9), np.arange(1, 10), 10)
    assert not forms.is_union(path)
    two = Graph.from_edge_index(np.array([0, 1, 3, 4]), np.array([1, 0, 4, 3]), 6)  # and isolated nodes
    assert forms.is_union(two)
    crossed = Graph.from_edge_index(np.array([0, 1, 2, 3]), np.array([2, 3, 0, 1]), 4)
    assert not forms.is_union(crossed)
    assert not forms.is_union(Graph.from_edge_index(np.zeros(0, int), np.zeros(0, int), 3))


@pytest.mark.parametrize("is_directed", [False, True])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_by_a_forced_form_agree_with_pyg_ties_included(reduce: str, is_directed: bool) -> None:
    data = data_of(is_directed, is_directed, 6, torch.float64)
    layer = SAGEConv(6, 19, aggr=reduce).double()
    compiled = plait.compile(copy.deepcopy(layer), data, forms=["hag"])
    ours, theirs = (data.x.round().requires_grad_() for _ in range(2))  # rounded: many neighbours tie
    out, expected = compiled(ours, data.edge_index), layer(theirs, data.edge_index)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(expected)
    out.backward(seed)
    expected.backward(seed)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    steps = [step for plan in compiled.plan.layers for step in plan.steps if step.step.op == "extremum"]
    assert steps
    assert {step.price.backend for step in steps} == {"hag"}


def test_loops_of_ones_go_inside_the_form() -> None:
    data = data_of(False, False, 6, torch.float64)
    data.x.requires_grad_()
    plan = plait.explain(GCNConv(6, 19).double(), data, forms=["hag"])
    products = [step.step["matrix"] for step in plan.layers[0].steps if step.step.op == "spmm"]
    assert set(products) == {"fold(A + i)"}
    # without its own node a clique's rows all differ; with it they are all the same
    assert any("fold(A + i)" in note for note in plan.notes)


def test_the_plan_of_a_layer_carries_the_counts_and_both_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "timed", lambda *a: (2.5, 1.0))
    monkeypatch.setattr(forms, "csr_seconds", lambda *a: 1.0)
    monkeypatch.setattr(forms, "_LARGEST_FORECAST", 1e9)
    plan = plait.explain(SAGEConv(6, 6), clique_data())
    text = plan.layers[0].because
    for part in ("rows read", "shared sums", "less traffic", "forecast", "2.50x forward at width 6"):
        assert part in text
    assert "2.50x forward" in plan.to_json()


def test_the_plan_of_a_layer_says_why_a_form_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "csr_seconds", lambda *a: 1.0)
    monkeypatch.setattr(forms, "_LARGEST_FORECAST", 1e9)
    for gains, reason in (((0.9, 1.0), "does not pay"), (None, "too little for a search")):
        if gains is None:
            monkeypatch.setattr(forms, "csr_seconds", lambda *a: 1e-9)
        else:
            monkeypatch.setattr(forms, "timed", lambda *a, gains=gains: gains)
        plan = plait.explain(SAGEConv(6, 6), clique_data())
        assert plan.layers[0].rejected[0].candidate == "A in another form"
        assert reason in plan.layers[0].rejected[0].why
        assert "in another form" in plan.formulas()


def clique_data() -> Data:
    graph = many_cliques()
    edges = torch.from_numpy(np.stack([graph.indices, graph.edge_rows()]).astype(np.int64))
    return Data(x=torch.randn(600, 6).requires_grad_(), edge_index=edges)


def test_a_search_that_pays_back_within_the_run_may_take_longer_than_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = many_cliques()
    found = Forms(calls=1_000_000)
    budget = found._budget(graph, (1.0, 1.0), Counter({Use(False, 64): 1}), lambda use: 0.05)
    assert not isinstance(budget, str)
    assert budget.seconds > found.budget_seconds
    short = found._budget(graph, (1.0, 1.0), Counter({Use(False, 64): 1}), lambda use: 1e-9)
    assert isinstance(short, str)
    assert "too little" in short
    monkeypatch.setattr(
        forms.hag, "forecast", lambda graph: hag.Forecast(True, 1.5, "rows have something in common")
    )
    unsure = found._budget(graph, (1.0, 1.0), Counter({Use(False, 64): 1}), lambda use: 10.0)
    assert not isinstance(unsure, str)
    assert unsure.seconds == found.budget_seconds


def test_a_form_that_saves_no_traffic_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "timed", lambda *a: pytest.fail("timed"))
    monkeypatch.setattr(forms, "LEAST_TRAFFIC", 1e9)
    graph, found = many_cliques(), Forms(calls=1_000_000)
    assert found.find(graph, torch.float32, (0.5, 0.5), [Use(False, 64)], pattern_of(graph)) is None
    assert "too little to gain" in found.notes[0]
