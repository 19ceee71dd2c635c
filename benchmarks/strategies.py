"""Epochs of the strategies plait can run, measured over several processes beside what plait analyze says.

    python benchmarks/strategies.py --data FOLDER --graphs cora,ego_twitter --models gcn,sage --ranks 2

Processes talk over loopback, which is measured before every model; every process has one thread. A strategy's
epoch is the median of some, the slowest process's. Bytes are those handed to torch.distributed for other
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import plait
from plait.analysis.network import Network
from plait.distributed import NeighborLoader, init, partition
from plait.distributed.session import join
from plait.distributed.train import Trainer
from plait.distributed.wire import measure_network, measure_sharing
from plait.graph.partition import metis

MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "gcn": lambda a, h, c: GCN(a, h, 2, c),
    "sage": lambda a, h, c: GraphSAGE(a, h, 2, c),
    "gin": lambda a, h, c: GIN(a, h, 2, c),
    "gat": lambda a, h, c: GAT(a, h, 2, c, heads=2),
}
# what analyze calls it -> what the planner of plait.shard calls it
SPLITS = {
    "edge cut": "nodes",
    "feature partition": "features",
}
MINI_BATCH = "mini-batch, dependent"
BATCH, FANOUTS, CLASSES = 1024, (10, 10), 8


def load(folder: Path, name: str, width: int) -> Data:
    """A graph with random features and labels; a tenth of the nodes are trained on."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        indptr, indices = file["indptr"], file["indices"]
    nodes, rng = len(indptr) - 1, np.random.default_rng(0)
    source = np.repeat(np.arange(nodes), np.diff(indptr))
    mask = torch.from_numpy(rng.random(nodes) < 0.1)
    return Data(
        x=torch.from_numpy(rng.standard_normal((nodes, width)).astype(np.float32)),
        edge_index=torch.from_numpy(np.stack([source, indices.astype(np.int64)])),
        y=torch.from_numpy(rng.integers(0, CLASSES, nodes)),
        train_mask=mask,
    )


def timed(step: Callable[[], Any], count: int, barrier: Callable[[], Any]) -> float:
    """The median over `count` runs after two that are not counted."""
    took = []
    for _ in range(count + 2):
        barrier()
        begin = time.perf_counter()
        step()
        took.append(time.perf_counter() - begin)
    return statistics.median(took[2:])


