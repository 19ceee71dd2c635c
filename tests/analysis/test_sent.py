"""Predicted bytes against processes that really exchange rows: a training step split by an edge cut.

Each process owns a part of the nodes, gets the remote rows its edges read, and sends their gradients back.
The gradients are those of one process, and the bytes it took are those the analysis names. Rows are counted
as they are handed to gloo; the ring that adds up the weights' gradients is counted by its law.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import add_self_loops, degree

import plait

Widths = tuple[int, int, int]
NODES = 60


def problem(width: int) -> tuple[Data, Tensor]:
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(0, NODES, (2, 240), generator=generator).unique(dim=1)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    x = torch.randn(NODES, width, generator=generator, dtype=torch.float32)
    return Data(x=x, edge_index=edge_index), torch.randint(0, 4, (NODES,), generator=generator)


class Two(nn.Module):
    def __init__(self, widths: Widths) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = GCNConv(*widths[:2]), GCNConv(*widths[1:])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def normalised(data: Data) -> tuple[Tensor, Tensor]:
    """PyG's GCN matrix as (edges, weights), loops inside."""
    edges, _ = add_self_loops(data.edge_index, num_nodes=NODES)
    scale = degree(edges[1], NODES).pow(-0.5)
    return edges, scale[edges[0]] * scale[edges[1]]


class Rank:
    """One process: its rows, what it needs of whom, and a count of the bytes it sends."""

    def __init__(self, rank: int, part: Tensor, edges: Tensor, weights: Tensor) -> None:
        self.rank, self.sent = rank, 0
        mine = (part == rank).nonzero().view(-1)
        into = part[edges[1]] == rank
        sources = edges[0][into]
        world = int(part.max()) + 1
        self.needed = [sources[part[sources] == q].unique() if q != rank else mine[:0] for q in range(world)]
        self.asked: list[Tensor] = []
        for q in range(world):
            read = edges[0][(part[edges[1]] == q) & (part[edges[0]] == rank)].unique()
            self.asked.append(read if q != rank else mine[:0])
        order = torch.cat([mine, *self.needed])
        place = torch.full((NODES,), -1)
        place[order] = torch.arange(len(order))
        self.mine, self.place = mine, place
        rows = place[edges[1][into]]
        self.matrix = torch.sparse_coo_tensor(
            torch.stack([rows, place[sources]]), weights[into], (len(mine), len(order))
        )

    def swap(self, outgoing: list[Tensor], incoming: list[int], width: int) -> list[Tensor]:
        """Send to every other process and receive from it; empty messages are not sent."""
        import torch.distributed as dist

        received = [torch.empty(count, width) for count in incoming]
        waits = []
        for q, rows in enumerate(outgoing):
            if len(rows):
                rows = rows.contiguous()
                self.sent += rows.nbytes
                waits.append(dist.isend(rows, q))
        for q, rows in enumerate(received):
            if len(rows):
                waits.append(dist.irecv(rows, q))
        for wait in waits:
            wait.wait()
        return received


class Exchange(torch.autograd.Function):
    """[own rows; remote rows] from own rows; backwards the remote rows' gradients go home and are added."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rank: Rank) -> Tensor:
        ctx.rank, ctx.count = rank, len(own)
        outgoing = [own[rank.place[rows]] for rows in rank.asked]
        received = rank.swap(outgoing, [len(rows) for rows in rank.needed], own.shape[1])
        return torch.cat([own, *received])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rank: Rank = ctx.rank
        own, parts = grad[: ctx.count].clone(), grad[ctx.count :].split([len(rows) for rows in rank.needed])
        received = rank.swap(list(parts), [len(rows) for rows in rank.asked], grad.shape[1])
        for rows, values in zip(rank.asked, received, strict=True):
            own.index_add_(0, rank.place[rows], values)
        return own, None


def layer(rank: Rank, conv: GCNConv, x: Tensor, gathers: tuple[int, ...], summed: Tensor | None) -> Tensor:
    """A layer in the plan's association: sums known already, products after the weights, or before them."""
    weight = conv.lin.weight.t()
    if not gathers:
        assert summed is not None
        return summed @ weight + conv.bias
    if gathers[0] == weight.shape[1]:
        return rank.matrix @ Exchange.apply(x @ weight, rank) + conv.bias
    return (rank.matrix @ Exchange.apply(x, rank)) @ weight + conv.bias


def work(number: int, world: int, widths: Widths, folder: str, gathers: list[tuple[int, ...]]) -> None:
    """A process: one training step; what it sent and the gradients are left in a file."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=world)
    data, part = problem(widths[0])
    part = part % world
    rank, model = Rank(number, part, *normalised(data)), Two(widths)
    x = data.x[rank.mine]
    with torch.no_grad():
        summed = rank.matrix @ Exchange.apply(x, rank) if not gathers[0] else None
    rank.sent = 0  # done once, not in every epoch
    h = layer(rank, model.first, x, gathers[0], summed).relu()
    layer(rank, model.second, h, gathers[1], None).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        # the ring's own messages: 2 (P - 1) / P of it from each process
        rank.sent += 2 * (world - 1) * parameter.grad.nbytes / world
    grads = [parameter.grad.numpy() for parameter in model.parameters()]
    np.savez(f"{folder}/{number}.npz", rank.sent, *grads)
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("world", "widths"), [(2, (24, 16, 6)), (4, (24, 16, 6)), (4, (400, 4, 16))])
def test_processes_send_the_bytes_that_were_predicted(world: int, widths: Widths, tmp_path: Path) -> None:
    """The first layer's sums are known before; the second's follow the weights, or precede them."""
    data, part = problem(widths[0])
    found = plait.analyze(Two(widths), data, workers=world, partition=(part % world).numpy())
    gathers = [layer.forward.gathers for layer in found.layers]
    multiprocessing.spawn(work, (world, widths, str(tmp_path), gathers), nprocs=world)  # type: ignore[no-untyped-call]
    runs = [np.load(tmp_path / f"{number}.npz") for number in range(world)]
    alone = Two(widths)
    alone(data.x, data.edge_index).sum().backward()
    for k, parameter in enumerate(alone.parameters()):
        np.testing.assert_allclose(runs[0][f"arr_{k + 1}"], parameter.grad.numpy(), rtol=1e-3, atol=1e-4)
    sent = sum(float(run["arr_0"]) for run in runs)
    predicted = found.to_dict()["strategies"]["edge cut"]["bytes_per_epoch"]
    assert sent == pytest.approx(predicted, rel=1e-6)
