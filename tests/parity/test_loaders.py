"""Batches against PyG's own loaders, where torch-sparse was compiled: the same nodes, edges and fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.loader as pyg
import torch_geometric.typing

from plait.loader import LinkNeighborLoader, NeighborLoader
from tests.loader.batches import small_data, small_hetero

pytestmark = pytest.mark.skipif(
    not torch_geometric.typing.WITH_TORCH_SPARSE, reason="PyG samples only with torch-sparse or pyg-lib"
)


def contents(nodes: Any, edges: Any, sources: Any, targets: Any) -> tuple[list[int], list[Any]]:
    """Nodes and edges in the graph's numbers, in no order: PyG discovers nodes in another one."""
    row, col = edges.edge_index
    return sorted(nodes.tolist()), sorted(
        zip(sources[row].tolist(), targets[col].tolist(), edges.e_id.tolist(), strict=True)
    )


@pytest.mark.parametrize("fanout", [[-1], [-1, -1], [-1, -1, -1]])
@pytest.mark.parametrize("kind", ["directional", "induced"])
def test_whole_neighbourhoods_are_pygs(fanout: list[int], kind: str) -> None:
    data = small_data()
    given = {"input_nodes": data.train_mask, "batch_size": 7, "subgraph_type": kind}
    pairs = zip(NeighborLoader(data, fanout, **given), pyg.NeighborLoader(data, fanout, **given), strict=True)
    for ours, theirs in pairs:
        assert set(theirs.keys()) <= set(ours.keys())
        assert contents(ours.n_id, ours, ours.n_id, ours.n_id) == contents(
            theirs.n_id, theirs, theirs.n_id, theirs.n_id
        )
        assert torch.equal(ours.input_id, theirs.input_id)
        assert ours.batch_size == theirs.batch_size
        assert torch.equal(ours.n_id[: ours.batch_size], theirs.n_id[: theirs.batch_size])


@pytest.mark.parametrize("fanout", [[-1], [-1, -1]])
@pytest.mark.parametrize("kind", ["directional", "induced"])
def test_whole_typed_neighbourhoods_are_pygs(fanout: list[int], kind: str) -> None:
    data = small_hetero()
    given = {"input_nodes": ("paper", torch.arange(40)), "batch_size": 9, "subgraph_type": kind}
    pairs = zip(NeighborLoader(data, fanout, **given), pyg.NeighborLoader(data, fanout, **given), strict=True)
    for ours, theirs in pairs:
        for edge in data.edge_types:
            found = (
                contents(b[edge[0]].n_id, b[edge], b[edge[0]].n_id, b[edge[2]].n_id) for b in (ours, theirs)
            )
            assert next(found) == next(found)
        for kinds in (*data.node_types, *data.edge_types):
            assert set(theirs[kinds].keys()) <= set(ours[kinds].keys())


def test_links_are_pygs() -> None:
    data = small_data()
    links = data.edge_index[:, :50]
    given = {"edge_label_index": links, "batch_size": 16}
    pairs = zip(
        LinkNeighborLoader(data, [-1], **given), pyg.LinkNeighborLoader(data, [-1], **given), strict=True
    )
    for ours, theirs in pairs:
        assert torch.equal(ours.n_id[ours.edge_label_index], theirs.n_id[theirs.edge_label_index])
        assert sorted(ours.n_id.tolist()) == sorted(theirs.n_id.tolist())


def test_samples_are_as_large_as_pygs() -> None:
    data = small_data()

    def mean_nodes(cls: Any) -> float:
        torch.manual_seed(1)
        return float(np.mean([b.num_nodes for _ in range(200) for b in cls(data, [2, 2], batch_size=30)]))

    assert mean_nodes(NeighborLoader) == pytest.approx(mean_nodes(pyg.NeighborLoader), rel=0.03)
