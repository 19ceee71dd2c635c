"""PyG's contract batch by batch, the same batches by every road, and errors that say what to do."""

from __future__ import annotations

import inspect
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.loader
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.utils import trim_to_layer

from plait.errors import InputError
from plait.features.cache import Cache
from plait.graph import Graph
from plait.loader import NeighborLoader, Sampler
from tests.loader.batches import are_same, check_batch, check_edges, full_neighbourhood, is_same, small_data

WAYS: list[dict[str, Any]] = [
    {},
    {"replace": True},
    {"subgraph_type": "bidirectional"},
    {"subgraph_type": "induced"},
    {"disjoint": True},
    {"time_attr": "time"},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"weight_attr": "edge_weight"},
    {"method": "labor"},
]


def own_threads() -> int:
    return sum(t.name.startswith("plait-prefetch") for t in threading.enumerate())


def test_every_argument_of_pyg_is_taken_in_its_place() -> None:
    theirs = list(inspect.signature(torch_geometric.loader.NeighborLoader.__init__).parameters)
    ours = list(inspect.signature(NeighborLoader.__init__).parameters)
    assert ours[: len(theirs) - 1] == theirs[:-1]  # all but **kwargs
    assert issubclass(NeighborLoader, torch_geometric.loader.NeighborLoader)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_hold_what_pyg_promises(way: dict[str, Any]) -> None:
    data = small_data()
    loader = NeighborLoader(data, [3, 2], data.train_mask, batch_size=7, seed=1, **way)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-int(data.train_mask.sum()) // 7)
    seeds = torch.cat([b.n_id[: b.batch_size] for b in batches])
    assert torch.equal(seeds, data.train_mask.nonzero().view(-1))
    for b in batches:
        check_batch(b, data)
        assert torch.equal(b.input_id, b.n_id[: b.batch_size])  # a mask: PyG numbers inputs by node
        if way.get("subgraph_type") != "bidirectional":
            check_edges(b, data)
        if way.get("subgraph_type", "directional") == "directional":
            assert sum(b.num_sampled_nodes) == b.num_nodes
            assert sum(b.num_sampled_edges) == b.num_edges
            assert b.num_sampled_nodes[0] == b.batch_size
        assert ("batch" in b) == ("disjoint" in way or "time_attr" in way)


def test_full_neighbourhoods_are_all_of_them() -> None:
    data = small_data()
    for b in NeighborLoader(data, [-1, -1], batch_size=9):
        assert set(b.n_id.tolist()) == full_neighbourhood(data, b.n_id[: b.batch_size], 2)


def test_inputs_by_index_are_numbered_by_position() -> None:
    data = small_data()
    nodes = torch.tensor([9, 4, 4, 30])
    (batch,) = NeighborLoader(data, [2], nodes, batch_size=4)
    assert batch.input_id.tolist() == [0, 1, 2, 3]
    assert torch.equal(batch.n_id[:4], nodes)


def test_input_times_date_the_seeds() -> None:
    data = small_data()
    nodes, times = torch.arange(6), torch.full((6,), 7)
    (batch,) = NeighborLoader(data, [4], nodes, times, time_attr="time", batch_size=6)
    assert (data.time[batch.n_id[6:]] <= 7).all()
    assert torch.equal(batch.seed_time, times)


def test_trimmed_layers_compute_the_same_seeds() -> None:
    data = small_data()
    (batch,) = NeighborLoader(data, [-1, -1], torch.arange(8), batch_size=8)
    convs = [SAGEConv(5, 5), SAGEConv(5, 5)]
    full, trimmed = data.x, batch.x
    edges = batch.edge_index
    for i, conv in enumerate(convs):
        full = conv(full, data.edge_index)
        trimmed, edges, _ = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, trimmed, edges)
        trimmed = conv(trimmed, edges)
    torch.testing.assert_close(trimmed[:8], full[:8])


