"""DistDGL behind plait's cache, with a pretended DGL; benchmarks/hosts runs the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import plait.distributed.dgl as adapter
from plait.errors import InputError

GUARD = adapter.guard
NODES, OWN = 100, 40
ROWS = torch.arange(2.0 * NODES).reshape(NODES, 2)
LABELS = torch.arange(NODES) % 3


class Tensor:
    """A DistTensor whose rows 0 to 39 lie here; counts what is pulled, and refuses two requests at once."""

    name = "feat"

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.shape, self.dtype = rows.clone(), rows.shape, rows.dtype
        book = SimpleNamespace(partid2nids=lambda part, kind: torch.arange(OWN))
        self.part_policy = SimpleNamespace(partition_book=book, part_id=0, type_name="_N")
        self.pulled: list[int] = []
        self._busy = threading.Lock()

    @property
    def local_partition(self) -> torch.Tensor:
        return self.rows[:OWN]

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        assert self._busy.acquire(blocking=False), "DGL answers one request at a time"
        time.sleep(0.001)
        self.pulled.extend(ids.tolist())
        self._busy.release()
        return self.rows[ids]

    def __setitem__(self, ids: Any, rows: Any) -> None:
        self.rows[ids] = rows


class Loader:
    """Batches as DistNodeDataLoader's: (input nodes, seeds, blocks)."""

    def __init__(self, count: int = 12) -> None:
        self.expected_idxs = count
        self.epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        rng = np.random.default_rng(self.epochs)
        for b in range(self.expected_idxs):
            nodes = torch.from_numpy(rng.permutation(NODES)[:30])
            yield nodes, nodes[:5].clone(), [f"blocks {self.epochs} {b}"]


def graph() -> Any:
    inner = torch.zeros(NODES, dtype=torch.bool)
    inner[:OWN] = True
    local = SimpleNamespace(ndata={"_ID": torch.arange(NODES), "inner_node": inner})
    return SimpleNamespace(ndata={"feat": Tensor(ROWS), "label": Tensor(LABELS)}, local_partition=local)


@pytest.fixture(autouse=True)
def no_dgl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "guard", lambda: None)


@pytest.mark.parametrize("cache", [0, 0.25, 1000])
@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_a_script_finds_the_batches_and_rows_it_would_have_found(cache: float, policy: str) -> None:
    g, plain = graph(), Loader()
    loader = adapter.prefetched(Loader(), g, cache=cache, policy=policy)
    assert len(loader) == 12
    for _ in range(3):
        expected = list(plain)
        for (nodes, seeds, blocks), want in zip(loader, expected, strict=True):
            assert torch.equal(nodes, want[0])
            assert torch.equal(seeds, want[1])
            assert blocks == want[2]
            assert torch.equal(g.ndata["feat"][nodes], ROWS[nodes])
            assert torch.equal(g.ndata["label"][seeds], LABELS[seeds])
            assert torch.equal(g.ndata["feat"][seeds], ROWS[seeds])  # not what was fetched ahead


def test_rows_of_this_machine_are_never_pulled_and_kept_ones_once() -> None:
    g = graph()
    tensor = g.ndata["feat"]
    loader = adapter.prefetched(Loader(), g, cache=1000)
    for _ in range(2):
        for nodes, _, _ in loader:
            g.ndata["feat"][nodes]
    assert min(tensor.pulled) >= OWN
    assert len(tensor.pulled) == len(set(tensor.pulled)) == NODES - OWN
    assert loader.report()["hit_rate"] == 1.0


def test_a_stand_in_answers_for_the_tensor() -> None:
    g = graph()
    tensor = g.ndata["feat"]
    adapter.prefetched(Loader(), g, cache=1000)
    stand_in = g.ndata["feat"]
    assert stand_in.shape == tensor.shape
    assert len(stand_in) == NODES
    assert torch.equal(stand_in[[70, 3, 70]], ROWS[[70, 3, 70]])
    stand_in[torch.tensor([70])] = torch.tensor([[7.0, 7.0]])
    assert stand_in[torch.tensor([70])].tolist() == [[7.0, 7.0]]


def test_an_epoch_left_early_and_one_without_batches() -> None:
    g = graph()
    loader = adapter.prefetched(Loader(), g)
    for nodes, _, _ in loader:
        assert torch.equal(g.ndata["feat"][nodes], ROWS[nodes])
        break
    for nodes, _, _ in loader:
        assert torch.equal(g.ndata["feat"][nodes], ROWS[nodes])
    assert list(adapter.prefetched(Loader(0), graph())) == []


def test_rows_of_one_batch_outlive_the_next_ones() -> None:
    g = graph()
    kept = [(nodes, g.ndata["feat"][nodes]) for nodes, _, _ in adapter.prefetched(Loader(), g)]
    for nodes, rows in kept:
        assert torch.equal(rows, ROWS[nodes])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs": "colour"}, "feat, label"),
        ({"inputs": ()}, "features' name"),
        ({"outputs": [3]}, "names of node data"),
        ({"cache": -1}, "share of the halo"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        adapter.prefetched(Loader(), graph(), **given)


def test_other_loaders_and_a_second_wrapping_are_refused() -> None:
    with pytest.raises(InputError, match="DistNodeDataLoader"):
        adapter.prefetched([1, 2], graph())
    g = graph()
    adapter.prefetched(Loader(), g)
    with pytest.raises(InputError, match="already"):
        adapter.prefetched(Loader(), g)


def test_nodes_that_are_not_numbered_part_by_part_are_refused() -> None:
    g = graph()
    book = SimpleNamespace(partid2nids=lambda part, kind: torch.arange(0, 2 * OWN, 2))
    g.ndata["feat"].part_policy.partition_book = book
    with pytest.raises(InputError, match="part by part"):
        adapter.prefetched(Loader(), g)


def test_requests_to_the_real_dgl_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dgl")
    from dgl.distributed import graph_services, kvstore

    for owner, name in (
        (kvstore.KVClient, "pull"),
        (kvstore.KVClient, "push"),
        (graph_services, "_distributed_access"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    running, most = 0, 0

    def pull(*_: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1

    monkeypatch.setattr(kvstore.KVClient, "pull", pull)
    GUARD()
    guarded = kvstore.KVClient.pull
    GUARD()
    assert kvstore.KVClient.pull is guarded
    threads = [threading.Thread(target=guarded, args=(None,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
