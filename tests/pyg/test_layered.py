"""Layers on the rows that are read: the seeds' rows and all gradients are those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import plait
from plait.distributed.neighbor import joined
from plait.graph import Graph
from plait.loader.sampler import Sampler
from plait.pyg.layered import Layered, can_be_layered
from tests.loader.batches import small_data

MODELS = {"sage": GraphSAGE, "gin": GIN, "gat": GAT}


def _batch(hops: int, parts: int = 1) -> Any:
    data = small_data(300, 2000, seed=3)  # with a hub, loops, repeated edges and isolated nodes
    graph = Graph.from_edge_index(data.edge_index, num_nodes=300)
    sampler = Sampler(graph, [4, 3, 2][:hops], seed=1)
    samples = [sampler.sample(torch.arange(20 * p, 20 * p + 20).numpy(), 0, p) for p in range(parts)]
    return samples[0] if parts == 1 else joined(samples)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("hops", "parts"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_seeds_and_gradients_are_those_of_the_whole_batch(
    name: str, hops: int, parts: int, is_compiled: bool
) -> None:
    torch.manual_seed(0)
    sample = _batch(hops, parts)
    x = torch.randn(sample.n_id.size, 7)
    edge_index = torch.stack([torch.from_numpy(sample.row), torch.from_numpy(sample.col)]).long()
    model = MODELS[name](7, 6, hops, 3)
    assert can_be_layered(model)
    layered: Any = plait.compile(Layered(model)) if is_compiled else Layered(model)
    seeds = sample.num_sampled_nodes[0]
    found, gradients = [], []
    for run in (
        lambda: model(x, edge_index)[:seeds],
        lambda: layered(x, edge_index, sample.num_sampled_nodes, sample.num_sampled_edges),
    ):
        model.zero_grad()
        out = run()
        out.square().sum().backward()
        found.append(out.detach())
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert found[1].shape == (seeds, 3)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_what_sees_more_than_in_edges_is_not_layered() -> None:
    assert not can_be_layered(GCN(7, 6, 2, 3))
    assert not can_be_layered(GraphSAGE(7, 6, 2, 3, norm="batch_norm"))
    assert not can_be_layered(GraphSAGE(7, 6, 2, 3, jk="cat"))
    assert not can_be_layered(torch.nn.Linear(7, 3))
