"""edges.py: a batch's edge_index carries its graph for as long as it is what it was, and no longer."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import (
    AGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.utils import trim_to_layer

import plait
from plait.errors import GraphError
from plait.graph import Graph
from plait.loader import LinkNeighborLoader, NeighborLoader
from plait.plan import ways
from plait.pyg import edges


def random_data() -> Data:
    rng = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, 200, (2, 1500), generator=rng)
    return Data(
        x=torch.randn(200, 8, generator=rng), edge_index=edge_index, edge_attr=torch.rand(1500, generator=rng)
    )


def a_batch(**options: Any) -> Data:
    given = {"batch_size": 20, "seed": 0, "shuffle": True, **options}
    return next(iter(NeighborLoader(random_data(), [4, 3], **given)))


def graph_of(edge_index: torch.Tensor, num_nodes: int) -> Graph:
    graph, _ = edges.read(edge_index, None, num_nodes, num_nodes, False).build()
    return graph


def is_carried(edge_index: torch.Tensor, num_nodes: int) -> bool:
    return edges._attached(edge_index, num_nodes) is not None


def same(graph: Graph, expected: Graph) -> None:
    for one, other in ((graph, expected), (graph.transpose, expected.transpose)):
        np.testing.assert_array_equal(one.indptr, other.indptr)
        np.testing.assert_array_equal(one.indices, other.indices)
        np.testing.assert_array_equal(one.order, other.order)
    np.testing.assert_array_equal(graph.transpose_order, expected.transpose_order)


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"disjoint": True}, {"prefetch": 2}])
def test_the_carried_graph_is_the_one_the_edge_list_gives(options: dict[str, Any]) -> None:
    batch = a_batch(**options)
    count = int(batch.num_nodes)
    assert is_carried(batch.edge_index, count)
    same(graph_of(batch.edge_index, count), graph_of(batch.edge_index.clone(), count))


def test_batches_of_links_carry_their_graphs_too() -> None:
    data = random_data()
    loader = LinkNeighborLoader(data, [4, 3], data.edge_index[:, :90], neg_sampling="binary", batch_size=30)
    batch = next(iter(loader))
    assert is_carried(batch.edge_index, batch.num_nodes)
    same(graph_of(batch.edge_index, batch.num_nodes), graph_of(batch.edge_index.clone(), batch.num_nodes))


def test_a_trimmed_edge_index_takes_the_head_of_the_graph() -> None:
    batch = a_batch()
    x, edge_index, _ = trim_to_layer(
        1, batch.num_sampled_nodes, batch.num_sampled_edges, batch.x, batch.edge_index
    )
    assert is_carried(edge_index, x.size(0))
    same(graph_of(edge_index, x.size(0)), graph_of(edge_index.clone(), x.size(0)))


def test_other_columns_than_the_first_are_read_anew() -> None:
    batch = a_batch()
    count = int(batch.num_nodes)
    for part in (batch.edge_index[:, 1:], batch.edge_index[:, ::2], batch.edge_index.flip(0)):
        assert not is_carried(part, count)
        same(graph_of(part, count), graph_of(part.clone(), count))


def test_an_edge_index_that_was_written_to_is_read_anew() -> None:
    batch = a_batch()
    batch.edge_index[0, 0] = 1 - batch.edge_index[0, 0].clamp(max=1)
    assert not is_carried(batch.edge_index, batch.num_nodes)
    assert not is_carried(batch.edge_index[:, :5], batch.num_nodes)


def test_other_sizes_and_the_other_direction_are_read_anew() -> None:
    batch = a_batch()
    count = int(batch.num_nodes)
    assert not is_carried(batch.edge_index, count + 1)
    swapped, _ = edges.read(batch.edge_index, None, count, count, True).build()
    same(swapped, graph_of(batch.edge_index.flip(0), count))


def test_transforms_that_bring_other_edges_leave_none_of_the_old() -> None:
    def reversed_edges(data: Data) -> Data:
        data.edge_index = data.edge_index.flip(0)
        return data

    def fewer(out: Any) -> Any:
        out.row, out.col, out.edge = out.row[2:], out.col[2:], out.edge[2:]
        return out

    for options in ({"transform": reversed_edges}, {"transform_sampler_output": fewer}):
        batch = a_batch(**options)
        assert not is_carried(batch.edge_index, batch.num_nodes)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_go_without_the_graph(duplicate: Any) -> None:
    batch = duplicate(a_batch())
    assert not is_carried(batch.edge_index, batch.num_nodes)


def test_a_saved_edge_index_is_loaded_by_torch_without_trust() -> None:
    batch, file = a_batch(), io.BytesIO()
    torch.save(batch.edge_index, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), batch.edge_index)


def test_a_batch_is_freed_with_its_graph_without_the_collector() -> None:
    batch = a_batch()
    graph_of(batch.edge_index, batch.num_nodes)
    gone = weakref.ref(batch.edge_index), weakref.ref(batch.edge_index.plait_graph.graph())
    gc.disable()
    try:
        del batch
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_graphs_are_built_ahead_once_one_was_asked_for() -> None:
    batches = iter(NeighborLoader(random_data(), [4, 3], batch_size=20, seed=0))
    first = next(batches)
    assert first.edge_index.plait_graph._graph is None
    graph_of(first.edge_index, first.num_nodes)
    assert next(batches).edge_index.plait_graph._graph is not None


def test_what_a_model_derived_of_a_graph_is_derived_ahead_of_the_next() -> None:
    batches = iter(NeighborLoader(random_data(), [4, 3], batch_size=20, seed=0))
    first = next(batches)
    graph = graph_of(first.edge_index, first.num_nodes)
    _ = graph.degrees, graph.without_self_loops().transpose
    made = next(batches).edge_index.plait_graph._graph
    assert "degrees" in vars(made)
    assert "transpose" in vars(made.without_self_loops())


class Trimmed(nn.Module):
    """Two layers that leave out the hops nobody needs any more."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([layer(8, 16), layer(16, 4)])

    def forward(self, batch: Data) -> torch.Tensor:
        x, edge_index = batch.x, batch.edge_index
        for depth, layer in enumerate(self.layers):
            x, edge_index, _ = trim_to_layer(
                depth, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index
            )
            x = layer(x, edge_index).relu()
        return x[: batch.batch_size]


