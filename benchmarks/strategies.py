"""Epochs of the strategies plait can run, measured over several processes beside what plait analyze says.

    python benchmarks/strategies.py --data FOLDER --graphs cora,ego_twitter --models gcn,sage --ranks 2

Processes talk over loopback; every process has one thread, and an equal share of the cores. The strategies
of a model take turns in several rounds, so that a slow minute of a shared machine falls on all of them. A
turn is some epochs in a row, as training runs them, with no barrier in between: its seconds are those of the
slowest process divided by the epochs. Bytes are those handed to torch.distributed for other processes.

Before any epoch counts, mini-batches train until layers have settled on how they run (runtime/aside.py), and
between their epochs the network is measured, and sharing: seven measurements in a row once found meetings
that cost more than twice what the epochs after them lost. The medians are written to a file, the one record
of the network by which ranks plan and plait analyze predicts.

Two strategies are tied where the ranges of their measured seconds, from the 20th to the 80th percentile of
their turns, overlap, or where their predictions are as close as those that plait analyze prints as a tie. A
ranking is right where every pair that is not tied is predicted in its measured order.

Prices are those of the profile in use, which is printed and recorded. With --calibrate the machine is
measured first, into a temporary cache folder: the user's own profile is neither used nor replaced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from plait.analysis.advice import TIE
from plait.analysis.network import Network, network_of
from plait.distributed import NeighborLoader, init, partition
from plait.distributed.session import join
from plait.distributed.train import Trainer
from plait.distributed.wire import measure_network, measure_sharing
from plait.graph.partition import metis
from plait.kernels.compiled import cache_folder, kernel_folder
from plait.loader.prefetch import usable_cores
from plait.pyg.probe import forget_machine, machine_in_use
from plait.runtime.aside import SETTLED_AFTER

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
PARTS = (
    "compute_seconds", "prepare_seconds", "answer_seconds", "lost_seconds", "bytes_per_worker",
    "messages_per_worker", "meetings",
)  # fmt: skip
BATCH, FANOUTS, CLASSES = 1024, (10, 10), 8
MEASURED = 7  # times: the network and sharing, before the rounds of a model


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


def timed(step: Callable[[], Any], count: int) -> float:
    """The mean of `count` runs after two that are not counted."""
    for _ in range(2):
        step()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) / count


def training(
    model: nn.Module, called: Callable[[], Any], loss_of: Callable[[Any], Any]
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(called()).backward()
        optimizer.step()

    return step


@dataclass
class Turns:
    """A strategy that takes its turn in every round: one turn's seconds, and what one epoch sends.

    `train` runs some epochs that do not count.
    """

    turn: Callable[[], float]
    sent: Callable[[], dict[str, Any]]
    train: Callable[[int], None] = lambda epochs: None
    seconds: list[float] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        return {**self.sent(), "turns": self.seconds}


def full_graph(
    make: Callable[[], nn.Module], data: Data, split: str, network: Path, part: Any, count: int
) -> Turns:
    """A full graph over ranks, every layer split so where it can be."""
    over = plait.shard(make(), data, part, network=network, split=split)
    share = over.data
    step = training(
        over.module, lambda: over(share.x, share.edge_index),
        lambda out: over.loss(functional.cross_entropy, out, share.y),
    )  # fmt: skip

    def sent() -> dict[str, Any]:
        before, reduced = over.counters.bytes_out, over.counters.reduced_bytes
        step()
        return {
            "bytes": over.counters.bytes_out - before,
            "reduced": over.counters.reduced_bytes - reduced,
            "shard_plan_seconds": sum(c.seconds[c.travels] for c in over.plan.choices.values()),
        }

    def turn() -> float:
        dist.barrier()
        return timed(step, count)

    return Turns(turn, sent)


def alone(make: Callable[[], nn.Module], data: Data, count: int, is_asked: bool = True) -> Turns:
    """One process; `is_asked`: this one, else it waits."""
    model = plait.compile(make(), data)
    step = training(
        model, lambda: model(data.x, data.edge_index), lambda out: functional.cross_entropy(out, data.y)
    )

    def turn() -> float:
        dist.barrier()
        seconds = timed(step, count) if is_asked else 0.0
        dist.barrier()
        return seconds

    return Turns(turn, lambda: {"bytes": 0, "reduced": 0})


@contextmanager
def mini_batches(make: Callable[[], nn.Module], folder: Path, epochs: int) -> Iterator[Turns]:
    """Sampled batches, features partitioned, nothing cached and nothing fetched ahead twice."""
    found: dict[str, Any] = {}
    with init(folder) as session:
        loader = NeighborLoader(
            session, list(FANOUTS), "train", BATCH, shuffle=True, seed=0, prefetch=0, coalesce=1
        )
        trainer = Trainer(session, make(), loader)
        reports: list[Any] = []

        def train(count: int) -> None:
            for _ in range(count):
                trainer.epoch()

        def turn() -> float:
            dist.barrier()
            reports.extend(trainer.epoch() for _ in range(epochs))
            found["bytes"] = statistics.mean(r.bytes_out for r in reports)
            found["reduced"] = 4 * sum(p.numel() for p in trainer.model.parameters()) * len(loader)
            found["parts"] = {
                name: statistics.median(getattr(r, name) for r in reports)
                for name in ("steps", "sampling", "look_up", "exchange", "stall", "compute", "all_reduce")
            }
            return statistics.mean(r.seconds for r in reports[-epochs:])

        yield Turns(turn, lambda: found, train)


def typical(found: list[Network]) -> Network:
    """Medians of several measurements, figure by figure."""
    figures = ((n.bytes_per_s, n.latency, n.meeting, n.busy) for n in found)
    return Network("measured", *map(statistics.median, zip(*figures, strict=True)))


def work(rank: int, ranks: int, port: int, asked: dict[str, Any], folder: str) -> None:
    """One process: everything asked, in the same order on all of them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    join(300.0, "lo")
    found = []
    for graph in asked["graphs"]:
        data = load(Path(asked["data"]), graph, asked["width"])
        part = metis(plait.Graph.from_edge_index(*data.edge_index.numpy(), num_nodes=data.num_nodes), ranks)
        parts = Path(folder) / graph
        if rank == 0:
            partition(data, ranks, parts, assignment=part)
        dist.barrier()
        for name in asked["models"]:
            make = lambda name=name: MODELS[name](asked["width"], asked["hidden"], CLASSES)  # noqa: E731
            count, record = asked["count"], Path(folder) / f"network-{graph}-{name}-{rank}.json"
            with mini_batches(make, parts, count) as batches:
                measured = []
                for _ in range(MEASURED):
                    # a batch of an epoch may be the only one of its size, which is settled on its own
                    batches.train(math.ceil(SETTLED_AFTER / MEASURED))
                    measured.append((measure_network(), measure_sharing()))
                network = typical([network for network, _ in measured])
                network.save(record)
                sharing = statistics.median(sharing for _, sharing in measured)
                runs = {
                    strategy: full_graph(make, data, split, record, part, count)
                    for strategy, split in SPLITS.items()
                    if name != "gat" or split == "nodes"
                }
                runs["all at once"] = alone(make, data, count)  # one worker each: what sharing costs
                runs["one worker"] = alone(make, data, count, rank == 0)
                runs[MINI_BATCH] = batches
                for _ in range(asked["rounds"]):
                    for run in runs.values():
                        run.seconds.append(run.turn())
                told = {strategy: run.told() for strategy, run in runs.items()}
            found.append({
                "graph": graph, "model": name, "network": asdict(network), "record": str(record),
                "sharing": sharing, "runs": told,
            })  # fmt: skip
    said = {
        "rank": rank,
        "found": found,
    }
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def predicted(graph: str, name: str, asked: dict[str, Any], network: Path, sharing: float) -> dict[str, Any]:
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
        cores=usable_cores() / asked["ranks"],
    )
    return found.to_dict()["strategies"]


