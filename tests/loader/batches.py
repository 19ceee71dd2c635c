"""Small data for loaders, and the laws every batch obeys."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData


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


def small_hetero(seed: int = 0) -> HeteroData:
    """Papers, authors and venues: a relation within a type, one with its reverse, one without edges."""
    g = torch.Generator().manual_seed(seed)
    counts = {"paper": 60, "author": 40, "venue": 5}
    data = HeteroData()
    for kind, count in counts.items():
        data[kind].x = torch.randn(count, 3, generator=g)
        data[kind].time = torch.randint(0, 20, (count,), generator=g)
    data["paper"].y = torch.randint(0, 3, (60,), generator=g)
    sizes = {
        ("paper", "cites", "paper"): 300,
        ("author", "writes", "paper"): 200,
        ("paper", "rev_writes", "author"): 200,
        ("paper", "in", "venue"): 60,
        ("venue", "lists", "paper"): 0,
    }
    for kind, size in sizes.items():
        ends = [torch.randint(0, counts[end], (size,), generator=g) for end in (kind[0], kind[2])]
        data[kind].edge_index = torch.stack(ends)
        data[kind].edge_attr = torch.randn(size, 2, generator=g)
        data[kind].edge_weight = torch.rand(size, generator=g)
        data[kind].edge_time = torch.randint(0, 20, (size,), generator=g)
    return data


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
    left, right = ({**batch.to_dict(), "num_nodes": getattr(batch, "num_nodes", None)} for batch in (a, b))
    if left.keys() != right.keys():
        return False
    return all(
        torch.equal(left[k], right[k]) if isinstance(left[k], torch.Tensor) else left[k] == right[k]
        for k in left
    )


def is_same_hetero(a: HeteroData, b: HeteroData) -> bool:
    """Equal in every field of every type."""
    if a.node_types != b.node_types or a.edge_types != b.edge_types:
        return False
    return all(is_same(a[kind], b[kind]) for kind in (*a.node_types, *a.edge_types))


def are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))


def full_neighbourhood(data: Data, seeds: Any, hops: int) -> set[int]:
    """All nodes within `hops` in-edges of the seeds, by the obvious loop."""
    src, dst = (end.tolist() for end in data.edge_index)
    found = set(np.asarray(seeds).tolist())
    for _ in range(hops):
        found |= {s for s, t in zip(src, dst, strict=True) if t in found}
    return found
