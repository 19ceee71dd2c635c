"""Small data for loaders, and the laws every batch obeys."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data


def small_data(num_nodes: int = 60, num_edges: int = 400, seed: int = 0) -> Data:
    """Repeated edges, self loops, isolated nodes and a hub; one attribute of every kind."""
    g = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, num_nodes - 4, (2, num_edges), generator=g)
    edge_index[1, : num_edges // 6] = 2
    return Data(
        x=torch.randn(num_nodes, 5, generator=g),
        edge_index=edge_index,
        y=torch.randint(0, 3, (num_nodes,), generator=g),
        edge_attr=torch.randn(num_edges, 2, generator=g),
        edge_weight=torch.rand(num_edges, generator=g),
        time=torch.randint(0, 20, (num_nodes,), generator=g),
        train_mask=torch.rand(num_nodes, generator=g) < 0.5,
        name="a constant",
    )


def check_batch(batch: Any, data: Data) -> None:
    """Every attribute of the batch is that of the nodes and edges it names."""
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.y, data.y[batch.n_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert batch.num_nodes == batch.n_id.numel()
    assert batch.name == "a constant"


def check_edges(batch: Any, data: Data) -> None:
    """Every edge of the batch is the edge of the data it says it is."""
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])


def is_same(a: Any, b: Any) -> bool:
    """Equal in every field, tensors by value; the number of nodes may be said or follow from x."""
    left, right = ({**batch.to_dict(), "num_nodes": batch.num_nodes} for batch in (a, b))
    if left.keys() != right.keys():
        return False
    return all(
        torch.equal(left[k], right[k]) if isinstance(left[k], torch.Tensor) else left[k] == right[k]
        for k in left
    )


def are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))


def full_neighbourhood(data: Data, seeds: Any, hops: int) -> set[int]:
    """All nodes within `hops` in-edges of the seeds, by the obvious loop."""
    src, dst = (end.tolist() for end in data.edge_index)
    found = set(np.asarray(seeds).tolist())
    for _ in range(hops):
        found |= {s for s, t in zip(src, dst, strict=True) if t in found}
    return found
