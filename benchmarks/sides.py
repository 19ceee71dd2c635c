"""Two checkouts of plait side by side: training steps of single layers, in processes that take turns.

    python benchmarks/sides.py --before ../before --graphs "pubmed ego_twitter" --layers gcn,tag

Each checkout runs in processes of its own; a sample of one is followed by a sample of the other, so that what
disturbs the machine disturbs both. Where a process happens to find its memory moves a step by some percent:
`--processes` pairs are started one after the other, and a cell is the median of all of them. speed is the
time before over the time after; above 1, the checkout this file lies in is faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LAYERS = "gcn,sage-max,gin,sgc,tag,gat,gatv2,transformer,rgcn,pna,edgeconv"
GRAPHS = "pubmed coauthor_cs ego_twitter"
ATTENTION = ("gat", "gatv2", "transformer")
HERE = Path(__file__).resolve()


class Side:
    """One checkout's process: open a cell, then take samples of its step."""

    def __init__(self, checkout: Path, options: argparse.Namespace) -> None:
        self._checkout = checkout
        words = [sys.executable, str(HERE), "--serve", "--threads", str(options.threads)]
        words += ["--data-dir", options.data_dir] if options.data_dir else []
        path = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
        if options.threads == 1:
            path["OMP_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            words, env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
        )

    def ask(self, **question: Any) -> Any:
        """The process's answer to one line."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self._checkout} ended; its own error is above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve(options: argparse.Namespace) -> None:
    """Answer lines on stdin: {"cell": [...]} opens a step, {"seconds": s} times it for so long."""
    import torch

    torch.set_num_threads(options.threads)
    step: Callable[[], None] = lambda: None  # noqa: E731
    for line in sys.stdin:
        question = json.loads(line)
        if "cell" in question:
            step, answer = open_step(options.data_dir, *question["cell"]), [0.0]
        else:
            answer = sample(step, question["seconds"], question["clock"])
        print(json.dumps(answer), flush=True)


def open_step(
    data_dir: str | None, layer: str, graph: str, width_in: int, width_out: int
) -> Callable[[], None]:
    """A training step of a compiled layer whose input wants a gradient, run a few times."""
    import plait
    from plait.bench.problem import Problem, training_step

    problem = Problem(
        layer, forms_of(data_dir, graph), width_in, width_out, heads=4 if layer in ATTENTION else 1
    )
    model = plait.compile(problem.layer)
    step = training_step(model, problem.x, problem.edge_index, *problem.extra, cotangent=problem.cotangent)
    for _ in range(5):
        step()
    return step


@functools.lru_cache(maxsize=1)
def forms_of(data_dir: str | None, graph: str) -> Any:
    """The graph by its name; the cells of one follow each other."""
    from plait.bench.cases import find_graph
    from plait.bench.problem import Forms

    return Forms.of(find_graph(graph, data_dir).graph)


def sample(step: Callable[[], None], seconds: float, clock: str) -> list[float]:
    """Seconds of each of some calls, after two that are not counted: the other side had the caches."""
    tick = time.process_time if clock == "processor" else time.perf_counter
    step()
    step()
    took, until = [], time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        start = tick()
        step()
        took.append(tick() - start)
    return took


def compare(
    before: Side, after: Side, cell: list[Any], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Medians of the samples of both sides, in turns, the first of a turn changing."""
    sides = {"before": before, "after": after}
    for side in sides.values():
        side.ask(cell=cell)
    medians: dict[str, list[float]] = {"before": [], "after": []}
    for turn in range(options.turns):
        for name in list(sides) if turn % 2 else list(reversed(sides)):
            took = sides[name].ask(seconds=options.seconds, clock=options.clock)
            medians[name].append(statistics.median(took))
    return medians


def cells(options: argparse.Namespace) -> Iterator[list[Any]]:
    """Layer, graph and widths of every cell asked for."""
    width_in, width_out = map(int, options.widths.split("->"))
    for graph in options.graphs.split():
        for layer in options.layers.split(","):
            yield [layer, graph, width_in, width_out]


def summary(
    cell: list[Any], pairs: list[dict[str, list[float]]], options: argparse.Namespace
) -> dict[str, Any]:
    """A record: the speed of each pair of processes, and of all of them together."""
    speeds = sorted(statistics.median(p["before"]) / statistics.median(p["after"]) for p in pairs)
    turns = sorted(b / a for p in pairs for b, a in zip(p["before"], p["after"], strict=True))
    fifth = len(turns) // 5
    return {
        "cell": ",".join(map(str, cell)),
        "threads": options.threads,
        "clock": options.clock,
        "speed": statistics.median(turns),
        "p20": turns[fifth],
        "p80": turns[-1 - fifth],
        "fastest": min(min(p["before"]) for p in pairs) / min(min(p["after"]) for p in pairs),
        "processes": speeds,
        "before_seconds": statistics.median(t for p in pairs for t in p["before"]),
        "after_seconds": statistics.median(t for p in pairs for t in p["after"]),
        "pairs": pairs,
    }


def line(record: dict[str, Any]) -> str:
    """A cell on one line."""
    each = " ".join(f"{speed:.3f}" for speed in record["processes"])
    spread = f"{record['p20']:.3f} to {record['p80']:.3f}; fastest {record['fastest']:.3f}; processes {each}"
    return f"{record['cell']:32} {record['speed']:.3f} ({spread}) {1e3 * record['after_seconds']:.3f} ms"


def main() -> None:
    """Compare, print a line per cell and append the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--layers", help="names, by commas", default=LAYERS)
    parser.add_argument("--graphs", help="names or generators, by spaces", default=GRAPHS)
    parser.add_argument("--widths", default="64->64")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2, help="pairs of processes, one after the other")
    parser.add_argument("--turns", type=int, default=5, help="samples of each side and pair")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a sample")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--data-dir")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    found: dict[str, tuple[list[Any], list[dict[str, list[float]]]]] = {}
    for _ in range(options.processes):
        before, after = Side(options.before, options), Side(HERE.parents[1], options)
        for cell in cells(options):
            found.setdefault(str(cell), (cell, []))[1].append(compare(before, after, cell, options))
        before.close()
        after.close()
    records = [summary(cell, pairs, options) for cell, pairs in found.values()]
    for record in records:
        print(line(record))
    mean = math.exp(statistics.fmean(math.log(record["speed"]) for record in records))
    print(f"{len(records)} cells, geometric mean {mean:.3f}, least {min(r['speed'] for r in records):.3f}")
    if options.output:
        with options.output.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
