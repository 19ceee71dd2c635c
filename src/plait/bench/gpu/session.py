"""Everything worth measuring on a GPU in limited time: one command, resumed where it stopped.

python -m plait.bench.gpu.session --output FOLDER --seconds 570      as much as fits, the most wanted first
python -m plait.bench.gpu.session --output FOLDER --dry-run          what would run; checks every argument

Each unit is a process of its own with a limit: torch.compile follows PyG's layers only where plait was not in
use, and a unit that hangs costs its own limit. What is finished is in FOLDER/session.jsonl; a second call
goes on from there, on another machine too if the folder, of up to eight files, comes along. Suites of cells
are resumed cell by cell, and a cell that takes longer than its limit is recorded as missing and left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.bench import layers, plans, predict
from plait.bench.cases import ATTENTION, LayerCase, find_graph, layer_cases, parse_widths
from plait.bench.gpu.graphs import GRAPHS
from plait.errors import InputError
from plait.kernels.compiled import cache_folder
from plait.measure.environment import environment
from plait.measure.record import Record, append

__all__ = ["UNITS", "Cells", "Unit", "main", "run_unit", "units_of"]

_LINEAR = ("gcn", "sage-mean", "sage-max", "gin")
_WIDTHS = ("64:64", "256:32", "32:256", "128:128")
_PRICED_GRAPHS = ("pubmed", "rmat-arxiv", "cliques", "grid-road", "ego_twitter")
# torch.compile takes longest where there is most to gather: the largest graph last
_BY_SIZE = ("pubmed", "ego_twitter", "rmat-arxiv", "web_cnr2000", "grid-road", "cliques", "rmat-reddit")
_LEAST_SECONDS = 8.0  # a unit is not begun with less
_LOOK_SECONDS = 0.25
_TAIL = 1500


@dataclass(frozen=True)
class Cells:
    """A suite's grid, resumed from the file it appends to."""

    kind: str
    grid: tuple[LayerCase, ...]
    file: str
    peers: tuple[str, ...] = ()
    seconds: float = 0.0  # without a new record after which the next cell is given up; 0: never

    def left(self, folder: Path) -> list[LayerCase]:
        """The cells that are not in the file yet, in the order they are measured."""
        suite: Any = {"layers": layers, "predict": predict, "plans": plans}[self.kind]
        found: list[LayerCase] = suite.left(
            self.grid, suite.Options(output=folder / self.file, resume=True, environment={})
        )
        return found


@dataclass(frozen=True)
class Unit:
    """A process that measures something in at most this many seconds."""

    name: str
    seconds: float
    command: tuple[str, ...]  # after `python -m`
    cells: Cells | None = None

    def line(self, folder: Path) -> list[str]:
        """The command; of cells with the file they are resumed from."""
        more = () if self.cells is None else ("--output", str(folder / self.cells.file), "--resume")
        made = [part.replace("FOLDER", str(folder)) for part in self.command]
        return [sys.executable, "-m", *made, *more]


def _suite(
    name: str, graphs: Sequence[str], seconds: float, kind: str, names: Sequence[str], widths: Sequence[str],
    budget: str, *more: str, peers: Sequence[str] = (), cell_seconds: float = 0.0,
) -> Unit:  # fmt: skip
    """Training steps of layers by `plait bench`; the records of a name's first word share a file."""
    grid = tuple(layer_cases(graphs, names, [parse_widths(w) for w in widths], ["training"]))
    file = f"{name.split()[0]}.jsonl"
    command = (
        "plait", "bench", "plans" if kind == "plans" else "layers", "--device", "cuda", "--graphs", *graphs,
        "--modes", "training", "--layers", *names, "--widths", *widths, "--budget", budget, *more,
        *(("--peers", *peers) if peers else ()),
    )  # fmt: skip
    return Unit(name, seconds, command, Cells(kind, grid, file, tuple(peers), cell_seconds))


def _own(name: str, seconds: float, *arguments: str) -> Unit:
    """A part of python -m plait.bench.gpu."""
    return Unit(name, seconds, ("plait.bench.gpu", "--records", "FOLDER/gpu.jsonl", "--only", *arguments))


def _all_units() -> Iterator[Unit]:
    """The most wanted first; few, because each process takes seconds to start."""
    yield _own("building", 25, "building")
    yield _own("epoch", 60, "epoch")
    yield _own("steps", 80, "steps")
    yield Unit("calibrate", 100, ("plait", "calibrate", "--device", "cuda"))
    priced = ((*_LINEAR, "gat", "gatv2"), ("64:64", "256:32"), "0.3")
    yield _suite("prices", _PRICED_GRAPHS, 230, "predict", *priced, "--predict")
    yield _suite("regret", _PRICED_GRAPHS, 170, "plans", *priced)
    yield from _tables("compiled", (120, 330), "0.2", ("pyg-compile",), 25)
    yield _own("products", 80, "products")
    yield _own("attention", 120, "attention")
    peers = ("plait", "pyg-default", "pyg", "pyg-csr", "pyg-edgeindex")
    yield from _tables("layers", (120, 330), "0.1", peers, 30, "--warmup", "6")
    yield _own("families", 120, "families", "--graphs", "rmat-arxiv", "grid-road")


