"""A call made ready, or the reason why PyG runs it: arguments, features, edges, caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, ARMAConv, GCNConv, MixHopConv, ResGatedGraphConv, SAGEConv, TAGConv

import plait
from plait.errors import InputError
from plait.pyg import planned
from plait.pyg import prepared as module

NODES, WIDTH = 7, 4
EDGES = torch.randint(0, NODES, (2, 20), generator=torch.Generator().manual_seed(0))


def features(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def reason_of(model: Any) -> str:
    return " ".join(found.reason for found in model.plan.not_planned)


def compiled(layer: torch.nn.Module) -> Any:
    torch.manual_seed(2)
    layer.reset_parameters()  # type: ignore[operator]
    return plait.compile(copy.deepcopy(layer))


def test_a_call_that_is_prepared_is_planned_and_answers_like_pyg() -> None:
    layer = GCNConv(WIDTH, 3)
    model = compiled(layer)
    torch.testing.assert_close(model(features(), EDGES), layer(features(), EDGES))
    assert reason_of(model) == ""
    assert len(model.plan.layers) == 1


def test_arguments_that_are_not_lowered_run_in_pyg_by_name() -> None:
    layer = SAGEConv((WIDTH, WIDTH), 3)
    model = compiled(layer)
    pair = (features(), None)
    given = {"size": (NODES, NODES)}
    torch.testing.assert_close(model(pair, EDGES, **given), layer(pair, EDGES, **given))
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(pair, EDGES, colour="red")
    assert "PyG says what is wrong" in reason_of(model)


def test_unknown_numbers_of_targets_are_left_to_pyg() -> None:
    model = compiled(SAGEConv((WIDTH, WIDTH), 3, root_weight=False))
    out = model((features(), None), EDGES)
    assert out.shape[1] == 3
    assert not reason_of(model) or "number of target nodes" in reason_of(model)


def test_half_precision_is_summed_in_float32() -> None:
    layer = GCNConv(WIDTH, 3).to(torch.bfloat16)
    model = compiled(layer)
    out = model(features(torch.bfloat16), EDGES)
    assert out.dtype is torch.bfloat16
    wide = copy.deepcopy(layer).float()(features(torch.bfloat16).float(), EDGES)
    torch.testing.assert_close(out.float(), wide, rtol=2e-2, atol=2e-2)


def test_edge_weights_of_another_shape_are_refused_by_name() -> None:
    model = compiled(GCNConv(WIDTH, 3))
    with pytest.raises(InputError, match="edge_weight: "):
        model(features(), EDGES, torch.rand(EDGES.shape[1], 2))


def test_the_first_graph_of_a_cache_answers_later_ones_as_in_pyg() -> None:
    layer = APPNP(K=2, alpha=0.1, cached=True)
    model = plait.compile(copy.deepcopy(layer), Data(x=features(), edge_index=EDGES))
    for edges in (EDGES, EDGES.flip(0), EDGES[:, ::2]):
        torch.testing.assert_close(model(features(), edges), layer(features(), edges))


@pytest.mark.parametrize("with_grad", [True, False])
def test_options_that_change_after_the_cache_was_made_change_nothing_as_in_pyg(with_grad: bool) -> None:
    layer = GCNConv(WIDTH, 3, cached=True)
    model = plait.compile(copy.deepcopy(layer))
    for one in (layer, model):
        one(features(), EDGES)
        one.add_self_loops = False
    with torch.set_grad_enabled(with_grad):
        torch.testing.assert_close(model(features(), EDGES), layer(features(), EDGES))


class Doubled(GCNConv):
    """A layer that plait leaves to PyG."""

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return 2 * super().message(x_j, edge_weight)


def test_edges_that_a_layer_with_a_cache_does_not_read_need_not_fit() -> None:
    layer, weight = Doubled(WIDTH, 3, cached=True), torch.rand(EDGES.shape[1])
    model = plait.compile(layer)
    expected = model(features(), EDGES, weight)
    torch.testing.assert_close(model(features(), EDGES[:, ::2], weight), expected)


def test_a_cache_of_another_size_is_left_to_pyg() -> None:
    layer = APPNP(K=2, alpha=0.1, cached=True)
    model = plait.compile(copy.deepcopy(layer))
    for _ in range(2):
        torch.testing.assert_close(model(features(), EDGES), layer(features(), EDGES))
    more = torch.cat([features(), features()])
    try:
        expected = layer(more, EDGES)
    except Exception as error:
        with pytest.raises(type(error)):
            model(more, EDGES)
    else:
        torch.testing.assert_close(model(more, EDGES), expected)
    assert "the graph that PyG's cache holds has 7 nodes" in reason_of(model)


@pytest.fixture
def made_ready(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers whose calls were made ready."""
    found: list[Any] = []
    prepare = planned.prepared
    monkeypatch.setattr(planned, "prepared", lambda *args: found.append(args[1]) or prepare(*args))  # type: ignore[func-returns-value]
    monkeypatch.setenv("PLAIT_ASIDE", "0")
    return found


