"""Settings to records: starts one rank per host, waits within bounds, collects what they wrote."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.hosts.graphs import NAME, described
from benchmarks.hosts.network import INTERFACE, Hosts, HostsError
from benchmarks.hosts.systems import SYSTEMS, Setting

__all__ = ["environment", "run_all", "run_one", "still_lacking"]

_ROOT = Path(__file__).parents[2]
_DGL_PORT, _STORE_PORT = 30050, 29555


def still_lacking(
    settings: Sequence[Setting], lines: Sequence[dict[str, Any]], repeats: int
) -> list[Setting]:
    """The settings that a record lacks, each as often as it lacks it, all once before any twice.

    Every repeat has a seed of its own.
    """
    have = Counter(Setting.from_dict(line["setting"]).key for line in lines)
    return [
        replace(setting, seed=setting.seed + turn)
        for turn in range(repeats)
        for setting in settings
        if have[setting.key] <= turn
    ]


def run_all(
    settings: Sequence[Setting], work: Path, record: Path, repeats: int, seconds: float, each: float
) -> list[Setting]:
    """Runs what the record lacks while time is left, adds to it; the settings left out."""
    end = time.monotonic() + seconds
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    lacking = still_lacking(settings, lines, repeats)
    lasted = 45.0  # what a run is expected to take before one was seen
    for done, setting in enumerate(lacking):
        if time.monotonic() + 1.2 * lasted > end:
            return lacking[done:]
        begin = time.monotonic()
        line = run_one(setting, work, min(each, end - begin))
        lasted = max(lasted if done else 0.0, time.monotonic() - begin)
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        times = [max(r["seconds"] for r in line["ranks"] if r["epoch"] == e) for e in range(setting.epochs)]
        told = f"{setting.graph} x{setting.hosts} {setting.rate} hidden {setting.hidden} {setting.system}"
        print(told, [round(t, 2) for t in times], file=sys.stderr, flush=True)
    return []


def run_one(setting: Setting, work: Path, limit: float) -> dict[str, Any]:
    """One run of a setting on hosts of its own: what every rank measured in every epoch."""
    folder = work / f"{setting.graph}-{setting.hosts}"
    if not (folder / "plait" / "manifest.json").exists():
        raise HostsError(f"{folder} holds no graph; run `prepare --graph {setting.graph}` first")
    begin = time.monotonic()
    with (
        Hosts(setting.hosts, setting.rate) as hosts,
        tempfile.TemporaryDirectory(dir=work) as scratch,
        (work / "last.log").open("wb") as log,
    ):
        commands = [_command(setting, hosts, host, folder, Path(scratch)) for host in range(setting.hosts)]
        running = [hosts.start(host, *command, log) for host, command in enumerate(commands)]
        while any(process.poll() is None for process in running):
            failed = [process.returncode for process in running if process.poll()]
            if failed or time.monotonic() - begin > limit:
                hosts.stop()
                what = f"a rank ended with {failed[0]}" if failed else f"not done after {limit:.0f} s"
                raise HostsError(f"{setting.system}: {what}; see {work / 'last.log'}")
            time.sleep(0.1)
        ranks = [
            json.loads(text)
            for path in sorted(Path(scratch).glob("rank-*.jsonl"))
            for text in path.read_text().splitlines()
        ]
    if len(ranks) != setting.hosts * setting.epochs:
        raise HostsError(f"{setting.system}: {len(ranks)} records of ranks came; see {work / 'last.log'}")
    return {
        "setting": setting.to_dict(),
        "ranks": ranks,
        "graph": described(folder),
        "environment": environment(),
        "run_seconds": round(time.monotonic() - begin, 1),
    }


def _command(
    setting: Setting, hosts: Hosts, host: int, folder: Path, scratch: Path
) -> tuple[list[str], dict[str, str]]:
    """What a host runs, and its environment."""
    output, text = scratch / f"rank-{host}.jsonl", json.dumps(setting.to_dict())
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": hosts.address(0),
        "MASTER_PORT": str(_STORE_PORT),
        "WORLD_SIZE": str(setting.hosts),
        "RANK": str(host),
        "LOCAL_RANK": "0",
    }
    program = SYSTEMS[setting.system].program
    start = [sys.executable, "-m", f"benchmarks.hosts.{program}_program", str(folder), text, str(output)]
    if program == "plait":
        return start, variables
    ips = scratch / "ips.txt"
    ips.write_text("".join(f"{hosts.address(h)} {_DGL_PORT}\n" for h in range(setting.hosts)))
    variables |= {
        "DGL_DIST_MODE": "distributed",
        "DGL_NUM_SAMPLER": "0",
        "DGL_NUM_CLIENT": str(setting.hosts),
        "DGL_NUM_SERVER": "1",
        "DGL_SERVER_ID": str(host),
        "DGL_GROUP_ID": "0",
        "DGL_GRAPH_FORMAT": "csc",
        "DGL_KEEP_ALIVE": "0",
        "DGL_CONF_PATH": f"{folder}/dgl/{NAME}.json",
        "DGL_IP_CONFIG": str(ips),
        "DGLBACKEND": "pytorch",
    }
    line = shlex.join([*start, str(ips)])
    both = f"DGL_ROLE=server {line} & DGL_ROLE=client {line}; code=$?; [ $code = 0 ] && wait; exit $code"
    return ["sh", "-c", both], variables


def environment() -> dict[str, Any]:
    """What the figures depend on besides the setting."""
    import numpy
    import torch
    import torch_geometric

    import plait

    versions = {"plait": plait, "torch": torch, "pyg": torch_geometric, "numpy": numpy}
    found: dict[str, Any] = {name: module.__version__ for name, module in versions.items()}
    try:
        import dgl

        found["dgl"] = dgl.__version__
    except ImportError:
        found["dgl"] = None
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    load = os.getloadavg()[0]
    return found | {"python": platform.python_version(), "cores": os.cpu_count(), "load": load, "at": now}