def _tables(
    name: str, seconds: tuple[int, int], budget: str, peers: tuple[str, ...], cell_seconds: float, *more: str
) -> Iterator[Unit]:
    """All cells of the attention table and of that of linear layers."""
    for word, limit, grid in (
        (" attention", seconds[0], (ATTENTION, ("64:128",))),
        ("", seconds[1], (_LINEAR, _WIDTHS)),
    ):
        yield _suite(
            name + word, _BY_SIZE, limit, "layers", *grid, budget, *more, peers=peers,
            cell_seconds=cell_seconds,
        )  # fmt: skip


UNITS = tuple(_all_units())


def units_of(wanted: Sequence[str] | None, folder: Path) -> list[Unit]:
    """The units that are not finished, by importance; wanted: the first words of their names."""
    firsts = [unit.name.split()[0] for unit in UNITS]
    for word in wanted or ():
        if word not in firsts:
            raise InputError(f"--only: {word} is no unit; there are {', '.join(dict.fromkeys(firsts))}")
    done = {line["unit"] for line in _log(folder) if line["rc"] == 0}
    chosen = [u for u, first in zip(UNITS, firsts, strict=True) if not wanted or first in wanted]
    return [u for u in chosen if u.name not in done and (u.cells is None or u.cells.left(folder))]


def _log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "session.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_unit(unit: Unit, folder: Path, seconds: float) -> int:
    """The exit status of a unit's process; 124 where it was stopped after `seconds`.

    Where a cell takes too long, it is recorded as missing and the unit begun again behind it.
    """
    end = time.monotonic() + seconds
    while True:
        rc, is_stuck = _run_once(unit, folder, end)
        if not is_stuck or unit.cells is None:
            return rc
        append(folder / unit.cells.file, _given_up(unit.cells, unit.cells.left(folder)[0]))
        if not unit.cells.left(folder):
            return 0
        if end - time.monotonic() < _LEAST_SECONDS:
            return rc


def _run_once(unit: Unit, folder: Path, end: float) -> tuple[int, bool]:
    """(exit status, whether a cell took too long)."""
    variables = os.environ | {"PYTHONUNBUFFERED": "1"}
    records = None if unit.cells is None else folder / unit.cells.file
    patience = unit.cells.seconds if unit.cells is not None else 0.0
    size, since = _size(records), time.monotonic()
    with (folder / "unit.log").open("w") as log:
        process = subprocess.Popen(
            unit.line(folder), stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(_LOOK_SECONDS)
                now = time.monotonic()
                if _size(records) != size:
                    size, since = _size(records), now
                is_stuck = bool(patience) and now - since > patience
                if is_stuck or now > end:
                    return 124, is_stuck
        finally:
            _stop(process)
    return process.returncode, False


def _copy_profiles(source: Path, target: Path) -> None:
    """Calibrations of GPUs travel with the records: a later call prices by the same one."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("machine-*.json"):
        shutil.copy(path, target)


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def _stop(process: subprocess.Popen[Any]) -> None:
    """Ends the process and what it started, as torch.compile's workers."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _given_up(cells: Cells, case: LayerCase) -> Record:
    line = {"status": "missing", "reason": f"no answer within {cells.seconds:g} s"}
    result = {"peers": dict.fromkeys(cells.peers, line), "reference": None}
    return Record(layers.KIND, case.to_dict() | {"device": "cuda"}, result, environment())


def _dry_run(units: Sequence[Unit], folder: Path) -> None:
    """Prints the units with their limits and cells; InputError where a graph is not found."""
    for graph in ("cora", *(graph for graph in _BY_SIZE if graph not in GRAPHS)):
        find_graph(graph)
    total = 0.0
    for unit in units:
        total += unit.seconds
        cells = (
            "" if unit.cells is None else f"{len(unit.cells.left(folder))} of {len(unit.cells.grid)} cells"
        )
        print(f"{total:6.0f} s  {unit.name:32} {unit.seconds:4.0f} s  {cells}".rstrip())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is left, as far as the time goes."""
    parser = argparse.ArgumentParser(
        prog="python -m plait.bench.gpu.session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder for all records")
    parser.add_argument("--seconds", type=float, default=570.0, help="of this call (default 570)")
    parser.add_argument("--only", nargs="+", metavar="UNIT", help="first words of units (default all)")
    parser.add_argument("--dry-run", action="store_true", help="list what would run and check its arguments")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.seconds
    args.output.mkdir(parents=True, exist_ok=True)
    units = units_of(args.only, args.output)
    if args.dry_run:
        _dry_run(units, args.output)
        return 0
    _copy_profiles(args.output, cache_folder())
    for unit in units:
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            break
        begun = time.monotonic()
        rc = run_unit(unit, args.output, min(unit.seconds, left))
        tail = (args.output / "unit.log").read_text(errors="replace")[-_TAIL:]
        spent = round(time.monotonic() - begun, 1)
        with (args.output / "session.jsonl").open("a") as log:
            log.write(json.dumps({"unit": unit.name, "rc": rc, "seconds": spent, "tail": tail}) + "\n")
        _copy_profiles(cache_folder(), args.output)
        print(f"{unit.name}: rc {rc} after {spent} s", flush=True)
        if rc not in (0, 124):
            print(tail, flush=True)
    still = [unit.name for unit in units_of(args.only, args.output)]
    print(f"left: {', '.join(still) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