@contextmanager
def calibrated() -> Iterator[None]:
    """A cache folder for a while, with the kernels compiled so far and a profile measured now."""
    kernels, before = kernel_folder(), os.environ.get("PLAIT_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        if kernels.is_dir():
            shutil.copytree(kernels, Path(folder) / kernels.relative_to(cache_folder()))
        os.environ["PLAIT_CACHE"] = folder  # the processes that are measured inherit it
        try:
            plait.calibrate()
            yield
        finally:
            os.environ.pop("PLAIT_CACHE")
            if before is not None:
                os.environ["PLAIT_CACHE"] = before
            forget_machine()


def profile() -> dict[str, Any]:
    """What plans and prices go by here, and how it was measured."""
    machine = machine_in_use()
    kept = ("by", "when", "cpu", "scaled_to", "ratios", "disturbed")
    measured = {key: machine.measured[key] for key in kept if key in machine.measured}
    return {"name": machine.name, "is_built_in": machine.is_default, **measured}


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


def band(turns: list[float]) -> tuple[float, float]:
    """The 20th and the 80th percentile."""
    low, high = np.quantile(turns, (0.2, 0.8)).tolist()
    return low, high


def are_tied(one: list[float], other: list[float]) -> bool:
    """Whether the ranges of two strategies' turns overlap."""
    (low, high), (lower, higher) = band(one), band(other)
    return low <= higher and lower <= high


def misplaced(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs that are not tied, and that prediction and measurement put in different orders."""
    found = []
    for one, other in itertools.combinations(rows, 2):
        seen, said = (other[key] - one[key] for key in ("seconds", "predicted_seconds"))
        is_close = abs(said) <= TIE * min(one["predicted_seconds"], other["predicted_seconds"])
        if seen * said < 0 and not is_close and not are_tied(one["turns"], other["turns"]):
            found.append((one["strategy"], other["strategy"]))
    return found


def ranking(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The orders of the strategies of one model, as predicted and as measured, and whether they agree."""
    known = [row for row in rows if row["predicted_seconds"]]
    said, seen = (
        [row["strategy"] for row in sorted(known, key=lambda row: row[key])]
        for key in ("predicted_seconds", "seconds")
    )
    return {
        "graph": rows[0]["graph"],
        "model": rows[0]["model"],
        "predicted": said,
        "measured": seen,
        "is_right": said == seen,
        "misplaced": misplaced(known),
    }


def in_words(found: dict[str, Any]) -> str:
    """A ranking in one line."""
    text = f"{found['graph']} {found['model']}: {' < '.join(found['predicted'])}: "
    if found["is_right"]:
        return text + "right"
    text += f"measured {' < '.join(found['measured'])}; "
    wrong = ", ".join(" and ".join(pair) for pair in found["misplaced"])
    return text + (f"wrong for {wrong}" if wrong else "right but for ties")


def summary(rows: list[dict[str, Any]], rankings: list[dict[str, Any]]) -> str:
    ratios = [row["predicted_seconds"] / row["seconds"] for row in rows if row["predicted_seconds"]]
    near = sum(0.7 <= ratio <= 1.3 for ratio in ratios)
    strict, tied = (sum(map(bool, said)) for said in (
        [found["is_right"] for found in rankings], [not found["misplaced"] for found in rankings]
    ))  # fmt: skip
    return (
        f"{near} of {len(ratios)} within 30% ({min(ratios):.2f} to {max(ratios):.2f}); of {len(rankings)} "
        f"rankings {strict} are right, {tied} with ties"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of graphs as npz files")
    parser.add_argument("--graphs", default="cora,pubmed,ego_twitter")
    parser.add_argument("--models", default="gcn,sage")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--count", type=int, default=7, help="epochs of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every strategy")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine first, in a minute")
    parser.add_argument("--output", type=Path, help="a JSON record")
    return parser.parse_args()


def rows_of(said: list[dict[str, Any]], number: int, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The strategies of one model on one graph, as all ranks measured them and as they are predicted."""
    entry, ranks = said[0]["found"][number], len(said)
    network = network_of(entry["record"])
    print(
        f"{entry['graph']} {entry['model']}: {network.bytes_per_s / 1e9:.2f} GB/s, "
        f"{network.latency * 1e6:.0f} us a message of which the processor works {network.busy * 1e6:.0f}, "
        f"{network.meeting * 1e6:.0f} us a meeting; computing all at once: {entry['sharing']:.2f} times "
        "slower than one alone"
    )
    told = predicted(entry["graph"], entry["model"], asked, Path(entry["record"]), entry["sharing"])
    for strategy, run in entry["runs"].items():
        every = [one["found"][number]["runs"].get(strategy, run) for one in said]
        turns = [max(turn) for turn in zip(*(one["turns"] for one in every), strict=True)]
        sent = sum(one["bytes"] for one in every) if strategy != "one worker" else 0
        sent += 2 * (ranks - 1) * run["reduced"]
        base = told.get(strategy)
        yield {
            "graph": entry["graph"], "model": entry["model"], "strategy": strategy,
            "seconds": statistics.median(turns), "turns": turns,
            "predicted_seconds": base and base["seconds_per_epoch"], "bytes": sent,
            "predicted_bytes": base and base["bytes_per_epoch"],
            "shard_plan_seconds": run.get("shard_plan_seconds"), "parts": run.get("parts"),
            "network": entry["network"], "sharing": entry["sharing"],
            "predicted_parts": base and {name: base[name] for name in PARTS},
        }  # fmt: skip


def main() -> None:
    args = arguments()
    if not args.calibrate:
        return measured(args)
    with calibrated():
        measured(args)


def measured(args: argparse.Namespace) -> None:
    """Everything asked: printed, and recorded where that was asked for."""
    used = profile()
    print(f"profile: {used['name']}", flush=True)
    asked = {**vars(args), "graphs": args.graphs.split(","), "models": args.models.split(","), "output": None}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (args.ranks, port, asked, folder), nprocs=args.ranks)
        said = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(args.ranks)]
        rows = [row for number in range(len(said[0]["found"])) for row in rows_of(said, number, asked)]
    print("ratios are predicted over measured")
    for row in rows:
        print(line(row))
    pairs = dict.fromkeys((row["graph"], row["model"]) for row in rows)
    rankings = [ranking([row for row in rows if (row["graph"], row["model"]) == pair]) for pair in pairs]
    for found in rankings:
        print(in_words(found))
    print(summary(rows, rankings))
    if args.output:
        asked = {key: value for key, value in asked.items() if key not in ("data", "output")}
        record = {"asked": asked, "profile": used, "rows": rows, "rankings": rankings}
        args.output.write_text(json.dumps(record, default=str, indent=1))


if __name__ == "__main__":
    sys.exit(main())
