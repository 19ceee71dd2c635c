"""Memory for padded batches: what arrives is the batch, whatever its types, strides and place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from plait.pyg.slot import Slot, layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(nodes: int, edges: int, dtype: torch.dtype = torch.float32) -> Data:
    draw = torch.Generator().manual_seed(nodes)
    return Data(
        x=torch.randn(nodes, 3, generator=draw).to(dtype),
        edge_index=torch.randint(0, nodes, (2, edges), generator=draw),
        edge_attr=torch.randn(edges, generator=draw),
        n_id=torch.arange(nodes) + (1 << 40),
        mask=torch.rand(nodes, generator=draw) > 0.5,
        scale=torch.tensor(2.5),
        batch_size=4,
    )


def slot_of(batch: Any, padded: tuple[int, int] = (128, 1024)) -> Slot:
    return Slot(batch, (batch.num_nodes, batch.num_edges), padded, torch.device(DEVICE))


def check(slot: Slot, batch: Any) -> None:
    nodes, edges = int(batch.num_nodes), int(batch.num_edges)
    for name in ("x", "n_id", "mask", "edge_attr"):
        value, held = batch[name], slot.batch[name].cpu()
        assert held.dtype == value.dtype
        torch.testing.assert_close(held[: len(value)], value.detach().cpu(), rtol=0, atol=0)
        assert not held[len(value) :].any()
    held = slot.batch.edge_index.cpu()
    assert held.dtype == torch.int64
    assert torch.equal(held[:, :edges], batch.edge_index.cpu())
    assert (held[:, edges:] == nodes).all()
    assert float(slot.batch.scale) == 2.5
    assert slot.batch.batch_size == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_what_arrives_is_the_batch(dtype: torch.dtype, device: str) -> None:
    batches = [batch_of(nodes, 7 * nodes, dtype) for nodes in (90, 40, 127, 1)]
    slot = slot_of(batches[0])
    for batch in batches:
        slot.fill(batch.to(device), (int(batch.num_nodes), int(batch.num_edges)))
        slot.ready()
        check(slot, batch)


def test_strides_and_gradients_do_not_matter() -> None:
    batch = batch_of(60, 300)
    slot = slot_of(batch)
    batch.x = torch.randn(3, 60).t().requires_grad_()
    batch.edge_index = torch.randint(0, 60, (300, 2)).t()
    slot.fill(batch, (60, 300))
    slot.ready()
    check(slot, batch)


def test_a_batch_without_edges_is_padding_alone() -> None:
    batch = batch_of(5, 0)
    slot = slot_of(batch)
    slot.fill(batch, (5, 0))
    slot.ready()
    check(slot, batch)


def test_disturbed_padding_leaves_the_batch_alone() -> None:
    batch = batch_of(60, 300)
    slot = slot_of(batch)
    slot.fill(batch, (60, 300))
    slot.disturb((60, 300))
    slot.ready()
    assert (slot.batch.x[60:] == 1e3).all()
    assert (slot.batch.n_id[60:] == batch.n_id[-1].to(DEVICE)).all()
    torch.testing.assert_close(slot.batch.x[:60].cpu(), batch.x)
    assert (slot.batch.edge_index[:, 300:] == 60).all()


def test_batches_of_other_attributes_have_another_layout() -> None:
    batch, other = batch_of(60, 300), batch_of(60, 300)
    assert layout(batch, (60, 300)) == layout(other, (60, 300))
    other.extra = torch.zeros(60)
    assert layout(batch, (60, 300)) != layout(other, (60, 300))
