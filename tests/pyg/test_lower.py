"""Every rule against the layer it lowers, in float64, with every form of every expression evaluated."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    MLP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    LEConv,
    SAGEConv,
    SGConv,
)

from plait.pyg.lower import Call, Lowered, NotLowered, lower, supported
from tests.pyg.cases import (
    CASES,
    SHAPES,
    WIDTH,
    Case,
    random_edges,
    random_weights,
    randomise,
    to_adj_t,
)
from tests.pyg.oracle import TOLERANCE, run_lowered

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
DOUBLE = torch.float64


def matches(
    module: nn.Module, x: Any, edges: Tensor, weight: Tensor | None, adj_t: Tensor | None = None
) -> None:
    """The lowered layer and the layer itself give the same output."""
    twin = copy.deepcopy(module)
    arguments = (adj_t,) if adj_t is not None else (edges,) if weight is None else (edges, weight)
    with torch.no_grad():
        expected = twin(x, *arguments)
    result = run_lowered(module, x, edges, weight, is_sparse=adj_t is not None)
    torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@pytest.fixture
def double_by_default() -> Iterator[None]:
    """ClusterGCNConv counts in the default dtype, and its sparse path takes no other."""
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(torch.float32)


def layer(make: Any, rng: np.random.Generator, **options: Any) -> nn.Module:
    return randomise(make(**options).to(DOUBLE).eval(), rng)


def features(rng: np.random.Generator, rows: int, width: int = WIDTH) -> Tensor:
    return torch.from_numpy(rng.normal(size=(rows, width)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_is_its_expression_on_edge_lists(case: Case) -> None:
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        nodes = 1 if shape == "one node" else int(rng.integers(2, 9))
        edges = random_edges(rng, shape, nodes, nodes)
        weights = random_weights(rng, edges, case.takes_negative, DOUBLE)
        for weight in (None, weights) if case.takes_weights else (None,):
            for flow in ("source_to_target", "target_to_source"):
                matches(layer(case.make, rng, flow=flow), features(rng, nodes), edges, weight)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("case", [case for case in CASES if case.takes_sparse], ids=str)
def test_layer_is_its_expression_on_sparse_matrices(case: Case) -> None:
    rng = np.random.default_rng(2)
    for shape in SHAPES[::2]:  # what a layer computes is asked of every shape above
        nodes = 1 if shape == "one node" else int(rng.integers(2, 9))
        edges = random_edges(rng, shape, nodes, nodes)
        signed = random_weights(rng, edges, case.takes_negative, DOUBLE)
        for weight in (None, signed) if case.takes_weights else (None,):
            adj_t = to_adj_t(edges, weight, nodes, nodes).to(DOUBLE)
            stored = torch.stack([adj_t.col_indices(), _rows_of(adj_t)])
            values = None if weight is None else adj_t.values()
            matches(layer(case.make, rng), features(rng, nodes), stored, values, adj_t)


@pytest.mark.parametrize("case", [case for case in CASES if case.make_pair], ids=str)
@pytest.mark.parametrize("has_root", [True, False])
def test_layer_is_its_expression_on_pairs(case: Case, has_root: bool) -> None:
    rng = np.random.default_rng(3)
    if case.needs_root and not has_root:
        answer = lower(case.make_pair(), Call(is_bipartite=True, has_root=False))  # type: ignore[misc]
        assert isinstance(answer, NotLowered)
        return
    for shape in SHAPES:
        sources = int(rng.integers(1, 9))
        targets = int(rng.integers(1, 9)) if has_root else sources
        edges = random_edges(rng, shape, targets, sources)
        weights = random_weights(rng, edges, case.takes_negative, DOUBLE)
        x = (features(rng, sources), features(rng, targets, case.root_width) if has_root else None)
        for weight in (None, weights) if case.takes_weights else (None,):
            matches(layer(case.make_pair, rng), x, edges, weight)


def _rows_of(adj_t: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(adj_t.size(0)), adj_t.crow_indices().diff())


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_sage_and_gin_read_the_values_of_a_sparse_matrix(aggr: str) -> None:
    rng = np.random.default_rng(4)
    edges = random_edges(rng, "random", 6, 6)
    adj_t = to_adj_t(edges, random_weights(rng, edges, True, DOUBLE), 6, 6)
    stored = torch.stack([adj_t.col_indices(), _rows_of(adj_t)])
    for make in (lambda: SAGEConv(WIDTH, 3, aggr=aggr), lambda: GINConv(nn.Linear(WIDTH, 3), aggr=aggr)):
        matches(layer(make, rng), features(rng, 6), stored, adj_t.values(), adj_t)


@pytest.mark.usefixtures("double_by_default")
def test_cluster_gcn_ignores_the_values_of_a_sparse_matrix() -> None:
    rng = np.random.default_rng(5)
    edges = random_edges(rng, "loops", 6, 6)
    adj_t = to_adj_t(edges, random_weights(rng, edges, True, DOUBLE), 6, 6)
    stored = torch.stack([adj_t.col_indices(), _rows_of(adj_t)])
    matches(layer(lambda: ClusterGCNConv(WIDTH, 3), rng), features(rng, 6), stored, adj_t.values(), adj_t)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("nodes", [1, 5])
def test_cluster_gcn_meets_given_loops_in_the_order_pyg_does(flow: str, nodes: int) -> None:
    rng = np.random.default_rng(6)
    loops = np.tile(rng.permutation(nodes) if nodes > 1 else np.zeros(3, int), (2, 1))
    edges = torch.from_numpy(np.concatenate([loops, rng.integers(0, nodes, (2, 0))], axis=1))
    if nodes > 1:
        others = torch.tensor([[0, 1, 1, 3], [1, 0, 4, 2]])
        edges = torch.cat([edges[:, :2], others, edges[:, 2:]], dim=1)
    module = layer(lambda **kw: ClusterGCNConv(WIDTH, 3, 0.7, add_self_loops=False, **kw), rng, flow=flow)
    matches(module, features(rng, nodes), edges, None)


def test_cluster_gcn_rounds_as_pyg_does_when_the_default_dtype_is_smaller() -> None:
    rng = np.random.default_rng(7)
    assert torch.get_default_dtype() == torch.float32
    edges = random_edges(rng, "random", 9, 9)
    matches(layer(lambda: ClusterGCNConv(WIDTH, 3, 0.3), rng), features(rng, 9), edges, None)


@pytest.mark.parametrize("make", [lambda: SGConv(WIDTH, 3, K=2, cached=True)], ids=["SGConv"])
def test_cached_features_answer_later_calls_whatever_they_bring(make: Any) -> None:
    rng = np.random.default_rng(8)
    edges, others = random_edges(rng, "random", 6, 6), random_edges(rng, "random", 6, 6)
    x, y = features(rng, 6), features(rng, 6)
    module = layer(make, rng)
    twin = copy.deepcopy(module)
    first = run_lowered(module, x, edges)
    torch.testing.assert_close(first, twin(x, edges).detach(), rtol=TOLERANCE, atol=TOLERANCE)
    later = run_lowered(module, y, others)
    torch.testing.assert_close(later, twin(y, others).detach(), rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(later, first)
    module.reset_parameters()
    assert module._cached_x is None


def test_a_cached_graph_is_announced() -> None:
    for module in (GCNConv(4, 4, cached=True), APPNP(2, 0.1, cached=True)):
        answer = lower(module, Call())
        assert isinstance(answer, Lowered)
        assert answer.keeps_graph
    assert not lower(GCNConv(4, 4), Call()).keeps_graph  # type: ignore[union-attr]


def test_arma_draws_one_mask_a_layer_where_pyg_does() -> None:
    rng = np.random.default_rng(9)
    edges, x = random_edges(rng, "random", 6, 6), features(rng, 6)
    module = layer(lambda: ARMAConv(WIDTH, 3, num_stacks=2, num_layers=3, dropout=0.5), rng).train()
    torch.manual_seed(0)
    expected = module(x, edges).detach()
    torch.manual_seed(0)
    torch.testing.assert_close(run_lowered(module, x, edges), expected, rtol=TOLERANCE, atol=TOLERANCE)


class _Louder(GCNConv):
    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return 2 * super().message(x_j, edge_weight)


class _Propagating(GCNConv):
    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return 3 * super().propagate(edge_index, size=size, **kwargs)


class _Renamed(GCNConv):
    """Changes nothing that matters."""


def _hooked_message() -> nn.Module:
    module = GCNConv(4, 4)
    module.register_message_forward_hook(lambda *_: None)
    return module


def _hooked_linear() -> nn.Module:
    module = GCNConv(4, 4)
    module.lin.register_forward_hook(lambda *_: None)
    return module


def _renamed() -> nn.Module:
    layer = GraphConv(4, 3)
    layer.aggr = "mean"  # as PyG's GraphSAINT example does: on edge lists the layer goes on adding
    return layer


def _replaced_linear() -> nn.Module:
    module = GCNConv(4, 4)
    module.lin = nn.Sequential(module.lin, nn.ReLU())
    return module


def _explained() -> nn.Module:
    module = GCNConv(4, 4)
    module.explain = True
    return module


def _patched() -> nn.Module:
    module = GCNConv(4, 4)
    module.message = lambda x_j, edge_weight: x_j  # type: ignore[method-assign]
    return module


PAIR, WEIGHTED, SPARSE = Call(is_bipartite=True), Call(is_weighted=True), Call(is_sparse=True)


def _rebiased() -> ARMAConv:
    module = ARMAConv(4, 4, num_stacks=2, num_layers=2)
    module.bias = torch.nn.Parameter(torch.ones(4))  # PyG adds one number of it per layer
    return module


@pytest.mark.parametrize(
    ("make", "call", "word"),
    [
        (lambda: GATConv(4, 4), Call(), "no rule"),
        (lambda: GCNConv(4, 4, node_dim=0), Call(), "node_dim"),
        (lambda: GCNConv(4, 4, decomposed_layers=2), Call(), "decomposed_layers"),
        (lambda: GCNConv(-1, 4), Call(), "runs once in PyG first"),
        (lambda: GCNConv(4, 4, aggr="max"), Call(), "aggr='max'"),
        (lambda: GCNConv(4, 4), PAIR, "pair"),
        (lambda: GCNConv(4, 4, flow="target_to_source"), SPARSE, "flow"),
        (lambda: _Louder(4, 4), Call(), "message"),
        (lambda: _Propagating(4, 4), Call(), "propagate"),
        (_hooked_message, Call(), "hook on message"),
        (_hooked_linear, Call(), "lin has hooks"),
        (_replaced_linear, Call(), "replaced"),
        (_renamed, Call(), "it still aggregates by SumAggregation"),
        (_explained, Call(), "explainer"),
        (_patched, Call(), "message"),
        (lambda: SAGEConv(4, 4, aggr="lstm"), Call(), "lstm"),
        (lambda: SAGEConv(4, 4, aggr=["mean", "max"]), Call(), "aggr"),
        (lambda: SAGEConv(4, 4), WEIGHTED, "no edge weights"),
        (lambda: SAGEConv((4, 4), 4, flow="target_to_source"), PAIR, "flow"),
        (lambda: SAGEConv(4, 4, aggr="max"), Call(is_weighted=True, is_sparse=True), "weighted"),
        (lambda: GraphConv(4, 4, aggr="max"), WEIGHTED, "weighted"),
        (lambda: GraphConv((4, -1), 4), PAIR, "runs once in PyG first"),
        (lambda: ChebConv(4, 4, K=2), SPARSE, "edge lists"),
        (lambda: ARMAConv(4, 4), SPARSE, "edge lists"),
        (lambda: ARMAConv(-1, 4), Call(), "runs once in PyG first"),
        (_rebiased, Call(), "another size"),
        (lambda: APPNP(2, 0.1, dropout=0.5).train(), Call(), "dropout"),
        (lambda: APPNP(2, torch.tensor(0.1)), Call(), "alpha"),
        (lambda: LEConv(4, 4), Call(is_bipartite=True, has_root=False), "x[1]"),
    ],
)
def test_what_no_rule_covers_stays_in_pyg_with_the_reason(make: Any, call: Call, word: str) -> None:
    answer = lower(make(), call)
    assert isinstance(answer, NotLowered)
    assert word in answer.reason
    assert answer.reason.startswith(("_", make().__class__.__name__))


def test_dropped_edges_are_lowered_when_not_training() -> None:
    assert isinstance(lower(APPNP(2, 0.1, dropout=0.5).eval(), Call()), Lowered)


def test_a_subclass_that_changes_nothing_is_lowered() -> None:
    assert isinstance(lower(_Renamed(4, 4), Call()), Lowered)


def test_a_layer_is_lowered_again_after_its_explainer() -> None:
    module = _explained()
    module.explain = False
    assert isinstance(lower(module, Call()), Lowered)


def test_a_lazy_layer_is_lowered_once_it_knows_its_width() -> None:
    module = SAGEConv(-1, 3)
    assert isinstance(lower(module, Call()), NotLowered)
    module(torch.rand(2, 4), torch.tensor([[0], [1]]))
    assert isinstance(lower(module, Call()), Lowered)


@pytest.mark.parametrize("where", ["network", "first"])
@pytest.mark.parametrize("kind", [nn.Sequential, MLP])
def test_a_hook_inside_gin_fires(where: str, kind: Any) -> None:
    rng = np.random.default_rng(10)
    network = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()) if kind is nn.Sequential else MLP([WIDTH, 4, 3])
    module = layer(lambda: GINConv(network), rng)
    first = network[0] if kind is nn.Sequential else network.lins[0]
    seen: list[Tensor] = []
    (network if where == "network" else first).register_forward_hook(
        lambda m, i, out: seen.append(out) or 2 * out
    )
    matches(module, features(rng, 4), random_edges(rng, "random", 4, 4), None)
    assert len(seen) == 2


def test_weight_parametrisation_is_followed() -> None:
    rng = np.random.default_rng(11)
    module = layer(lambda: GCNConv(WIDTH, 3), rng)
    nn.utils.parametrizations.weight_norm(module.lin)
    matches(module, features(rng, 4), random_edges(rng, "random", 4, 4), None)


def test_forms_are_built_once_per_option() -> None:
    seen = []
    for _ in range(2):
        answer = lower(GCNConv(4, 4), Call())
        assert isinstance(answer, Lowered)
        answer.run(
            GCNConv(4, 4), lambda forms, values: seen.append(forms) or torch.zeros(1), torch.rand(2, 4), None
        )
    assert seen[0] is seen[1]


def test_layers_with_a_rule_are_listed() -> None:
    assert set(supported()) >= {"GCNConv", "SAGEConv", "APPNP", "LGConv", "ARMAConv"}
    assert len(supported()) >= 14
