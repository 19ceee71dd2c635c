"""Batches arrive on the device asked for, by every road, and whole."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from plait.errors import InputError
from plait.loader import NeighborLoader
from plait.loader.transfer import Transfer
from plait.pyg.edges import carry, from_edge_list, starts_of

HAS_GPU = torch.cuda.is_available()


def test_without_a_device_a_batch_stays_what_it_is() -> None:
    batch = Data(x=torch.ones(2))
    transfer = Transfer(None, pin=False)
    assert transfer.finish(transfer.start(batch)) is batch


def test_a_device_without_streams_is_simply_moved_to() -> None:
    transfer = Transfer("meta", pin=False)
    assert transfer.finish(transfer.start(Data(x=torch.ones(2)))).x.device.type == "meta"


@pytest.mark.parametrize("device", ["nowhere", 3.5, *([] if HAS_GPU else ["cuda"])])
def test_devices_there_are_not_are_refused(device: Any) -> None:
    with pytest.raises(InputError, match="device="):
        Transfer(device, pin=False)


def test_a_copy_for_another_process_leaves_the_stream_behind() -> None:
    assert pickle.loads(pickle.dumps(Transfer("cpu", pin=False))).device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_copies_are_whole_while_the_device_is_busy() -> None:
    transfer = Transfer("cuda", pin=False)
    typed = HeteroData()
    typed["a"].x = torch.arange(10.0)
    big = torch.randn(4000, 4000, device="cuda")
    for n in range(50):
        batch = Data(x=torch.full((500_000,), float(n)), edge_index=torch.full((2, 9), n))
        started = transfer.start(batch)
        del batch  # its pinned memory may be handed out again once the copy has ended, not before
        for _ in range(5):
            big = torch.tanh(big @ big)
        moved = transfer.finish(started)
        assert moved.x.is_cuda
        assert torch.equal(moved.x, torch.full((500_000,), float(n), device="cuda"))
        assert bool((moved.edge_index == n).all())
    assert transfer.finish(transfer.start(typed))["a"].x.is_cuda


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_copy_does_not_wait_for_the_computation() -> None:
    transfer = Transfer("cuda", pin=False)
    big = torch.randn(8000, 8000, device="cuda")
    transfer.finish(transfer.start(Data(x=torch.zeros(1000))))
    torch.cuda.synchronize()
    for _ in range(40):
        big = torch.tanh(big @ big)
    computed = torch.cuda.Event()
    computed.record()
    _, event = transfer.start(Data(x=torch.zeros(1000)))
    event.synchronize()
    assert not computed.query()


def loader_of(**options: Any) -> NeighborLoader:
    draw = torch.Generator().manual_seed(0)
    data = Data(edge_index=torch.randint(0, 200, (2, 3000), generator=draw), num_nodes=200)
    return NeighborLoader(data, [5, 3], batch_size=16, shuffle=True, seed=0, **options)


def check_starts(batch: Any, starts: torch.Tensor | None) -> None:
    """`starts` are the pointers of the batch's edges by target."""
    assert starts is not None
    target = batch.edge_index[1].cpu()
    assert starts.tolist() == torch.searchsorted(target, torch.arange(batch.num_nodes + 1)).tolist()


def test_a_batch_of_the_loader_knows_where_the_edges_of_its_nodes_begin() -> None:
    for batch in loader_of():
        check_starts(batch, starts_of(batch.edge_index))
        batch.edge_index[0, 0] += 1
        assert starts_of(batch.edge_index) is None  # no longer the edges that were sampled


def test_a_pinned_copy_carries_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:  # pinned memory needs a device: any copy stands for it
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    for batch in loader_of():
        before = batch.edge_index
        after = before.pin_memory()
        assert starts_of(after) is None
        carry(before, after)
        batch.edge_index = after
        check_starts(batch, starts_of(after))
        ours, theirs = (from_edge_list(e, *[batch.num_nodes] * 2, False) for e in (after, before.clone()))
        assert (ours.indices == theirs.indices).all()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_moved_batch_carries_the_graph() -> None:
    for batch in loader_of(device="cuda", prefetch=2):
        check_starts(batch, starts_of(batch.edge_index))
        nodes = batch.num_nodes
        ours, theirs = (
            from_edge_list(e, nodes, nodes, False) for e in (batch.edge_index, batch.edge_index.clone())
        )
        assert torch.equal(ours.rows.indptr, theirs.rows.indptr)  # type: ignore[attr-defined]