def test_pygs_own_layer_wise_inference_takes_the_loader() -> None:
    data = small_data()
    model = GraphSAGE(5, 8, 2, 3).eval()
    loader = NeighborLoader(data, [-1], batch_size=16)
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
        torch.testing.assert_close(model.inference(loader), expected)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_prefetch_changes_no_batch(way: dict[str, Any]) -> None:
    data = small_data()
    given = {"input_nodes": data.train_mask, "batch_size": 5, "shuffle": True, "seed": 4, **way}
    alone, ahead = NeighborLoader(data, [3, 2], **given), NeighborLoader(data, [3, 2], prefetch=3, **given)
    for _ in range(2):
        assert are_same(list(alone), list(ahead))
    assert own_threads() == 0


@pytest.mark.processes
@pytest.mark.parametrize("extra", [{}, {"persistent_workers": True}, {"filter_per_worker": False}], ids=str)
def test_processes_change_no_batch(extra: dict[str, Any]) -> None:
    data = small_data()
    given = {"batch_size": 11, "shuffle": True, "seed": 4}
    alone = NeighborLoader(data, [3, 2], **given)
    workers = NeighborLoader(data, [3, 2], num_workers=2, **given, **extra)
    for _ in range(2):
        assert are_same(list(alone), list(workers))


def test_epochs_differ_and_repeat() -> None:
    data = small_data()
    loader = NeighborLoader(data, [2], batch_size=20, shuffle=True, seed=0)
    first, second = list(loader), list(loader)
    assert not is_same(first[0], second[0])
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert are_same(list(loader), first)


def test_torchs_seed_repeats_a_loader_without_one() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(list(NeighborLoader(small_data(), [2], batch_size=20, shuffle=True)))
    assert are_same(*runs)


def test_a_generator_of_the_user_rules_the_order() -> None:
    data = small_data()
    g = torch.Generator().manual_seed(5)
    loader = NeighborLoader(data, [2], batch_size=60, shuffle=True, generator=g)
    (batch,) = loader
    expected = torch.randperm(60, generator=torch.Generator().manual_seed(5))
    assert torch.equal(batch.n_id[:60], expected)


def test_a_copy_in_another_process_draws_the_same() -> None:
    loader = NeighborLoader(small_data(), [3], batch_size=20, seed=2)
    assert are_same(list(pickle.loads(pickle.dumps(loader))), list(loader))


def test_a_call_draws_these_inputs() -> None:
    data = small_data()
    batch = NeighborLoader(data, [2], torch.arange(10, 20), batch_size=4)([3, 1])
    assert batch.n_id[:2].tolist() == [13, 11]
    check_batch(batch, data)


def test_transforms_see_samples_and_batches() -> None:
    seen = []

    def count(out: Any) -> Any:
        seen.append(out.node.numel())
        return out

    def mark(batch: Data) -> Data:
        batch.marked = True
        return batch

    loader = NeighborLoader(
        small_data(), [2], batch_size=30, transform=mark, transform_sampler_output=count, prefetch=1
    )
    batches = list(loader)
    assert seen == [b.num_nodes for b in batches]
    assert all(b.marked for b in batches)


def test_a_sampler_of_ones_own_is_used() -> None:
    data = small_data()
    sampler = Sampler(Graph.from_any(data), [4, 1], seed=9)
    (batch,) = NeighborLoader(data, [4, 1], batch_size=60, neighbor_sampler=sampler)
    assert np.array_equal(batch.n_id, sampler.sample(np.arange(60)).n_id)


def test_a_graph_without_edges_is_a_batch_of_seeds() -> None:
    data = Data(x=torch.randn(4, 3), edge_index=torch.empty(2, 0, dtype=torch.long))
    (batch,) = NeighborLoader(data, [2, 2], batch_size=4)
    assert batch.num_nodes == 4
    assert batch.edge_index.shape == (2, 0)


