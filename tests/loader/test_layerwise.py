"""Blocks give what the whole graph gives, in less memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from plait.errors import InputError
from plait.loader import inference
from plait.measure import peak_tensor_bytes
from tests.loader.batches import small_data

SMALL = 120_000


class Net(nn.Module):
    """Two layers with what lies between them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = first, second, nn.BatchNorm1d(8)

    def forward(self, x: Tensor, edge_index: Tensor, **kwargs: Any) -> Tensor:
        hidden = nn.functional.dropout(
            self.norm(self.first(x, edge_index, **kwargs)).relu(), 0.5, self.training
        )
        return torch.log_softmax(self.second(hidden, edge_index, **kwargs), -1)


LAYERS: dict[str, Any] = {
    "gcn": lambda i, o: gnn.GCNConv(i, o),
    "gcn_improved": lambda i, o: gnn.GCNConv(i, o, improved=True),
    "gcn_bare": lambda i, o: gnn.GCNConv(i, o, normalize=False),
    "gcn_no_loops": lambda i, o: gnn.GCNConv(i, o, add_self_loops=False),
    "sage": lambda i, o: gnn.SAGEConv(i, o),
    "sage_max": lambda i, o: gnn.SAGEConv(i, o, aggr="max", normalize=True),
    "graph": lambda i, o: gnn.GraphConv(i, o),
    "gin": lambda i, o: gnn.GINConv(nn.Linear(i, o)),
    "gat": lambda i, o: gnn.GATConv(i, o // 2, heads=2),
    "gatv2": lambda i, o: gnn.GATv2Conv(i, o, heads=3, concat=False),
    "transformer": lambda i, o: gnn.TransformerConv(i, o),
    "edge": lambda i, o: gnn.EdgeConv(nn.Linear(2 * i, o)),
    "res_gated": lambda i, o: gnn.ResGatedGraphConv(i, o),
    "cluster": lambda i, o: gnn.ClusterGCNConv(i, o),
    "le": lambda i, o: gnn.LEConv(i, o),
    "film": lambda i, o: gnn.FiLMConv(i, o),
    "feast": lambda i, o: gnn.FeaStConv(i, o),
    "gen": lambda i, o: gnn.GENConv(i, o),
    "general": lambda i, o: gnn.GeneralConv(i, o),
}


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)


def are_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Blocks add in another order than the whole graph does."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_blocks_give_what_the_whole_graph_gives(name: str) -> None:
    data = small_data()
    model = Net(LAYERS[name](5, 8), LAYERS[name](8, 4)).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = inference(model, data, memory_limit=SMALL)
    are_close(got, expected)
    assert model.training
    assert "forward" not in vars(model.first)


@pytest.mark.parametrize("name", ["gcn", "gcn_bare", "graph"])
def test_edge_weights_follow_their_edges(name: str) -> None:
    data = small_data()
    model = Net(LAYERS[name](5, 8), LAYERS[name](8, 4)).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index, edge_weight=data.edge_weight)
    got = inference(model, data, memory_limit=SMALL, edge_weight=data.edge_weight)
    are_close(got, expected)


def test_models_of_pyg_run_as_they_are() -> None:
    data = small_data()
    for make in (gnn.GraphSAGE, gnn.GCN, gnn.GAT, gnn.GIN):
        model = make(5, 8, 3, 4, jk="cat").eval()
        with torch.no_grad():
            expected = model(data.x, data.edge_index)
        are_close(inference(model, data, memory_limit=SMALL), expected)


def test_parts_of_a_model_keep_their_modes() -> None:
    model = Net(gnn.SAGEConv(5, 8), gnn.SAGEConv(8, 4))
    model.norm.eval()  # frozen
    inference(model, small_data())
    assert model.training
    assert model.first.training
    assert not model.norm.training


def test_a_layer_that_looks_further_runs_whole_and_says_so() -> None:
    data = small_data()
    model = Net(gnn.SGConv(5, 8, K=2), gnn.SAGEConv(8, 4)).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
    with pytest.warns(UserWarning, match=r"first \(SGConv\) runs on the whole graph"):
        are_close(inference(model, data, memory_limit=SMALL), expected)


def test_features_may_stay_on_disk(tmp_path: Path) -> None:
    data = small_data()
    np.save(tmp_path / "x.npy", data.x.numpy())
    model = gnn.GraphSAGE(5, 8, 2, 4).eval()
    expected = inference(model, data)
    del data.x
    assert torch.equal(inference(model, data, features=tmp_path / "x.npy"), expected)


def test_the_limit_holds() -> None:
    nodes, edges, width = 3000, 120_000, 32
    data = small_data(nodes, edges)
    data.edge_index = torch.randint(0, nodes, (2, edges))  # no hub: one row must fit
    data.x = torch.randn(nodes, width)
    model = gnn.GATConv(width, width).eval()
    limit = 2_000_000
    whole = peak_tensor_bytes(lambda: model(data.x, data.edge_index))
    blocks = peak_tensor_bytes(lambda: inference(model, data, memory_limit=limit))
    rows = nodes * width * 4
    assert whole > 8 * limit
    assert blocks < limit + 2 * rows


def test_a_hub_beyond_the_limit_is_named() -> None:
    with pytest.raises(InputError, match=r"node \d+ alone has .* raise memory_limit"):
        inference(gnn.SAGEConv(5, 4), small_data(), memory_limit=9000)


def test_bad_input_is_refused() -> None:
    data = small_data()
    model = gnn.SAGEConv(5, 4)
    with pytest.raises(InputError, match="memory_limit"):
        inference(model, data, memory_limit=0)
    with pytest.raises(InputError, match="write the rows"):
        inference(model, data, features=lambda ids: ids)
    del data.x
    with pytest.raises(InputError, match="features="):
        inference(model, data)
