"""Predicted bytes against processes that really exchange rows: sharded models, and mini-batches over parts.

Rows are counted as they are handed to torch.distributed for other processes; the ring that adds up the
weights' gradients is taken by its law, of the bytes each process handed to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import plait
from plait.distributed import NeighborLoader, init, partition
from plait.distributed.peers import Peers
from plait.distributed.train import Trainer
from plait.graph.partition import metis
from plait.plan import exchange
from tests.distributed.shards import run
from tests.parity.test_real import GRAPHS, arrays, edges_of

WIDTH, HIDDEN, CLASSES, BATCH, FANOUTS, EPOCHS = 24, 16, 6, 64, (8, 5), 4
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCN(WIDTH, HIDDEN, 2, CLASSES),
    "sage": lambda: GraphSAGE(WIDTH, HIDDEN, 2, CLASSES),
    "gin": lambda: GIN(WIDTH, HIDDEN, 2, CLASSES, norm=None),
    "gat": lambda: GAT(WIDTH, HIDDEN, 2, CLASSES, heads=2),
}
SPLITS = {"edge cut": "by nodes", "feature partition": "by features"}


# Off by more than 2%, with the reason where it is known; docs/analysis.md says so.
KNOWN = {
    (4, "cora gin edge cut"): "0.77: gradients of the sharded layer travel wider than the analysis has them",
    (4, "tu_mutag sage mini-batch, dependent"): "1.03: few rows; how many requests share a round is a guess",
}


def problem(name: str) -> Data:
    """A real graph with random features and labels; a quarter of its nodes is trained on."""
    edges, nodes = edges_of(arrays(name))
    rng = np.random.default_rng(0)
    return Data(
        x=torch.from_numpy(rng.standard_normal((nodes, WIDTH)).astype(np.float32)),
        edge_index=edges,
        y=torch.from_numpy(rng.integers(0, CLASSES, nodes)),
        train_mask=torch.from_numpy(rng.random(nodes) < 0.25),
    )


def owners(data: Data, ranks: int) -> Any:
    graph = plait.Graph.from_edge_index(*data.edge_index.numpy(), num_nodes=data.num_nodes)
    return metis(graph, ranks)


def analysed(make: Callable[[], nn.Module], data: Data, part: Any) -> Any:
    ranks = int(part.max()) + 1
    return plait.analyze(make(), data, ranks, partition=part, batch_size=BATCH, fanouts=FANOUTS)


def full_graph(make: Callable[[], nn.Module], data: Data, part: Any, split: str) -> tuple[int, int, bool]:
    """Bytes this rank sends in a training step with every layer split so, and those added up over ranks.

    Layers send before or after the weights as the analysis has it, where ranks have such a plan (the third
    of what is returned); left alone they may find it cheaper to send the wider rows.
    """
    whole, agree = exchange._spread, Peers.agree
    loads = iter([*analysed(make, data, part).work.loads, *[None] * 9])

    def only(survivors: Any, is_alone: bool) -> Any:
        every = whole(survivors, is_alone)
        return [s for s in every if s.candidate.form.endswith(f", {split}")] or every

    is_as_analysed = True

    def as_analysed(peers: Peers, prices: Any) -> Any:
        nonlocal is_as_analysed
        load = next(loads)
        ahead = [] if load is None else list(map(str, load.ahead[:1]))
        asked = {
            key: price for key, price in prices.items() if re.findall(r"fwd \w+ x (\d+)", key)[:1] == ahead
        }
        is_as_analysed &= bool(asked)
        return agree(peers, asked or prices)

    exchange._spread, Peers.agree = only, as_analysed  # type: ignore[method-assign]
    try:
        over = plait.shard(make(), data, part)
        for _ in range(2):  # what is sent once goes with the first
            sent, added = over.counters.bytes_out, over.counters.reduced_bytes
            out = over(over.data.x, over.data.edge_index)
            loss = over.loss(functional.cross_entropy, out, over.data.y)
            loss.backward()
    finally:
        exchange._spread, Peers.agree = whole, agree  # type: ignore[method-assign]
    return over.counters.bytes_out - sent, over.counters.reduced_bytes - added, is_as_analysed


def mini_batches(make: Callable[[], nn.Module], folder: Path) -> tuple[float, float]:
    """The same of a mean epoch of mini-batches; nothing is kept, nothing asked for ahead of its use."""
    with init(folder) as session:
        options: dict[str, Any] = {"shuffle": True, "seed": 0, "prefetch": 0, "coalesce": 1}
        loader = NeighborLoader(session, list(FANOUTS), "train", BATCH, **options)
        trainer = Trainer(session, make(), loader, compiled=False)
        sent = [trainer.epoch().bytes_out for _ in range(EPOCHS)]
        weights = 4 * sum(p.numel() for p in trainer.model.parameters()) * len(loader)
        return float(np.mean(sent)), float(weights)


def every_model(rank: int, size: int, folder: Path) -> None:
    """All models on all graphs; what this rank sent is left in a file."""
    found: dict[str, Any] = {}
    for graph in GRAPHS:
        data = problem(graph)
        part = owners(data, size)
        for name, make in MODELS.items():
            for strategy, split in SPLITS.items():
                if name != "gat" or strategy == "edge cut":
                    found[f"{graph} {name} {strategy}"] = full_graph(make, data, part, split)
        found[f"{graph} sage mini-batch, dependent"] = mini_batches(MODELS["sage"], folder / graph)
    (folder / f"sent-{rank}.json").write_text(json.dumps(found))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_send_the_bytes_that_were_predicted(ranks: int, tmp_path: Path) -> None:
    for graph in GRAPHS:
        data = problem(graph)
        partition(data, ranks, tmp_path / graph, assignment=owners(data, ranks))
    run(every_model, ranks, tmp_path, 400)
    told = [json.loads((tmp_path / f"sent-{rank}.json").read_text()) for rank in range(ranks)]
    wrong, others = [], []
    for key in told[0]:
        graph, name, strategy = key.split(" ", 2)
        if strategy == "edge cut" and not all(one[key][2] for one in told):
            others.append(key)
            continue
        sent = sum(one[key][0] for one in told) + 2 * (ranks - 1) * told[0][key][1]
        data = problem(graph)
        found = analysed(MODELS[name], data, owners(data, ranks))
        predicted = found.to_dict()["strategies"][strategy]["bytes_per_epoch"]
        if predicted != pytest.approx(sent, rel=0.02) and (ranks, key) not in KNOWN:
            wrong.append(f"{key}: sent {sent:.0f}, predicted {predicted:.0f} ({predicted / sent:.3f})")
    assert not wrong, "\n".join(wrong)
    assert len(others) <= 1, others
