"""Captured steps: the same losses as the loop they stand for; what cannot be captured is refused in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GIN, GraphSAGE

import plait
from plait.errors import InputError
from plait.loader import NeighborLoader
from plait.pyg.captured import TrainingStep
from plait.pyg.edges import starts_of
from plait.pyg.slot import Slot

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def data_of(nodes: int = 300, edges: int = 2000, seed: int = 0) -> Data:
    draw = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, 12, generator=draw),
        edge_index=torch.randint(0, nodes, (2, edges), generator=draw),
        y=torch.randint(0, 5, (nodes,), generator=draw),
        rows=torch.randperm(nodes, generator=draw)[:100],
    )


def loss_of(model: nn.Module, data: Any) -> Tensor:
    out = model(data.x, data.edge_index)
    return cross_entropy(out[data.rows], data.y[data.rows])


def seeds_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    return cross_entropy(out, batch.y[: batch.batch_size])


def batches_of(count: int, seed: int = 0) -> list[Data]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        nodes = int(torch.randint(60, 90, (1,), generator=draw))
        data = data_of(nodes, 8 * nodes, seed)
        del data.rows
        data.batch_size = 16
        found.append(data.to(DEVICE))
    return found


def by_hand(model: nn.Module, optimizer: Any, steps: list[tuple[Any, Any]]) -> list[float]:
    losses = []
    for loss, data in steps:
        optimizer.zero_grad()
        value = loss(model, data)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def over(step: Any, batches: list[Any]) -> None:
    for batch in batches:
        step(batch)


def optimizer_of(kind: Any, model: nn.Module) -> Any:
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {"capturable": True} if DEVICE == "cuda" else {}
    return kind(model.parameters(), lr=0.01, **more)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("make", [GCN, GraphSAGE, GIN], ids=lambda make: make.__name__)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_losses_of_the_loop(make: Any, kind: Any, dropout: float) -> None:
    data = data_of().to(DEVICE)
    torch.manual_seed(1)
    model = make(12, 8, 2, 5, dropout=dropout).to(DEVICE)
    twin = plait.compile(copy.deepcopy(model), data)
    torch.manual_seed(2)
    expected = by_hand(twin, optimizer_of(kind, twin), [(loss_of, data)] * 12)
    step = plait.compile(model, data, capture=True, loss=loss_of, optimizer=optimizer_of(kind, model))
    assert isinstance(step, TrainingStep)
    assert step.is_captured == (DEVICE == "cuda")
    torch.manual_seed(2)
    losses = [step.step().item() for _ in range(12)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == 12


def test_a_changed_rate_and_mode_are_seen() -> None:
    data = data_of().to(DEVICE)
    torch.manual_seed(1)
    model = GCN(12, 8, 2, 5, dropout=0.5).to(DEVICE)
    twin = plait.compile(copy.deepcopy(model), data)
    losses: list[list[float]] = []
    for net in (twin, model):
        optimizer = optimizer_of(torch.optim.SGD, net)
        step = (
            plait.compile(net, data, capture=True, loss=loss_of, optimizer=optimizer)
            if net is model
            else None
        )
        seen = []
        torch.manual_seed(3)
        for k in range(15):
            net.train(k % 7 != 6)
            optimizer.param_groups[0]["lr"] = 0.1 if k < 8 else 0.001
            seen += [step.step().item()] if step else by_hand(net, optimizer, [(loss_of, data)])
        losses.append(seen)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_gradients_without_an_optimizer() -> None:
    data = data_of().to(DEVICE)
    model = GCN(12, 8, 2, 5).to(DEVICE)
    twin = copy.deepcopy(model)
    step = plait.compile(model, data, capture=True, loss=loss_of)
    loss_of(twin, data).backward()
    for _ in range(6):
        model.zero_grad()
        step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [GCN, GraphSAGE], ids=lambda make: make.__name__)
def test_batches_have_the_losses_of_the_loop(make: Any) -> None:
    batches = batches_of(80)
    torch.manual_seed(1)
    model = make(12, 8, 2, 5).to(DEVICE)
    twin = plait.compile(copy.deepcopy(model))
    expected = by_hand(twin, optimizer_of(torch.optim.Adam, twin), [(seeds_loss, b) for b in batches])
    optimizer = optimizer_of(torch.optim.Adam, model)
    step = plait.compile(model, capture=True, loss=seeds_loss, optimizer=optimizer)
    losses = [step(batch).item() for batch in batches]
    assert losses == pytest.approx(expected, rel=2e-3, abs=1e-4)
    if DEVICE == "cuda":
        assert step.sizes
        assert any(slot.replay._graph is not None for slot in step._slots.values())


def test_a_padded_batch_has_the_loss_of_the_batch() -> None:
    for batch in batches_of(4):
        size = (int(batch.num_nodes), int(batch.num_edges))
        slot = Slot(batch, size, (128, 1024), torch.device(DEVICE))
        model = GraphSAGE(12, 8, 2, 5).to(DEVICE)
        for is_other in (False, True, False):
            slot.fill(batch, size)
            if is_other:
                slot.disturb(size)
            slot.ready()
            assert slot.batch.edge_index.max() < 128
            assert slot.batch.num_nodes == 128
            torch.testing.assert_close(seeds_loss(model, slot.batch), seeds_loss(model, batch))
            assert is_other or not slot.batch.x[size[0] :].any()


def test_a_smaller_batch_leaves_nothing_of_the_one_before() -> None:
    small, large = sorted(batches_of(4), key=lambda batch: int(batch.num_nodes))[::3]
    sizes = [(int(batch.num_nodes), int(batch.num_edges)) for batch in (small, large)]
    slot = Slot(large, sizes[1], (128, 1024), torch.device(DEVICE))
    for batch, size in zip((large, small, large), (sizes[1], sizes[0], sizes[1]), strict=True):
        slot.fill(batch, size)
        slot.ready()
        torch.testing.assert_close(slot.batch.x[: size[0]], batch.x.to(DEVICE))
        assert not slot.batch.x[size[0] :].any()
        assert (slot.batch.edge_index[:, size[1] :] == size[0]).all()


def test_what_is_no_step_is_refused() -> None:
    data, model = data_of().to(DEVICE), GCN(12, 8, 2, 5).to(DEVICE)
    with pytest.raises(InputError, match="loss: a captured step needs it"):
        plait.compile(model, data, capture=True)
    with pytest.raises(InputError, match="capture=True"):
        plait.compile(model, data, loss=loss_of)
    with pytest.raises(InputError, match="LBFGS"):
        plait.compile(
            model, data, capture=True, loss=loss_of, optimizer=torch.optim.LBFGS(model.parameters())
        )
    with pytest.raises(InputError, match="no data"):
        plait.compile(model, capture=True, loss=loss_of).step()
    step = plait.compile(model, data, capture=True, loss=lambda model, data: model(data.x, data.edge_index))
    with pytest.raises(InputError, match="loss: returned a tensor of shape"):
        step()


@needs_gpu
@pytest.mark.gpu
def test_what_cannot_be_captured_is_refused() -> None:
    data, model = data_of().to(DEVICE), GCN(12, 8, 2, 5).to(DEVICE)
    mask = torch.zeros(300, dtype=torch.bool, device=DEVICE)
    mask[:50] = True

    def masked(model: nn.Module, data: Any) -> Tensor:
        return cross_entropy(model(data.x, data.edge_index)[mask], data.y[mask])

    step = plait.compile(model, data, capture=True, loss=masked)
    with pytest.raises(InputError, match=r"test_captured.py:\d+ .*boolean mask"):
        over(step, [None] * 5)
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(InputError, match="Adagrad"):
        plait.compile(model, data, capture=True, loss=loss_of, optimizer=optimizer)
    assert float(plait.compile(model, data, capture=True, loss=loss_of)()) > 0  # the device is as it was


@needs_gpu
@pytest.mark.gpu
def test_batches_whose_rows_mix_are_refused() -> None:
    for model, loss in (
        (GCN(12, 8, 2, 5, norm="batch_norm").to(DEVICE), seeds_loss),
        (GCN(12, 8, 2, 5).to(DEVICE), lambda model, batch: model(batch.x, batch.edge_index).square().mean()),
    ):
        step = plait.compile(model, capture=True, loss=loss)
        with pytest.raises(InputError, match="padded"):
            over(step, batches_of(40))


def loaded(device: str | None = None) -> NeighborLoader:
    data = data_of(400, 4000)
    del data.rows
    return NeighborLoader(data, [4, 3], batch_size=16, seed=0, device=device, pin_memory=DEVICE == "cuda")


def test_a_slot_knows_where_the_edges_of_padding_begin() -> None:
    for batch in loaded():
        size = (int(batch.num_nodes), int(batch.num_edges))
        slot = Slot(batch, size, (512, 1024), torch.device(DEVICE))
        starts = starts_of(batch.edge_index)
        assert starts is not None
        slot.fill(batch, size)
        slot.ready()
        held = starts_of(slot.batch.edge_index)
        assert held is not None
        target = slot.batch.edge_index[1].cpu()
        assert held.tolist() == torch.searchsorted(target, torch.arange(513)).tolist()


@needs_gpu
@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("make", [GCN, GraphSAGE], ids=lambda make: make.__name__)
def test_batches_of_a_loader_are_captured_without_a_sort(make: Any, device: str | None) -> None:
    """From pinned memory, and moved by the loader: the losses of PyG's loop over the same batches."""
    torch.manual_seed(1)
    model = make(12, 8, 2, 5).to(DEVICE)
    twin = copy.deepcopy(model)
    batches = [batch.to(DEVICE) for loader in [loaded()] for _ in range(4) for batch in loader]
    expected = by_hand(twin, optimizer_of(torch.optim.Adam, twin), [(seeds_loss, b) for b in batches])
    optimizer = optimizer_of(torch.optim.Adam, model)
    step = plait.compile(model, capture=True, loss=seeds_loss, optimizer=optimizer)
    loader = loaded(device)
    losses = [step(batch).item() for _ in range(4) for batch in loader]
    assert losses == pytest.approx(expected, rel=2e-3, abs=1e-4)
    assert all(starts_of(slot.batch.edge_index) is not None for slot in step._slots.values())
