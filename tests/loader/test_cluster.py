"""Clusters as PyG lays them out: its loader, given the same clusters, makes the same batches."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.loader
from torch_geometric.data import Data

from plait.errors import InputError
from plait.graph.partition import has_metis
from plait.loader import ClusterData, ClusterLoader
from tests.loader.batches import are_same, small_data

pytestmark = pytest.mark.skipif(not has_metis(), reason="pymetis is not installed")


@pytest.fixture(params=["csr", "csc"])
def clusters(request: pytest.FixtureRequest) -> ClusterData:
    return ClusterData(small_data(), 6, log=False, sparse_format=request.param)


def test_every_argument_of_pyg_is_taken_in_its_place() -> None:
    theirs = list(inspect.signature(torch_geometric.loader.ClusterData.__init__).parameters)
    assert list(inspect.signature(ClusterData.__init__).parameters) == theirs
    assert issubclass(ClusterLoader, torch_geometric.loader.ClusterLoader)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6])
def test_batches_are_those_of_pygs_loader(clusters: ClusterData, batch_size: int) -> None:
    ours = list(ClusterLoader(clusters, batch_size=batch_size))
    theirs = list(torch_geometric.loader.ClusterLoader(clusters, batch_size=batch_size))
    assert are_same(ours, theirs)


def test_clusters_hold_every_node_once_and_one_cluster_is_an_item(clusters: ClusterData) -> None:
    data = small_data()
    assert len(clusters) == 6
    assert sorted(clusters.partition.node_perm.tolist()) == list(range(60))
    (everything,) = ClusterLoader(clusters, batch_size=6)
    order = clusters.partition.node_perm
    assert torch.equal(everything.x, data.x[order])
    edges = order[everything.edge_index]
    assert sorted(edges.t().tolist()) == sorted(data.edge_index.t().tolist())
    assert are_same([clusters[k] for k in range(6)], list(ClusterLoader(clusters, batch_size=1)))


@pytest.mark.parametrize("way", [{"prefetch": 2}, {"num_workers": 1}], ids=str)
@pytest.mark.processes
def test_every_road_makes_the_same_batches(clusters: ClusterData, way: dict[str, Any]) -> None:
    given = {"batch_size": 2, "shuffle": True, "seed": 5}
    alone, other = ClusterLoader(clusters, **given), ClusterLoader(clusters, **given, **way)
    first = list(alone)
    assert are_same(first, list(other))
    assert not are_same(first, list(alone))


def test_a_saved_partition_is_read_and_is_no_pickle(tmp_path: Path) -> None:
    data = small_data()
    first = ClusterData(data, 3, save_dir=str(tmp_path), log=False)
    (saved,) = tmp_path.rglob("*.*")
    part = np.load(saved, allow_pickle=False)
    assert np.bincount(part).tolist() == first.partition.partptr.diff().tolist()
    np.save(saved, 2 - part)
    again = ClusterData(data, 3, save_dir=str(tmp_path), log=False)
    assert again.partition.partptr.diff().tolist() == first.partition.partptr.diff().tolist()[::-1]
    with pytest.raises(InputError, match="delete it"):
        ClusterData(small_data(50), 3, save_dir=str(tmp_path), log=False)
    saved.write_bytes(b"rubbish")
    with pytest.raises(InputError, match="delete it"):
        ClusterData(data, 3, save_dir=str(tmp_path), log=False)


def test_a_graph_without_edges_has_clusters() -> None:
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=7)
    batches = list(ClusterLoader(ClusterData(data, 2, log=False), batch_size=1))
    assert sum(b.num_nodes for b in batches) == 7
    assert all(b.edge_index.shape == (2, 0) for b in batches)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": 3}, "edge_index"),
        ({"num_parts": 0}, "at least 1"),
        ({"num_parts": 99}, "fewer parts"),
        ({"sparse_format": "coo"}, "csr or csc"),
    ],
)
def test_bad_input_is_refused_with_the_next_step(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ClusterData(**{"data": small_data(), "num_parts": 2, "log": False, **given})
