"""What every rank does in the tests of sharded models; started by `start`, forked from a server that imported
everything once."""

from __future__ import annotations

import copy
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    ChebConv,
    GatedGraphConv,
    GCNConv,
    GINConv,
    GraphNorm,
    GraphSAGE,
    LayerNorm,
    PairNorm,
    SAGEConv,
)

import plait
import plait.distributed.shard  # before ranks are forked, which share what is imported here
from plait.distributed.session import join
from plait.errors import ExchangeError, InputError
from tests.distributed import drawn

STEPS = 16
SINGLE_STEPS = 30  # in single precision
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCN(12, 16, 3, 4, norm="batch"),
    "sage": lambda: GraphSAGE(12, 16, 3, 4, norm="batch"),
    "gin": lambda: GIN(12, 16, 3, 4, norm="batch"),
    "gat": lambda: GAT(12, 16, 3, 4, norm="batch", heads=2),
}


class Gated(nn.Module):
    """Several hops inside one layer, a recurrent cell between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GatedGraphConv(16, 2), nn.Linear(16, 4)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.last(self.first(x, edge_index).tanh())


MODELS["gated"] = Gated


def graph(nodes: int = 240, edges: int = 900, seed: int = 0, dtype: Any = np.float32) -> Data:
    """Communities with some edges between them, loops, repeats and isolated nodes, weighted edges."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, nodes - 6, edges)
    near = np.minimum(nodes - 7, source // 60 * 60 + rng.integers(0, 60, edges))
    target = np.where(rng.random(edges) < 0.8, near, rng.integers(0, nodes - 6, edges))
    source[:5], target[:5] = 3, 3
    source[5:9], target[5:9] = 7, 8
    data = Data(
        x=torch.from_numpy(rng.standard_normal((nodes, 12)).astype(dtype)),
        edge_index=torch.from_numpy(np.stack((source, target))),
        y=torch.from_numpy(rng.integers(0, 4, nodes)),
        edge_weight=torch.from_numpy(rng.random(edges).astype(dtype) + 0.5),
    )
    data.train_mask = torch.from_numpy(rng.random(nodes) < 0.5)
    return data


class Norms(nn.Module):
    """Everything that looks at all nodes between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GCNConv(12, 8), SAGEConv(8, 4, aggr="max")
        self.norms = nn.ModuleList(
            [PairNorm(), GraphNorm(8), LayerNorm(8, mode="graph"), PairNorm(scale_individually=True)]
        )

    def forward(self, x: Any, edge_index: Any) -> Any:
        x = self.first(x, edge_index)
        for norm in self.norms:
            x = norm(x)
        return self.last(x.relu(), edge_index)


class Weighted(nn.Module):
    """Edge weights, and the same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = GCNConv(12, 8), GCNConv(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Any, edge_index: Any, edge_weight: Any) -> Any:
        x = functional.dropout(self.first(x, edge_index, edge_weight), 0.0, self.training).tanh()
        return self.last(self.again(self.again(x, edge_index, edge_weight), edge_index, edge_weight))


SINGLE = ("gcn", "sage", "gin", "gat")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def alone(
    make: Callable[[], nn.Module], data: Data, steps: int = STEPS, optimizer: str = "sgd"
) -> list[float]:
    """The losses of PyG in one process."""
    torch.manual_seed(5)
    model = make().to(data.x.dtype)
    stepper, found = OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(steps):
        stepper.zero_grad()
        loss = functional.cross_entropy(_called(model, data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        stepper.step()
        found.append(float(loss.detach()))
    return found


def sharded(
    make: Callable[[], nn.Module], data: Data, steps: int = STEPS, optimizer: str = "sgd", **options: Any
) -> tuple[list[float], Any]:
    """The losses over ranks, and the model."""
    torch.manual_seed(5)
    model = make().to(torch.float32 if data is None else data.x.dtype)
    over = plait.shard(model, data, **options)
    stepper, found = OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(steps):
        stepper.zero_grad()
        loss = over.loss(
            functional.cross_entropy, _called(over, over.data), over.data.y, over.data.train_mask
        )
        loss.backward()
        stepper.step()
        found.append(float(over.total(loss)))
    return found, over


def _called(model: Any, data: Data) -> Any:
    wanted = (data.x, data.edge_index)
    inner = getattr(model, "module", model)
    return model(*wanted, data.edge_weight) if isinstance(inner, Weighted) else model(*wanted)


def close(found: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def parity(rank: int, size: int, folder: Path) -> None:
    """Losses are those of one process, and bytes on the wire those of the plan; in double precision."""
    data = graph(dtype=np.float64)
    for name, make in MODELS.items():
        losses, over = sharded(make, data)
        close(losses, np.load(folder / f"{name}.npy").tolist())
        plan, sent = over.plan, over.counters
        assert sent.bytes_out == plan.bytes_once + STEPS * plan.bytes_per_step, name
        assert sent.bytes_out > 0
        before = sent.bytes_out
        with torch.no_grad():
            over.eval()
            rows = over.gather(_called(over, over.data))
        if name == "gcn":
            over.module.eval()
            np.testing.assert_allclose(rows, over.module(data.x, data.edge_index).detach(), atol=1e-4)
        once = over.plan.bytes_once - plan.bytes_once
        assert sent.bytes_out - before == once + over.plan.bytes_per_call, name


def single_precision(rank: int, size: int, folder: Path) -> None:
    """Losses are those of one process in single precision too, with SGD and with Adam.

    Adam divides by the size of a gradient: one that is zero but for rounding becomes a full step. On this
    graph PyG's own losses of GIN move by 3.6e-7 when its edges come in another order, on that of seed 0 by
    4.5e-3 and on that of seed 8 by 9.8e-3, where no number of processes can be within 1e-5.
    """
    data = graph(seed=1)
    for optimizer in OPTIMIZERS:
        for name in SINGLE:
            losses = sharded(MODELS[name], data, SINGLE_STEPS, optimizer=optimizer)[0]
            close(losses, np.load(folder / f"{name}-{optimizer}.npy").tolist())


def ways(rank: int, size: int, folder: Path) -> None:
    """Whatever the planner could choose gives the same losses, twice to the bit."""
    data = graph()
    mixed = ("nodes, at once", "nodes, overlapped")[rank % 2]  # each rank decides for itself whether to wait
    for split in ("nodes, at once", "nodes, overlapped", mixed, "features"):
        for name, make in (("norms", Norms), ("weighted", Weighted)):
            runs = [sharded(make, data, 3, split=split)[0] for _ in range(2)]
            assert runs[0] == runs[1], (split, name)
            close(runs[0], np.load(folder / f"{name}.npy").tolist()[:3])


def border_first(rank: int, size: int, folder: Path) -> None:
    """On a slow network what is sent is computed from few rows: the same losses, and bytes of the plan."""
    data = graph(dtype=np.float64)
    for name in ("gcn", "sage", "gin"):
        losses, over = sharded(MODELS[name], data, 3, network="1mbit")
        close(losses, np.load(folder / f"{name}.npy").tolist()[:3])
        assert any(choice.split.endswith("border first") for choice in over.plan.choices.values()), name
        assert over.counters.bytes_out == over.plan.bytes_once + 3 * over.plan.bytes_per_step, name


class Plain(nn.Module):
    """Row-wise functions after every layer, of which some rows are known before the halo is here."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = GCNConv(12, 16), SAGEConv(16, 16), GINConv(nn.Linear(16, 16))
        self.head, self.unread = nn.Linear(16, 4), SAGEConv(16, 16)

    def forward(self, x: Any, edge_index: Any) -> Any:
        x = self.first(x, edge_index).relu()
        x = x + functional.layer_norm(self.again(x, edge_index), (16,)).tanh()
        self.unread(x, edge_index)
        return self.head(functional.dropout(self.last(x, edge_index), 0.0, self.training).relu_())


def halves(rank: int, size: int, folder: Path) -> None:
    """Rows without remote neighbours go on before the halo is here: the same losses, bytes of the plan."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "gcn": lambda: GCN(12, 16, 3, 4), "sage": lambda: GraphSAGE(12, 16, 3, 4),
        "gin": lambda: GIN(12, 16, 3, 4), "plain": Plain,
    }  # fmt: skip
    for name, make in makers.items():
        data, found = graph(seed=1), []
        for _ in range(2):
            losses, over = sharded(make, data, SINGLE_STEPS, network="1mbit", split="nodes, overlapped")
            found.append(losses)
            assert any(choice.halves for choice in over.plan.choices.values()), name
            planned = over.plan.bytes_once + SINGLE_STEPS * over.plan.bytes_per_step
            # gradients of what nobody reads are not sent
            assert over.counters.bytes_out == planned or name == "plain", name
        assert found[0] == found[1], name  # to the bit
        close(found[0], alone(make, data, SINGLE_STEPS))
        with torch.no_grad():
            rows = over.gather(_called(over.eval(), over.data))
            np.testing.assert_allclose(rows, over.module(data.x, data.edge_index), atol=1e-3)
    assert "go on before the halo is here" in str(over.plan)


def losses_by_halves(rank: int, size: int, folder: Path) -> None:
    """A loss of some rows now and of the others later is that of all; a rank may have no such rows."""
    data = graph(seed=2)
    data.few, data.scores = (
        torch.arange(240) == 7,
        torch.randn(240, 4, generator=torch.Generator().manual_seed(3)),
    )
    model = GIN(12, 16, 2, 4)
    other = copy.deepcopy(model)  # gradients of what is sharded are summed over ranks, whoever calls it
    over = plait.shard(model, data, network="1mbit", split="nodes, overlapped")
    other.load_state_dict(model.state_dict())
    for mask in (None, "train_mask", "few"):
        for function, target in (
            (functional.cross_entropy, "y"), (functional.mse_loss, "scores"), (nn.CrossEntropyLoss(), "y")
        ):  # fmt: skip
            found = []
            for call, given in ((over, over.data), (other, data)):
                call.zero_grad()
                out, wanted = call(given.x, given.edge_index), given[target]
                chosen = None if mask is None else given[mask]
                if call is over:
                    loss = over.loss(function, out, wanted, chosen)
                else:
                    loss = function(*(v if chosen is None else v[chosen] for v in (out, wanted)))
                loss.backward()
                total = over.total(loss) if call is over else loss.detach()
                found.append([total, *(p.grad.clone() for p in call.parameters())])
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def drawn_at_random(rank: int, size: int, folder: Path) -> None:
    """Whatever stands between layers, in halves or not: what one process finds."""
    assert drawn.compare(graph(dtype=np.float64), drawn.SEEDS) >= 3


def odd(rank: int, size: int, folder: Path) -> None:
    """A hub, a rank without edges, a rank without nodes or training nodes, no edges at all."""
    hub = graph(40, 60)
    hub.edge_index[1, 10:] = 0
    last = np.arange(40) % size
    none = graph(40, 60)
    none.edge_index, none.edge_weight = none.edge_index[:, :0], none.edge_weight[:0]
    crowded = np.minimum(np.arange(40) % size, size - 2)
    few = graph(40, 60)
    few.train_mask = torch.arange(40) == 1
    isolated = np.where(np.arange(40) >= 34, size - 1, np.arange(40) % (size - 1))
    for data, parts in (
        (hub, last), (none, last), (graph(40, 60), crowded), (few, last), (graph(40, 60), isolated)
    ):  # fmt: skip
        for name in ("gcn", "gat"):
            close(sharded(MODELS[name], data, 2, parts=parts)[0], alone(MODELS[name], data, 2))


def accumulated(rank: int, size: int, folder: Path) -> None:
    """Two backward passes add up; parameters that nothing used stay without a gradient."""
    data = graph()
    torch.manual_seed(5)
    model = GCN(12, 8, 2, 4)
    model.unused = nn.Linear(2, 2)
    over = plait.shard(model, data)
    grads = []
    for passes in (1, 2):
        model.zero_grad()
        for _ in range(passes):
            over.loss(functional.cross_entropy, _called(over, over.data), over.data.y).backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(2 * one, two)
    assert model.unused.weight.grad is None
    functional.cross_entropy(
        model(data.x, data.edge_index), data.y
    ).backward()  # the model alone is not synchronised
    by_hand = plait.shard(model, data, sync_gradients=False)
    model.zero_grad()
    by_hand.loss(functional.cross_entropy, _called(by_hand, by_hand.data), by_hand.data.y).backward()


def folder_of_parts(rank: int, size: int, folder: Path) -> None:
    """The parts of a folder give the losses of the graph they were made from."""
    losses, over = sharded(MODELS["sage"], None, 3, parts=folder / "parts")  # type: ignore[arg-type]
    close(losses, np.load(folder / "sage.npy").tolist()[:3])
    assert over.data.x.shape[0] == over.data.num_nodes


def own_part(rank: int, size: int, folder: Path) -> None:
    """The whole graph is made only for layers that count outgoing edges, and for columns of all rows."""
    data, asked = graph(), []

    def spied(make: Callable[[], nn.Module], **options: Any) -> int:
        torch.manual_seed(5)
        model = make()
        over = plait.shard(model, data, **options)
        share = over._runs.share
        made = share.whole
        over._runs.share = replace(share, whole=lambda: (asked.append(1), made())[1])
        out = over(over.data.x, over.data.edge_index)
        expected = model(data.x, data.edge_index)[over.data.n_id]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        found, asked[:] = len(asked), []
        return found

    near = np.minimum(np.arange(240) // (240 // size), size - 1)  # few edges are cut: no columns to gain
    for name in ("gcn", "sage", "gin"):
        assert spied(lambda name=name: MODELS[name]().eval(), parts=near) == 0, name
    assert spied(lambda: MODELS["gcn"]().eval(), split="features") > 0
    assert spied(lambda: ChebConv(12, 4, 3)) > 0


# rounding grows with the ranks, everything else that can go wrong between four of them does between two
def second(rank: int, size: int, folder: Path) -> None:
    """Derivatives of derivatives are refused where rows travel, on every rank."""
    for name in ("gcn", "sage", "gin"):
        over = plait.shard(MODELS[name](), graph())
        loss = over(over.data.x, over.data.edge_index).square().mean()
        with pytest.raises(InputError, match="first derivatives only"):
            torch.autograd.grad(loss, list(over.parameters()), create_graph=True)
        over.close()


EVERYTHING = {
    2: (
        parity,
        ways,
        border_first,
        halves,
        losses_by_halves,
        drawn_at_random,
        odd,
        accumulated,
        folder_of_parts,
        own_part,
        second,
    ),
    4: (parity, single_precision, halves),
}


def everything(rank: int, size: int, folder: Path) -> None:
    """All scenarios, in one process."""
    for scenario in EVERYTHING[size]:
        scenario(rank, size, folder)


# PyG writes code for a layer's class when it is first made, numba loads its types when it first compiles:
# here once for all ranks
_READY = [make() for make in MODELS.values()], plait.Graph.from_edge_index([0, 1], [1, 0], 2)


def _rank(scenario: Callable[..., None], rank: int, size: int, folder: Path, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    try:
        join(60, None)
        scenario(rank, size, folder)
    except BaseException:
        (folder / f"failed-{rank}.txt").write_text(traceback.format_exc())
        raise


def start(scenario: Callable[..., None], size: int, folder: Path) -> list[Any]:
    """The processes of all ranks, started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [f"tests.distributed.{name}" for name in ("faults", "ranks", "topologies")]
    )
    ranks = [
        context.Process(target=_rank, args=(scenario, rank, size, folder, port), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks


def until_told(work: Callable[[], Any], folder: Path, name: str) -> None:
    """Works until a call fails; writes down how long that call took and what it said.

    A rank that was stopped or killed may still answer a call or two that were on their way.
    """
    while True:
        begin = time.perf_counter()
        try:
            work()
        except ExchangeError as error:
            (folder / f"told-{name}.txt").write_text(f"{time.perf_counter() - begin:.1f} {error}")
            return


def run(scenario: Callable[..., None], size: int, folder: Path, seconds: float = 180) -> None:
    """Runs all ranks to their end; what a rank said where one failed."""
    ranks = start(scenario, size, folder)
    for process in ranks:
        process.join(seconds)
    alive = [process.is_alive() for process in ranks]
    for process in ranks:
        process.kill()
    said = "\n".join(path.read_text() for path in sorted(folder.glob("failed-*.txt")))
    assert not any(alive), f"ranks {alive} still run after {seconds} s\n{said}"
    assert all(process.exitcode == 0 for process in ranks), said
