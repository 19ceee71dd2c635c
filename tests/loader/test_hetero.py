"""Typed samples: the obvious walk over relations, PyG's contract, one type as the plain case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.sampler import NegativeSampling
from torch_geometric.utils import trim_to_layer

from plait.errors import InputError
from plait.features.cache import Cache
from plait.graph import Graph
from plait.loader import LinkNeighborLoader, NeighborLoader, Sampler
from plait.loader.hetero import HeteroSample, HeteroSampler
from tests.loader.batches import is_same_hetero, small_data, small_hetero

CITES, WRITES, REV = (
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
)
WAYS: list[dict[str, Any]] = [
    {},
    {"replace": True},
    {"subgraph_type": "induced"},
    {"disjoint": True},
    {"time_attr": "time"},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"weight_attr": "edge_weight"},
    {"method": "labor"},
]


def sampler_of(data: HeteroData, fanout: Any, **given: Any) -> HeteroSampler:
    counts = {kind: data[kind].num_nodes for kind in data.node_types}
    graphs = {
        kind: Graph.from_edge_index(
            *data[kind].edge_index.numpy(), num_nodes=counts[kind[2]], num_sources=counts[kind[0]]
        )
        for kind in data.edge_types
    }
    return HeteroSampler(graphs, fanout, counts, **given)


def reached(data: HeteroData, seeds: dict[str, list[int]], hops: int) -> dict[str, set[int]]:
    """All nodes within `hops` in-edges of any relation, by the obvious loop."""
    found = {kind: set(seeds.get(kind, [])) for kind in data.node_types}
    for _ in range(hops):
        before = {kind: set(nodes) for kind, nodes in found.items()}
        for kind in data.edge_types:
            for s, t in data[kind].edge_index.t().tolist():
                if t in before[kind[2]]:
                    found[kind[0]].add(s)
    return found


def check(batch: HeteroData, data: HeteroData) -> None:
    """Every node and every edge is the one it says it is, attributes included."""
    for kind in data.node_types:
        assert torch.equal(batch[kind].x, data[kind].x[batch[kind].n_id])
        assert batch[kind].num_nodes == batch[kind].n_id.numel()
    for kind in data.edge_types:
        edges = batch[kind]
        ends = torch.stack(
            [batch[kind[0]].n_id[edges.edge_index[0]], batch[kind[2]].n_id[edges.edge_index[1]]]
        )
        assert torch.equal(ends, data[kind].edge_index[:, edges.e_id])
        assert torch.equal(edges.edge_attr, data[kind].edge_attr[edges.e_id])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_hold_what_pyg_promises(way: dict[str, Any]) -> None:
    data = small_hetero()
    loader = NeighborLoader(data, [3, 2], ("paper", torch.arange(30)), batch_size=7, seed=1, **way)
    assert len(loader) == 5
    for n, batch in enumerate(loader):
        check(batch, data)
        paper = batch["paper"]
        assert paper.n_id[: paper.batch_size].tolist() == list(range(7 * n, min(30, 7 * n + 7)))
        assert paper.input_id.tolist() == paper.n_id[: paper.batch_size].tolist()
        if way.get("subgraph_type") == "induced":
            continue
        for kind in data.node_types:
            assert sum(batch[kind].num_sampled_nodes) == batch[kind].num_nodes
            assert len(batch[kind].num_sampled_nodes) == 3
            assert ("batch" in batch[kind]) == ("disjoint" in way or "time_attr" in way)
        for kind in data.edge_types:
            assert sum(batch[kind].num_sampled_edges) == batch[kind].edge_index.size(1)
            degree = torch.bincount(batch[kind].edge_index[1], minlength=1)
            assert degree.max() <= 3


def test_full_neighbourhoods_are_all_of_them() -> None:
    data = small_hetero()
    for batch in NeighborLoader(data, [-1, -1], "author", batch_size=9):
        seeds = {"author": batch["author"].n_id[: batch["author"].batch_size].tolist()}
        expected = reached(data, seeds, 2)
        for kind in data.node_types:
            nodes = batch[kind].n_id.tolist()
            assert len(nodes) == len(set(nodes))
            assert set(nodes) == expected[kind]


def test_one_type_and_one_relation_are_the_plain_sampler() -> None:
    plain = small_data()
    graph = Graph.from_any(plain)
    typed = HeteroSampler({("n", "e", "n"): graph}, [4, 3], {"n": 60}, seed=3).sample(
        {"n": np.arange(9)}, 1, 2
    )
    expected = Sampler(graph, [4, 3], seed=3).sample(np.arange(9), 1, 2)
    assert np.array_equal(typed.n_id["n"], expected.n_id)
    assert np.array_equal(typed.e_id["n", "e", "n"], expected.e_id)
    assert typed.num_sampled_nodes["n"] == list(expected.num_sampled_nodes)


def same(a: HeteroSample, b: HeteroSample) -> bool:
    return all(
        np.array_equal(getattr(a, name)[kind], getattr(b, name)[kind])
        for name in ("n_id", "row", "col", "e_id")
        for kind in getattr(a, name)
    )


def test_samples_replay_and_differ_between_batches() -> None:
    sampler = sampler_of(small_hetero(), [3, 2], seed=5)
    seeds = {"paper": np.arange(20), "author": np.arange(4)}
    first = sampler.sample(seeds, 1, 2)
    assert not same(first, sampler.sample(seeds, 1, 3))
    assert same(first, sampler.sample(seeds, 1, 2, threads=2))


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_no_neighbour_is_later_than_its_seed(strategy: str) -> None:
    data = small_hetero()
    given = {"time_attr": "time", "temporal_strategy": strategy, "batch_size": 12}
    for batch in NeighborLoader(data, [3, 3], "paper", **given):
        seed_time = data["paper"].time[batch["paper"].n_id[: batch["paper"].batch_size]]
        for kind in data.node_types:
            assert (batch[kind].time <= seed_time[batch[kind].batch]).all()


def test_dated_edges_need_dated_seeds_and_obey_them() -> None:
    data = small_hetero()
    with pytest.raises(InputError, match="seed_time is missing"):
        next(iter(NeighborLoader(data, [3], "paper", time_attr="edge_time", batch_size=9)))
    times = torch.full((60,), 8)
    loader = NeighborLoader(data, [3], "paper", times, time_attr="edge_time", batch_size=60)
    (batch,) = loader
    assert all((batch[kind].edge_time <= 8).all() for kind in data.edge_types)
    assert torch.equal(batch["paper"].seed_time, times)


def test_trees_of_several_seed_types_are_numbered_through() -> None:
    sampler = sampler_of(small_hetero(), [2], disjoint=True)
    sample = sampler.sample({"paper": [5, 6], "author": [1, 2, 3]})
    assert sample.batch["paper"][:2].tolist() == [0, 1]
    assert sample.batch["author"][:3].tolist() == [2, 3, 4]
    for kind in sampler.edge_types:
        trees = sample.batch[kind[0]][sample.row[kind]], sample.batch[kind[2]][sample.col[kind]]
        assert np.array_equal(*trees)


def test_fanouts_go_by_edge_type() -> None:
    data = small_hetero()
    fanout = {kind: [0, 0] for kind in data.edge_types} | {CITES: [2, 1]}
    (batch,) = NeighborLoader(data, fanout, ("paper", torch.arange(60)), batch_size=60)
    assert batch[CITES].edge_index.size(1) > 0
    assert all(batch[kind].edge_index.size(1) == 0 for kind in data.edge_types if kind != CITES)
    assert batch["author"].num_nodes == 0


def test_bidirectional_batches_pair_a_relation_with_its_reverse() -> None:
    data = small_hetero()
    for batch in NeighborLoader(data, [3, 2], "paper", subgraph_type="bidirectional", batch_size=20):
        there, back = batch[WRITES].edge_index, batch[REV].edge_index
        assert {tuple(e) for e in there.t().tolist()} == {tuple(e)[::-1] for e in back.t().tolist()}


@pytest.mark.parametrize("way", [{"prefetch": 2}, {"num_workers": 1}], ids=str)
@pytest.mark.processes
def test_every_road_makes_the_same_batches(way: dict[str, Any]) -> None:
    data = small_hetero()
    given = {"input_nodes": "paper", "batch_size": 13, "shuffle": True, "seed": 4}
    alone, other = NeighborLoader(data, [3, 2], **given), NeighborLoader(data, [3, 2], **given, **way)
    for a, b in zip(alone, other, strict=True):
        assert is_same_hetero(a, b)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_features_of_a_type_come_from_a_cache(prefetch: int) -> None:
    data = small_hetero()
    bare = small_hetero()
    table = data["author"].x.numpy()
    del bare["author"].x
    bare["author"].num_nodes = 40
    cache = Cache(lambda ids: table[ids], 15, num_rows=40)
    given = {"input_nodes": "paper", "batch_size": 13, "seed": 4}
    cached = NeighborLoader(bare, [3, 2], features={"author": cache}, prefetch=prefetch, **given)
    for a, b in zip(NeighborLoader(data, [3, 2], **given), cached, strict=True):
        assert torch.equal(a["author"].x, b["author"].x)
    assert cache.counters.hits > 0


def test_typed_stores_serve_as_data() -> None:
    data = small_hetero()
    given = {"input_nodes": ("paper", torch.arange(60)), "batch_size": 20, "seed": 1}
    pairs = zip(NeighborLoader((data, data), [3], **given), NeighborLoader(data, [3], **given), strict=True)
    for a, b in pairs:
        assert torch.equal(a["author"].x, b["author"].x)
        assert torch.equal(a[WRITES].edge_index, b[WRITES].edge_index)


def test_trimmed_layers_compute_the_same_seeds() -> None:
    data = small_hetero()
    (batch,) = NeighborLoader(data, [-1, -1], ("paper", torch.arange(8)), batch_size=8)
    layers = [HeteroConv({kind: SAGEConv((3, 3), 3) for kind in data.edge_types}, "sum") for _ in range(2)]
    full, trimmed, edges = data.x_dict, batch.x_dict, batch.edge_index_dict
    for i, layer in enumerate(layers):
        full = layer(full, data.edge_index_dict)
        counts = (batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict)
        trimmed, edges, _ = trim_to_layer(i, *counts, trimmed, edges)
        trimmed = layer(trimmed, edges)
    torch.testing.assert_close(trimmed["paper"][:8], full["paper"][:8])


@pytest.mark.parametrize("kind", [CITES, WRITES])
@pytest.mark.parametrize("disjoint", [False, True])
def test_links_are_found_at_their_places(kind: Any, disjoint: bool) -> None:
    data = small_hetero()
    loader = LinkNeighborLoader(data, [2, 2], kind, batch_size=16, disjoint=disjoint, neg_sampling="binary")
    for batch in loader:
        check(batch, data)
        count = batch[kind].input_id.numel()
        index, label = batch[kind].edge_label_index, batch[kind].edge_label
        assert label.tolist() == [1.0] * count + [0.0] * count
        ends = torch.stack([batch[kind[0]].n_id[index[0]], batch[kind[2]].n_id[index[1]]])
        assert torch.equal(ends[:, :count], data[kind].edge_index[:, batch[kind].input_id])


def test_triplets_stand_with_their_nodes() -> None:
    data = small_hetero()
    negatives = NegativeSampling("triplet", 2)
    links = (WRITES, data[WRITES].edge_index[:, :50])
    for batch in LinkNeighborLoader(data, [2], links, batch_size=16, neg_sampling=negatives):
        count = batch[WRITES].input_id.numel()
        source = batch["author"].n_id[batch["author"].src_index]
        target = batch["paper"].n_id[batch["paper"].dst_pos_index]
        assert torch.equal(torch.stack([source, target]), data[WRITES].edge_index[:, batch[WRITES].input_id])
        assert batch["paper"].dst_neg_index.shape == (count, 2)


def test_a_type_no_edge_reaches_is_empty() -> None:
    data = small_hetero()
    (batch,) = NeighborLoader(data, [2], ("venue", torch.tensor([1])), batch_size=1)
    assert batch["author"].num_nodes == 0
    assert batch["author"].x.shape == (0, 3)


LOADER_BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_nodes": None}, "name one"),
    ({"input_nodes": "journal"}, "not a node type"),
    ({"input_nodes": ("paper", torch.tensor([60]))}, "0 to 59"),
    ({"num_neighbors": {CITES: [2]}}, "has no fanout"),
    ({"num_neighbors": {("a", "b", "c"): [2]}}, "not an edge type"),
    ({"num_neighbors": []}, "fanout"),
    ({"time_attr": "when"}, "no node type and no edge type"),
    ({"weight_attr": "heavy"}, "no edge type has"),
    ({"features": np.zeros((3, 1))}, "by node type"),
    ({"data": HeteroData()}, "graphs is empty"),
]


@pytest.mark.parametrize(("given", "message"), LOADER_BAD, ids=[m for _, m in LOADER_BAD])
def test_bad_input_is_refused_with_the_next_step(given: dict[str, Any], message: str) -> None:
    arguments = {"data": small_hetero(), "num_neighbors": [2], "input_nodes": "paper", **given}
    with pytest.raises(InputError, match=message):
        NeighborLoader(**arguments)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (None, "name one"),
        (("a", "b", "c"), "not an edge type"),
        ((WRITES, torch.tensor([[41], [0]])), "0 to 39"),
    ],
)
def test_bad_links_are_refused(links: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinkNeighborLoader(small_hetero(), [2], links)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fanout": {CITES: [1], WRITES: [1, 2]}}, "no fanout"),
        ({"direction": "bidirectional"}, "directional"),
        ({"node_time": {"paper": np.arange(3)}}, "one number per node"),
        ({"node_time": {"journal": np.arange(3)}}, "not a node type"),
        ({"node_time": {"paper": np.arange(60)}, "edge_time": {CITES: np.arange(300)}}, "both"),
        ({"weight": {CITES: -np.ones(300)}}, "negative"),
    ],
)
def test_bad_settings_of_the_sampler_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sampler_of(small_hetero(), **{"fanout": [2], **given})
