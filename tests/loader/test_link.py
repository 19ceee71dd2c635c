"""Link batches: labels and negatives as PyG lays them out, and the same batches by every road."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch_geometric.loader
from torch_geometric.sampler import NegativeSampling

from plait.errors import InputError
from plait.features.cache import Cache
from plait.loader import LinkNeighborLoader
from tests.loader.batches import are_same, check_batch, check_edges, is_same, small_data

WAYS: list[dict[str, Any]] = [
    {},
    {"disjoint": True},
    {"neg_sampling_ratio": 1.5},
    {"neg_sampling": "binary"},
    {"neg_sampling": NegativeSampling("triplet", 2)},
    {"neg_sampling": NegativeSampling("triplet", 1, dst_weight=torch.arange(60.0))},
    {"neg_sampling": "triplet", "disjoint": True},
    {"subgraph_type": "induced", "neg_sampling": "binary"},
]


def test_every_argument_of_pyg_is_taken_in_its_place() -> None:
    theirs = list(inspect.signature(torch_geometric.loader.LinkNeighborLoader.__init__).parameters)
    ours = list(inspect.signature(LinkNeighborLoader.__init__).parameters)
    assert ours[: len(theirs) - 1] == theirs[:-1]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_hold_their_links(way: dict[str, Any]) -> None:
    data = small_data()
    links = data.edge_index[:, :50]
    loader = LinkNeighborLoader(data, [3, 2], links, batch_size=16, seed=2, **way)
    batches = list(loader)
    assert len(batches) == len(loader) == 4
    for b in batches:
        check_batch(b, data)
        check_edges(b, data)
        expected = links[:, b.input_id]
        if "src_index" in b:
            assert torch.equal(b.n_id[b.src_index], expected[0])
            assert torch.equal(b.n_id[b.dst_pos_index], expected[1])
            assert b.dst_neg_index.size(0) == expected.size(1)
        else:
            assert torch.equal(b.n_id[b.edge_label_index[:, : expected.size(1)]], expected)


def test_binary_negatives_are_labelled_zero() -> None:
    data = small_data()
    label = torch.ones(400)
    batch = next(iter(LinkNeighborLoader(data, [2], None, label, neg_sampling_ratio=2.0, batch_size=10)))
    assert batch.edge_label.tolist() == [1.0] * 10 + [0.0] * 20
    assert batch.edge_label_index.shape == (2, 30)


def test_labels_that_start_at_zero_are_raised_as_pyg_does() -> None:
    data = small_data()
    label = torch.arange(400) % 2
    batch = next(iter(LinkNeighborLoader(data, [2], None, label, neg_sampling="binary", batch_size=4)))
    assert batch.edge_label.tolist() == [1, 2, 1, 2, 0, 0, 0, 0]


def test_weighted_negatives_keep_to_their_weights() -> None:
    data = small_data()
    weight = torch.zeros(60)
    weight[[5, 9]] = 1
    negatives = NegativeSampling("triplet", 3, dst_weight=weight)
    for b in LinkNeighborLoader(data, [2], batch_size=100, neg_sampling=negatives):
        assert set(b.n_id[b.dst_neg_index].view(-1).tolist()) == {5, 9}


def test_links_see_no_later_neighbours() -> None:
    data = small_data()
    times = torch.full((400,), 6)
    for b in LinkNeighborLoader(data, [4, 4], None, None, times, time_attr="time", batch_size=64):
        sampled = b.n_id[b.num_sampled_nodes[0] :]
        assert (data.time[sampled] <= 6).all()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_prefetch_changes_no_batch(way: dict[str, Any]) -> None:
    data = small_data()
    given = {"batch_size": 40, "shuffle": True, "seed": 4, **way}
    alone = LinkNeighborLoader(data, [3, 2], **given)
    ahead = LinkNeighborLoader(data, [3, 2], prefetch=3, **given)
    cached = LinkNeighborLoader(data, [3, 2], prefetch=2, features=Cache(data.x, 20), **given)
    for _ in range(2):
        expected = list(alone)
        assert are_same(expected, list(ahead))
        assert are_same(expected, list(cached))


@pytest.mark.processes
def test_processes_change_no_batch() -> None:
    data = small_data()
    given = {"batch_size": 100, "shuffle": True, "seed": 4, "neg_sampling": "triplet"}
    alone = LinkNeighborLoader(data, [3, 2], **given)
    assert are_same(list(alone), list(LinkNeighborLoader(data, [3, 2], num_workers=2, **given)))


def test_a_call_draws_these_links() -> None:
    data = small_data()
    loader = LinkNeighborLoader(data, [2], batch_size=4, seed=1)
    assert is_same(loader([3, 1]), loader(torch.tensor([3, 1])))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"edge_label_index": torch.tensor([[0, 60], [1, 2]])}, "0 to 59"),
    ({"edge_label_index": torch.arange(6)}, r"\[2, E\]"),
    ({"edge_label_index": ("a", "to", "b")}, "edge type"),
    ({"edge_label": torch.ones(3)}, "one each"),
    ({"edge_label_time": torch.ones(400)}, "both or neither"),
    ({"time_attr": "time"}, "both or neither"),
    ({"num_neighbors": []}, "fanout"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_refused_with_the_next_step(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinkNeighborLoader(**{"data": small_data(), "num_neighbors": [2], **given})