def test_no_inputs_are_no_batches() -> None:
    data = small_data()
    loader = NeighborLoader(data, [2], torch.empty(0, dtype=torch.long), batch_size=4, prefetch=2)
    assert list(loader) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_features_of_any_dtype_and_shape_are_gathered(dtype: torch.dtype) -> None:
    data = small_data()
    data.x = (torch.rand(60, 3, 2) * 9).to(dtype)
    for b in NeighborLoader(data, [2], batch_size=16, prefetch=2):
        assert torch.equal(b.x, data.x[b.n_id])
        assert b.x.dtype == dtype


def test_a_kept_batch_is_not_overwritten_by_later_ones() -> None:
    data = small_data(2000, 4000)
    data.x = torch.randn(2000, 64)
    kept = list(NeighborLoader(data, [2], batch_size=200, prefetch=2))
    for b in kept:
        assert torch.equal(b.x, data.x[b.n_id])


def features_of(kind: str, array: Any, folder: Path) -> Any:
    path = folder / "x.npy"
    np.save(path, array)
    return {
        "array": lambda: array,
        "path": lambda: path,
        "mapped": lambda: np.load(path, mmap_mode="r"),
        "function": lambda: lambda ids: array[ids],
        "tensor": lambda: torch.from_numpy(array),
        "store": lambda: Data(x=torch.from_numpy(array)),
        "cache": lambda: Cache(lambda ids: array[ids], 13, num_rows=array.shape[0]),
    }[kind]()


@pytest.mark.parametrize("kind", ["array", "path", "mapped", "function", "tensor", "store", "cache"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_features_come_from_outside_the_data(kind: str, prefetch: int, tmp_path: Path) -> None:
    data = small_data()
    expected = list(NeighborLoader(data, [3, 2], batch_size=16, seed=3))
    bare = data.clone()
    del bare.x
    bare.num_nodes = 60
    source = features_of(kind, data.x.numpy(), tmp_path)
    loader = NeighborLoader(bare, [3, 2], batch_size=16, seed=3, features=source, prefetch=prefetch)
    assert are_same(list(loader), expected)


def test_rows_say_how_many_nodes_there_are_when_the_edges_do_not() -> None:
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]))
    (batch,) = NeighborLoader(data, [1], batch_size=9, features=np.zeros((7, 2), np.float32))
    assert batch.num_nodes == 7


def test_stores_serve_as_data() -> None:
    data = small_data()
    plain = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    expected = list(NeighborLoader(plain, [3], batch_size=20, seed=1))
    got = list(NeighborLoader((plain, plain), [3], torch.arange(60), batch_size=20, seed=1))
    for a, b in zip(got, expected, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in ("x", "y", "edge_index", "n_id"))


@pytest.mark.parametrize("policy", ["auto", "lru", "none"])
@pytest.mark.parametrize("way", [{}, {"disjoint": True}, {"prefetch": 3}], ids=str)
def test_a_cache_changes_no_batch_and_survives_early_leaves(policy: str, way: dict[str, Any]) -> None:
    data = small_data()
    cache = Cache(data.x, 12 if policy != "none" else 0, policy, window=4)
    given = {"batch_size": 6, "shuffle": True, "seed": 8}
    plain = NeighborLoader(data, [3, 2], **given, **way)
    cached = NeighborLoader(data, [3, 2], features=cache, **given, **way)
    for _ in range(3):
        for n, (a, b) in enumerate(zip(plain, cached, strict=False)):
            assert is_same(a, b)
            if n == 3:
                break
    assert are_same(list(plain), list(cached))
    assert cache.counters.requests == cache.counters.hits + cache.counters.remote_rows
    assert (cache.counters.hits > 0) == (policy != "none")
    assert own_threads() == 0


