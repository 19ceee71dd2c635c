"""Layers and whole models on real graphs, compiled, against PyG."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    GCN,
    GIN,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    GCNConv,
    GINConv,
    GraphConv,
    GraphSAGE,
    LEConv,
    LGConv,
    MixHopConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
)

from tests.parity.harness import agree
from tests.pyg.cases import randomise, to_adj_t

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
DATA = Path(os.environ.get("PLAIT_DATA", Path(__file__).parents[3] / "shared" / "data"))
GRAPHS = ("cora", "chameleon", "mesh_4elt", "tu_mutag")

LAYERS: dict[str, Any] = {
    "GCN": lambda k, n: GCNConv(k, n),
    "SAGE mean": lambda k, n: SAGEConv(k, n),
    "SAGE max": lambda k, n: SAGEConv(k, n, aggr="max"),
    "GraphConv": lambda k, n: GraphConv(k, n),
    "GIN": lambda k, n: GINConv(nn.Sequential(nn.Linear(k, n), nn.ReLU(), nn.Linear(n, n))),
    "SG": lambda k, n: SGConv(k, n, K=2),
    "SSG": lambda k, n: SSGConv(k, n, alpha=0.1, K=3),
    "TAG": lambda k, n: TAGConv(k, n),
    "APPNP": lambda k, n: APPNP(4, 0.1),
    "MixHop": lambda k, n: MixHopConv(k, n),
    "Cheb": lambda k, n: ChebConv(k, n, K=3),
    "ClusterGCN": lambda k, n: ClusterGCNConv(k, n),
    "LE": lambda k, n: LEConv(k, n),
    "ARMA": lambda k, n: ARMAConv(k, n, num_stacks=2, num_layers=2),
    "LG": lambda k, n: LGConv(),
}


def arrays(name: str) -> dict[str, Any]:
    path = DATA / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"{name}.npz is not at hand; set PLAIT_DATA to the folder of the real graphs")
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def edges_of(found: dict[str, Any]) -> tuple[Tensor, int]:
    nodes = len(found["indptr"]) - 1
    source = np.repeat(np.arange(nodes), np.diff(found["indptr"]))
    return torch.from_numpy(np.stack([source, found["indices"].astype(np.int64)])), nodes


def features_of(found: dict[str, Any], nodes: int) -> Tensor:
    """The graph's own features as a dense matrix."""
    x = np.zeros(tuple(found["x_shape"]), np.float32)
    rows = np.repeat(np.arange(nodes), np.diff(found["x_indptr"]))
    x[rows, found["x_indices"]] = found.get("x_data", np.float32(1))
    return torch.from_numpy(x)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("layer", LAYERS)
def test_middle_layers(graph: str, layer: str) -> None:
    edges, nodes = edges_of(arrays(graph))
    rng = np.random.default_rng(0)
    for width, out in ((24, 8), (8, 24)):
        x = torch.from_numpy(rng.normal(size=(nodes, width))).float()
        agree(randomise(LAYERS[layer](width, out), rng), x, edges)


@pytest.mark.parametrize("layer", ["GCN", "SAGE mean", "SAGE max", "GIN", "TAG"])
def test_sparse_matrices_in_float64(layer: str) -> None:
    edges, nodes = edges_of(arrays("cora"))
    rng = np.random.default_rng(1)
    adj_t = to_adj_t(edges, None, nodes, nodes).double()
    agree(
        randomise(LAYERS[layer](12, 7).double(), rng), torch.from_numpy(rng.normal(size=(nodes, 12))), adj_t
    )


@pytest.mark.parametrize("model", [GCN, GraphSAGE, GIN], ids=lambda m: m.__name__)
def test_models_on_their_own_features(model: Any) -> None:
    found = arrays("cora")
    edges, nodes = edges_of(found)
    torch.manual_seed(0)
    module = model(1433, 16, num_layers=2, out_channels=7).double()
    agree(module, features_of(found, nodes).double(), edges, wants_grad=False, calls=3)