def training(
    model: nn.Module, called: Callable[[], Any], loss_of: Callable[[Any], Any]
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(called()).backward()
        optimizer.step()

    return step


def full_graph(
    make: Callable[[], nn.Module], data: Data, split: str, network: Network, part: Any, count: int
) -> Any:
    """One epoch of a full graph over ranks, every layer split so where it can be."""
    over = plait.shard(make(), data, part, network=network, split=split)
    share = over.data
    step = training(
        over.module, lambda: over(share.x, share.edge_index),
        lambda out: over.loss(functional.cross_entropy, out, share.y),
    )  # fmt: skip
    seconds = timed(step, count, dist.barrier)
    before, reduced = over.counters.bytes_out, over.counters.reduced_bytes
    step()
    sent = over.counters.bytes_out - before
    weights = over.counters.reduced_bytes - reduced
    said = sum(c.seconds[c.travels] for c in over.plan.choices.values())
    return {"seconds": seconds, "bytes": sent, "reduced": weights, "shard_plan_seconds": said}


def alone(make: Callable[[], nn.Module], data: Data, count: int) -> dict[str, float]:
    """One epoch of one process, while the others wait."""
    model = plait.compile(make(), data)
    step = training(
        model, lambda: model(data.x, data.edge_index), lambda out: functional.cross_entropy(out, data.y)
    )
    return {"seconds": timed(step, count, lambda: None), "bytes": 0, "reduced": 0}


def mini_batches(make: Callable[[], nn.Module], folder: Path, epochs: int) -> dict[str, float]:
    """An epoch of sampled batches, features partitioned, nothing cached and nothing fetched ahead twice."""
    with init(folder) as session:
        loader = NeighborLoader(
            session, list(FANOUTS), "train", BATCH, shuffle=True, seed=0, prefetch=0, coalesce=1
        )
        trainer = Trainer(session, make(), loader)
        reports = [trainer.epoch() for _ in range(epochs + 3)][3:]
        weights = 4 * sum(p.numel() for p in trainer.model.parameters()) * len(loader)
        return {
            "seconds": statistics.median(r.seconds for r in reports),
            "bytes": statistics.mean(r.bytes_out for r in reports),
            "reduced": weights,
            "parts": {
                name: statistics.median(getattr(r, name) for r in reports)
                for name in ("steps", "sampling", "look_up", "exchange", "stall", "compute", "all_reduce")
            },
        }


def between_ranks(times: int = 4) -> Network:
    """The network as it is now: on a machine that is shared, latencies double from one minute to the next."""
    found = [measure_network() for _ in range(times)]
    rate, latency = (
        statistics.mean(getattr(one, name) for one in found) for name in ("bytes_per_s", "latency")
    )
    return Network("measured", rate, latency)


def work(rank: int, ranks: int, port: int, asked: dict[str, Any], folder: str) -> None:
    """One process: everything asked, in the same order on all of them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    join(300.0, "lo")
    sharing, found = measure_sharing(), []
    for graph in asked["graphs"]:
        data = load(Path(asked["data"]), graph, asked["width"])
        part = metis(plait.Graph.from_edge_index(*data.edge_index.numpy(), num_nodes=data.num_nodes), ranks)
        parts = Path(folder) / graph
        if rank == 0:
            partition(data, ranks, parts, assignment=part)
        dist.barrier()
        for name in asked["models"]:
            make = lambda name=name: MODELS[name](asked["width"], asked["hidden"], CLASSES)  # noqa: E731
            runs: dict[str, Any] = {}
            network = between_ranks()
            for strategy, split in SPLITS.items():
                if name != "gat" or split == "nodes":
                    runs[strategy] = full_graph(make, data, split, network, part, asked["count"])
            runs["all at once"] = alone(make, data, asked["count"])  # one worker each: what sharing costs
            dist.barrier()
            if rank == 0:
                runs["one worker"] = alone(make, data, asked["count"])
            dist.barrier()
            runs[MINI_BATCH] = mini_batches(make, parts, 8)
            linked = [network.bytes_per_s, network.latency]
            found.append({"graph": graph, "model": name, "network": linked, "runs": runs})
    said = {
        "rank": rank,
        "sharing": sharing,
        "found": found,
    }
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def predicted(
    graph: str, name: str, asked: dict[str, Any], network: Network, sharing: float
) -> dict[str, Any]:
    """What analyze says of the same model, graph, partition and network."""
    torch.set_num_threads(1)
    data = load(Path(asked["data"]), graph, asked["width"])
    model = MODELS[name](asked["width"], asked["hidden"], CLASSES)
    part = metis(
        plait.Graph.from_edge_index(*data.edge_index.numpy(), num_nodes=data.num_nodes), asked["ranks"]
    )
    found = plait.analyze(
        model,
        data,
        asked["ranks"],
        network,
        partition=part,
        batch_size=BATCH,
        fanouts=FANOUTS,
        sharing=sharing,
    )
    return found.to_dict()["strategies"]


def line(row: dict[str, Any]) -> str:
    """One strategy in words; what analyze has no prediction of its own for has none."""
    said, sent, planned = row["predicted_seconds"], row["predicted_bytes"], row["shard_plan_seconds"]
    text = f"{row['graph']:12s} {row['model']:5s} {row['strategy']:22s} {row['seconds'] * 1e3:9.2f} ms"
    if said:
        text += f", predicted {said * 1e3:9.2f} ({said / row['seconds']:.2f})"
    if planned:
        text += f", layers by the shard's plan {planned * 1e3:8.2f}"
    text += f"; {row['bytes'] / 1e6:8.3f} MB"
    if sent and row["bytes"]:
        text += f", predicted {sent / 1e6:8.3f} ({sent / row['bytes']:.4f})"
    parts = row["parts"] or {}
    return text + "".join(f" {name} {value:.4f}" for name, value in parts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of graphs as npz files")
    parser.add_argument("--graphs", default="cora,pubmed,ego_twitter")
    parser.add_argument("--models", default="gcn,sage")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--count", type=int, default=7, help="epochs timed")
    parser.add_argument("--output", type=Path, help="a JSON record")
    args = parser.parse_args()
    asked = {**vars(args), "graphs": args.graphs.split(","), "models": args.models.split(","), "output": None}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (args.ranks, port, asked, folder), nprocs=args.ranks)
        said = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(args.ranks)]
    print(f"computing all at once: {said[0]['sharing']:.2f} times slower than one alone")
    rows = []
    for number, entry in enumerate(said[0]["found"]):
        network = Network("loopback", *entry["network"])
        said_of = f"{network.bytes_per_s / 1e9:.2f} GB/s, {network.latency * 1e6:.0f} us"
        print(f"{entry['graph']} {entry['model']}: {said_of}")
        told = predicted(entry["graph"], entry["model"], asked, network, said[0]["sharing"])
        for strategy, run in entry["runs"].items():
            ranks = [one["found"][number]["runs"].get(strategy, run) for one in said]
            seconds = max(one["seconds"] for one in ranks)
            sent = sum(one["bytes"] for one in ranks) if strategy != "one worker" else 0
            sent += 2 * (args.ranks - 1) * run["reduced"]
            base = told.get(strategy)
            rows.append({
                "graph": entry["graph"], "model": entry["model"], "strategy": strategy, "seconds": seconds,
                "predicted_seconds": base and base["seconds_per_epoch"], "bytes": sent,
                "predicted_bytes": base and base["bytes_per_epoch"],
                "shard_plan_seconds": run.get("shard_plan_seconds"), "parts": run.get("parts"),
                "network": entry["network"],
            })  # fmt: skip
    print("ratios are predicted over measured")
    for row in rows:
        print(line(row))
    if args.output:
        asked = {key: value for key, value in asked.items() if key not in ("data", "output")}
        record = {"sharing": said[0]["sharing"], "asked": asked, "rows": rows}
        args.output.write_text(json.dumps(record, default=str, indent=1))


if __name__ == "__main__":
    sys.exit(main())