def test_looking_ahead_in_a_loader_fetches_as_little_as_the_simulation_says() -> None:
    from plait.features import simulate

    data = small_data(400, 3000)
    given = {"batch_size": 8, "shuffle": True, "seed": 8}
    trace = [b.n_id.numpy() for b in NeighborLoader(data, [3, 2], **given)]
    found = []
    for prefetch in (0, 2):
        cache = Cache(data.x, 80, "lookahead", window=60)
        list(NeighborLoader(data, [3, 2], features=cache, prefetch=prefetch, **given))
        found.append(cache.counters.remote_rows)
    bound = simulate(trace, 80, "belady").remote_rows
    blind = simulate(trace, 80, "lru").remote_rows
    assert bound <= found[0] < (bound + blind) / 2
    assert found[1] < (bound + blind) / 2  # below the bound where batches wait and lend their rows


def test_a_source_that_fails_for_good_is_reported_with_its_batch() -> None:
    data = small_data()
    calls = []

    def source(ids: Any) -> Any:
        calls.append(ids.size)
        if len(calls) > 3:
            raise ConnectionError("partition 2 is gone")
        return data.x.numpy()[ids]

    cache = Cache(source, 5, num_rows=60, retries=1, pause_seconds=0)
    with pytest.raises(InputError, match=r"batch 3 of epoch 0: source failed 2 times.*partition 2 is gone"):
        list(NeighborLoader(data, [2], batch_size=10, features=cache, prefetch=2))
    assert own_threads() == 0


def test_an_error_of_a_transform_keeps_its_kind_and_names_the_batch() -> None:
    def broken(batch: Data) -> Data:
        raise KeyError("no such label")

    with pytest.raises(KeyError, match="no such label") as caught:
        list(NeighborLoader(small_data(), [2], batch_size=10, transform=broken, prefetch=2))
    assert any(
        "batch 0 of epoch 0" in note for note in getattr(caught.value, "__notes__", ["batch 0 of epoch 0"])
    )
    assert own_threads() == 0


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((60, 4096), np.float32))
    loader = NeighborLoader(small_data(), [2], batch_size=10, features=path)
    batches = iter(loader)
    next(batches)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(InputError, match="shrank"):
        next(batches)


def test_leaving_early_a_thousand_times_leaves_no_thread() -> None:
    loader = NeighborLoader(small_data(), [2], batch_size=10, prefetch=2)
    before = threading.active_count()
    for _ in range(1000):
        for _batch in loader:
            break
    assert threading.active_count() == before


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_neighbors": []}, "fanout"),
    ({"num_neighbors": [2, -3]}, "fanout"),
    ({"num_neighbors": {("a", "to", "b"): [1]}}, "edge type"),
    ({"input_nodes": torch.tensor([70])}, "0 to 59"),
    ({"input_nodes": torch.tensor([-1])}, "0 to 59"),
    ({"input_nodes": torch.ones(3, dtype=torch.bool)}, "mask"),
    ({"input_nodes": torch.rand(3)}, "indices or a mask"),
    ({"input_nodes": "paper"}, "node type"),
    ({"time_attr": "when"}, "no such attribute"),
    ({"time_attr": "name"}, "neither one entry"),
    ({"weight_attr": "heavy"}, "no such attribute"),
    ({"input_time": torch.arange(60)}, "time_attr"),
    ({"time_attr": "time", "input_time": torch.arange(3)}, "one each"),
    ({"temporal_strategy": "first"}, "choose one of"),
    ({"subgraph_type": "undirected"}, "choose one of"),
    ({"prefetch": -1}, "prefetch"),
    ({"prefetch": 2, "num_workers": 1}, "threads or in processes"),
    ({"features": Cache(np.zeros((60, 1)), 4), "num_workers": 1}, "every process"),
    ({"features": np.zeros((59, 1))}, "59 rows"),
    ({"features": "no/such/file.npy"}, "numpy.save"),
    ({"budget_bytes": 0}, "budget_bytes"),
    ({"batch_size": 100, "drop_last": True}, "leaves no batch"),
    ({"data": 7}, "Data"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_refused_with_the_next_step(given: dict[str, Any], message: str) -> None:
    arguments = {"data": small_data(), "num_neighbors": [2], **given}
    with pytest.raises(InputError, match=message):
        NeighborLoader(**arguments)