@pytest.mark.parametrize("layer", [SAGEConv, GCNConv, GATConv, GATv2Conv, ResGatedGraphConv, AGNNConv])
def test_a_compiled_model_on_batches_equals_pyg_trimmed_and_whole(layer: Any) -> None:
    model = Trimmed(layer if layer is not AGNNConv else lambda *_: AGNNConv())
    fast = plait.compile(copy.deepcopy(model))
    for batch in NeighborLoader(random_data(), [4, 3], batch_size=20, seed=0, prefetch=2):
        for one in (model, fast):
            one.zero_grad()
            one(batch).square().sum().backward()
        torch.testing.assert_close(fast(batch), model(batch), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_edge_weights_follow_the_carried_graph() -> None:
    torch.manual_seed(0)
    layer = GCNConv(8, 4)
    fast = plait.compile(copy.deepcopy(layer))
    for batch in NeighborLoader(random_data(), [4, 3], batch_size=20, seed=0):
        out = fast(batch.x, batch.edge_index, batch.edge_attr)
        torch.testing.assert_close(out, layer(batch.x, batch.edge_index, batch.edge_attr))


def layers_with_passes() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "gat": GATConv(8, 4, heads=2),
        "gatv2": GATv2Conv(8, 4, heads=2),
        "transformer": TransformerConv(8, 4),
        "gated": ResGatedGraphConv(8, 4),
        "agnn": AGNNConv(),
    }


