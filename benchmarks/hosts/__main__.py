"""The test bed: `python -m benchmarks.hosts prepare | run | show | bound | clean`, as root."""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
from pathlib import Path

from benchmarks.hosts.network import HostsError, clean, requirements
from benchmarks.hosts.systems import SYSTEMS, Setting


def main() -> int:
    """Runs one command; 2 where the test bed cannot be made."""
    args = _arguments()
    # an ordinary exit, so that hosts are removed
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return int(args.command(args))
    except HostsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    commands = parser.add_subparsers(required=True)
    prepare = commands.add_parser("prepare", help="make a graph and divide it for every number of hosts")
    prepare.add_argument("--file", type=Path, help="the npz file of a graph that is not made here")
    prepare.add_argument("--alone", action="store_true", help="plait's parts only; works without DGL")
    prepare.set_defaults(command=_prepare)
    run = commands.add_parser("run", help="run what the record lacks")
    run.add_argument("--rate", default="1gbit", help="of every link, such as 1gbit,10gbit,unlimited")
    run.add_argument("--hidden", default="16", help="hidden widths, such as 16,128")
    run.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    run.add_argument("--epochs", type=int, default=4, help="of each run, the first of which is not counted")
    run.add_argument("--repeats", type=int, default=1, help="runs of each setting the record shall have")
    run.add_argument("--seconds", type=float, default=600, help="no run begins that may last longer")
    run.add_argument("--each", type=float, default=150, help="seconds after which one run is given up")
    run.add_argument("--record", type=Path, required=True, help="JSON lines, added to")
    run.set_defaults(command=_run)
    bound = commands.add_parser("bound", help="count the rows that optimal replacement would fetch")
    bound.add_argument("--epochs", type=int, default=6, help="drawn, the first of which is not counted")
    bound.add_argument("--shares", default="0.25,0.5", help="of the halo that the buffer holds")
    bound.add_argument("--ahead", default="0,2,4,6", help="batches before one whose rows are still there")
    bound.set_defaults(command=_bound)
    for command in (prepare, run, bound):
        command.add_argument("--graph", default="block", help="block, block-small, or the name of --file's")
        command.add_argument("--hosts", default="2", help="numbers of hosts, such as 2,4")
        command.add_argument("--work", type=Path, required=True, help="folder for graphs and logs")
    show = commands.add_parser("show", help="print a record as a table")
    show.add_argument("record", type=Path, nargs="+")
    show.add_argument("--curves", action="store_true", help="accuracies after every epoch instead of times")
    show.set_defaults(command=_show)
    commands.add_parser("clean", help="remove what killed beds left").set_defaults(command=_clean)
    return parser.parse_args()


def _prepare(args: argparse.Namespace) -> int:
    from benchmarks.hosts.graphs import divide, make

    loaded = make(args.graph, args.file)
    for hosts in map(int, args.hosts.split(",")):
        divide(loaded, hosts, args.work / f"{args.graph}-{hosts}", args.alone)
    return 0


def _run(args: argparse.Namespace) -> int:
    from benchmarks.hosts.runs import run_all

    requirements()
    unknown = set(args.systems.split(",")) - set(SYSTEMS)
    if unknown:
        raise HostsError(f"--systems: {', '.join(sorted(unknown))} unknown; choose of {', '.join(SYSTEMS)}")
    settings = [
        Setting(args.graph, hosts, rate, hidden, system, args.epochs)
        for hosts, rate, hidden in itertools.product(
            map(int, args.hosts.split(",")), args.rate.split(","), map(int, args.hidden.split(","))
        )
        for system in args.systems.split(",")
    ]
    left = run_all(settings, args.work, args.record, args.repeats, args.seconds, args.each)
    for setting in left:
        print(f"not run: {json.dumps(setting.to_dict())}", file=sys.stderr)
    return 1 if left else 0


def _bound(args: argparse.Namespace) -> int:
    from benchmarks.hosts.bound import bounds, requests_of, table

    for hosts in map(int, args.hosts.split(",")):
        setting = Setting(args.graph, hosts, "", 16, "plait-auto", args.epochs)
        batches, halo = requests_of(args.work, setting, 0)
        slots = [round(float(share) * halo) for share in args.shares.split(",")]
        aheads = list(map(int, args.ahead.split(",")))
        print(table(bounds(batches, slots, aheads, len(batches) // args.epochs), halo))
    return 0


def _show(args: argparse.Namespace) -> int:
    from benchmarks.hosts.table import curves, table

    lines = [json.loads(line) for path in args.record for line in path.read_text().splitlines()]
    print(curves(lines) if args.curves else table(lines))
    return 0


def _clean(_: argparse.Namespace) -> int:
    for name in clean():
        print(f"removed {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
