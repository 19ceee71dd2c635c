"""Full graphs over hosts: what overlapping the exchange with computation gains, at which rate.

    python -m benchmarks.hosts.shards --folder /tmp/bed/ego_twitter-2/plait --rate 500mbit,1gbit,2gbit

Every host runs the same steps in three ways by turns: rows are waited for ("by nodes"), rows are sent while
whatever does not need them is computed ("overlapped"), and as planned. Of a step by nodes, what it waits for
rows is the exchange and the rest is computation; the rate at which both take as long is the balanced one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.hosts.network import INTERFACE, Hosts, HostsError
from torch import nn
from torch_geometric.nn import models

import plait
from plait.distributed.parts import Parts

WAYS = {"by_nodes": "nodes, at once", "overlapped": "nodes, overlapped", "planned": None}  # name -> split
_MODELS = {"gcn": models.GCN, "sage": models.GraphSAGE, "gin": models.GIN}
_ROOT = Path(__file__).parents[2]
_WARM = 3  # steps of each way that are not counted
_LIMIT = 150.0  # seconds of one run
_WIDTH = 64


def steps_of(way: str, name: str, folder: str, rate: str) -> Iterator[tuple[float, float]]:
    """Seconds of one training step after the other, and how long it waited for rows."""
    torch.manual_seed(0)
    model: nn.Module = _MODELS[name](Parts(folder).x(0).shape[1], _WIDTH, 3, _WIDTH)
    sharded = plait.shard(model, parts=folder, network=rate, split=WAYS[way])
    share = sharded.data
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    while True:
        sharded.total(torch.zeros(1))  # ranks begin together
        begin, waited = time.perf_counter(), sharded.counters.seconds
        optimizer.zero_grad()
        loss = sharded.loss(nn.functional.cross_entropy, sharded(share.x, share.edge_index), share.y)
        loss.backward()
        optimizer.step()
        yield time.perf_counter() - begin, sharded.counters.seconds - waited


def measure(folder: str, name: str, rate: str, count: int, output: str) -> None:
    """What one host measures: all ways, step by step in turn."""
    running = {way: steps_of(way, name, folder, rate) for way in WAYS}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(_WARM + count):
        for way, steps in running.items():
            found[way].append(next(steps))
    Path(output).write_text(json.dumps({way: taken[_WARM:] for way, taken in found.items()}))


def run(folder: Path, hosts: int, name: str, rate: str, count: int) -> dict[str, Any]:
    """One model at one rate: medians of the slowest host's steps, in milliseconds."""
    with Hosts(hosts, rate) as bed, tempfile.TemporaryDirectory() as scratch:
        log = (Path(scratch) / "log").open("wb")
        running = []
        for host in range(hosts):
            rest = [str(folder), name, rate, str(count), f"{scratch}/{host}.json"]
            variables = {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "MASTER_ADDR": bed.address(0),
                "MASTER_PORT": "29556",
                "WORLD_SIZE": str(hosts),
                "RANK": str(host),
                "LOCAL_RANK": "0",
            }
            running.append(bed.start(host, [sys.executable, "-m", __spec__.name, *rest], variables, log))
        end = time.monotonic() + _LIMIT
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > end:
                bed.stop()
                said = (Path(scratch) / "log").read_text()[-2000:]
                raise HostsError(f"{name} at {rate}: a host failed or took too long; it said\n{said}")
            time.sleep(0.1)
        told = [json.loads((Path(scratch) / f"{host}.json").read_text()) for host in range(hosts)]
    return {"model": name, "rate": rate, "hosts": hosts, "steps": count, **summary(told)}


def summary(told: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over steps, of each the slowest host's; the exchange is the mean host's wait by nodes."""

    def median(way: str) -> float:
        every = zip(*(host[way] for host in told), strict=True)
        return 1e3 * statistics.median(max(seconds for seconds, _ in step) for step in every)

    waits = [statistics.median(wait for _, wait in host["by_nodes"]) for host in told]
    taken = {way: median(way) for way in WAYS}
    exchanged = 1e3 * statistics.fmean(waits)
    return {
        **taken,
        "exchange": exchanged,
        "compute": taken["by_nodes"] - exchanged,
        "gain": taken["by_nodes"] / taken["overlapped"],
    }


def row_text(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    balance = row["exchange"] / row["compute"]
    numbers = [f"{row[name]:.1f}" for name in ("by_nodes", "exchange", "compute")]
    after = [f"{row['overlapped']:.1f}", f"{row['gain']:.2f}", f"{row['planned']:.1f}"]
    return " | ".join(["", row["model"], row["rate"], *numbers, f"{balance:.2f}", *after, ""]).strip()


def main() -> int:
    """Runs every model at every rate; what one host is told comes without options."""
    if "RANK" in os.environ:
        folder, name, rate, count, output = sys.argv[1:]
        measure(folder, name, rate, int(count), output)
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts.shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="the parts of plait partition")
    parser.add_argument("--rate", default="1gbit,2gbit", help="limits of every link (default 1gbit,2gbit)")
    parser.add_argument("--models", default="gcn,sage,gin", help="(default gcn,sage,gin)")
    parser.add_argument("--hosts", type=int, default=2, help="as many as parts (default 2)")
    parser.add_argument("--steps", type=int, default=15, help="timed in each way (default 15)")
    parser.add_argument("--record", type=Path, help="JSON lines, added to")
    args = parser.parse_args()
    heads = ["model", "rate", "by nodes", "exchange", "compute", "ratio", "overlapped", "gain", "planned"]
    print("", *heads, "", sep=" | ")
    print("|---" * len(heads) + "|")
    for name in args.models.split(","):
        for rate in args.rate.split(","):
            row = run(args.folder.resolve(), args.hosts, name, rate, args.steps)
            print(row_text(row), flush=True)
            if args.record:
                with args.record.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