@pytest.mark.parametrize("name", layers_with_passes())
def test_no_layer_sorts_the_edges_of_a_batch_that_carries_its_graph(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, batch = layers_with_passes()[name], a_batch()
    fast = plait.compile(copy.deepcopy(layer))
    wanted = layer(batch.x, batch.edge_index)

    def refuse(*_: Any, **__: Any) -> Graph:
        raise AssertionError("the edges are sorted again")

    monkeypatch.setattr(Graph, "from_edge_index", refuse)
    out = fast(batch.x, batch.edge_index)
    out.sum().backward()
    assert fast.plan.layers
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_features_of_edges_follow_the_loops_put_into_the_carried_graph() -> None:
    torch.manual_seed(0)
    layer = GATConv(8, 4, heads=2, edge_dim=3, fill_value=0.5)
    fast = plait.compile(copy.deepcopy(layer))
    data = random_data()
    data.edge_index[:, ::50] = data.edge_index[0, ::50]  # loops among the edges
    data.edge_attr = torch.rand(1500, 3)
    for batch in NeighborLoader(data, [4, 3], batch_size=20, seed=0):
        given = (batch.x, batch.edge_index, batch.edge_attr)
        out, (listed, weights) = fast(*given, return_attention_weights=True)
        wanted, (theirs, those) = layer(*given, return_attention_weights=True)
        torch.testing.assert_close(out, wanted)
        assert torch.equal(listed, theirs)
        torch.testing.assert_close(weights, those)


def test_layers_of_one_model_share_the_graph_of_an_edge_index() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.third = GCNConv(8, 8), GATConv(8, 8), RGCNConv(8, 4, 2)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
            x = self.second(self.first(x, edge_index), edge_index)
            return self.third(x, edge_index, kind)

    model, data = Mixed(), random_data()
    kind = torch.arange(1500) % 2
    fast = plait.compile(copy.deepcopy(model))
    wanted = model(data.x, data.edge_index, kind)
    torch.testing.assert_close(fast(data.x, data.edge_index, kind), wanted, rtol=1e-4, atol=1e-5)
    session = fast._plait_plan_session
    assert len({id(edges.graph.indices) for edges in session.edges.values()}) == 2  # as it is, and with loops


def test_relations_of_the_same_edges_are_told_apart() -> None:
    torch.manual_seed(0)
    layer, data = RGCNConv(8, 4, 3), random_data()
    fast = plait.compile(copy.deepcopy(layer))
    for kind in (torch.arange(1500) % 3, torch.arange(1500) % 2):
        torch.testing.assert_close(
            fast(data.x, data.edge_index, kind), layer(data.x, data.edge_index, kind), rtol=1e-4, atol=1e-5
        )


def test_plans_of_attention_are_made_for_sizes_once_batches_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    own = ways.choose
    monkeypatch.setattr("plait.runtime.ways.choose", lambda p, found: made.append(p.layer) or own(p, found))
    monkeypatch.setenv("PLAIT_ASIDE", "0")
    torch.manual_seed(0)
    fast = plait.compile(GATConv(8, 4))
    for batch in NeighborLoader(random_data(), [4, 3], batch_size=10, seed=0):
        fast(batch.x, batch.edge_index)
    assert len(made) < 10  # of 20 batches


@pytest.mark.parametrize("layer", [GCNConv(4, 3), GATConv(4, 3)])
def test_an_edge_index_of_another_size_is_refused_as_in_pyg(layer: nn.Module) -> None:
    edge_index = EdgeIndex([[0, 1], [1, 0]], sparse_size=(5, 5))
    compiled = plait.compile(layer)
    assert compiled(torch.ones(5, 4), edge_index).shape == (5, 3)
    for net in (layer, compiled):
        with pytest.raises(ValueError, match="size"):
            net(torch.ones(4, 4), edge_index)


def test_edges_out_of_range_are_told_in_the_callers_words() -> None:
    conv = plait.compile(GCNConv(4, 2))
    with pytest.raises(GraphError, match=r"edge_index: nodes 0 to 9 on 3 source and 3 target rows of x"):
        conv(torch.randn(3, 4), torch.tensor([[0, 9], [1, 2]]))