@pytest.mark.parametrize("shares_memory", [False, True])
def test_a_cached_layer_is_made_ready_once(shares_memory: bool, made_ready: list[Any]) -> None:
    layer = APPNP(K=2, alpha=0.1, cached=True, add_self_loops=not shares_memory)
    model, x, edge_index = compiled(layer), features(), EDGES.clone()
    for _ in range(4):
        torch.testing.assert_close(model(x, edge_index), layer(x, edge_index))
    made_ready.clear()
    torch.testing.assert_close(model(x, edge_index), layer(x, edge_index))
    assert not made_ready
    edge_index[0, 3] = (edge_index[0, 3] + 1) % NODES  # PyG's cache may hold this very memory
    torch.testing.assert_close(model(x, edge_index), layer(x, edge_index))
    torch.testing.assert_close(model(x, EDGES.flip(0)), layer(x, EDGES.flip(0)))
    model._cached_edge_index = layer._cached_edge_index = None
    for _ in range(3):
        torch.testing.assert_close(model(x, EDGES.flip(0)), layer(x, EDGES.flip(0)))


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_a_sparse_matrix_is_recognised(layout: torch.layout, made_ready: list[Any]) -> None:
    layer, x = GCNConv(WIDTH, 3), features()
    dense = torch.zeros(NODES, NODES).index_put((EDGES[1], EDGES[0]), torch.tensor(1.0))
    adj_t = dense.to_sparse(layout=layout)
    model = compiled(layer)
    expected = layer(x, adj_t)  # of a COO matrix PyG writes to the parts at every call
    for _ in range(3):
        torch.testing.assert_close(model(x, adj_t), expected)
    made_ready.clear()
    torch.testing.assert_close(model(x, adj_t), expected)
    assert not made_ready
    values = adj_t.values() if layout is torch.sparse_csr else adj_t._values()
    values.mul_(torch.arange(1.0, len(values) + 1))
    torch.testing.assert_close(model(x, adj_t), layer(x, adj_t))
    assert made_ready
    if layout is torch.sparse_coo:  # PyG has no gradients of it
        return
    adj_t.requires_grad_()
    gradients = []
    for each in (model, layer):
        gradients.append(torch.autograd.grad(each(x, adj_t).square().sum(), adj_t)[0].to_dense())
    torch.testing.assert_close(*gradients)


def test_passes_on_a_sparse_matrix_are_refused_before_the_layer_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = ResGatedGraphConv(WIDTH, 3)
    model, adj_t = compiled(layer), torch.ones(NODES, NODES).to_sparse_csr()
    monkeypatch.setattr(module, "not_as_written", lambda *args: pytest.fail("the layer was looked at"))
    torch.testing.assert_close(model(features(), adj_t), layer(features(), adj_t))
    assert "a sparse adj_t is not planned for this layer" in reason_of(model)


@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, torch.float64), (torch.float16, torch.float32)])
@pytest.mark.parametrize("make", [GCNConv, TAGConv, MixHopConv, ARMAConv])
def test_a_bias_of_another_type_is_promoted_by_pyg(make: Any, dtype: torch.dtype, other: torch.dtype) -> None:
    layer = make(WIDTH, 3).to(dtype)
    model = plait.compile(layer)
    for _ in range(3):
        model(features(dtype), EDGES)
    assert reason_of(model) == ""
    layer.bias.data = layer.bias.data.to(other)
    for _ in range(2):
        out = model(features(dtype), EDGES)
        assert out.dtype == other
        assert torch.equal(out, layer(features(dtype), EDGES))
    assert "type" in reason_of(model)


def test_a_bias_that_is_no_parameter_and_keeps_its_type_is_promoted() -> None:
    layer = GCNConv(WIDTH, 3)
    bias = layer._parameters.pop("bias")
    layer.bias = bias.detach()  # type: ignore[union-attr]
    model = plait.compile(layer)
    for _ in range(3):
        model(features(), EDGES)
    model.double()
    for _ in range(2):
        out = model(features(torch.float64), EDGES)
        assert torch.equal(out, layer(features(torch.float64), EDGES))
