"""Times the kernels of a GPU against what torch would run there, each checked before the clock starts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.bench.gpu import attending, building, families, gates, products, steps
from plait.bench.gpu.graphs import GRAPHS
from plait.errors import InputError
from plait.measure import Record, environment
from plait.measure.record import append

_PARTS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "products": products.measure,
    "attention": attending.measure,
    "gates": gates.measure,
    "families": families.measure,
}
_WHOLE: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "building": building.measure,
    "steps": steps.measure,
    "epoch": steps.epochs,
}
"""Parts that bring graphs of their own."""
_SWEEPS = {"products": products.sweep, "attention": attending.sweep}


def _line(record: dict[str, Any]) -> str:
    shown = {k: v for k, v in record.items() if k not in ("times", "errors")}
    if "times" in record:
        shown["best"], shown["count"] = record["times"][:3], len(record["times"])
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plait.bench.gpu", description=__doc__)
    parser.add_argument("--only", choices=(*_PARTS, *_WHOLE), help="one part (default all)")
    parser.add_argument("--graphs", nargs="+", choices=tuple(GRAPHS), default=tuple(GRAPHS))
    parser.add_argument("--sweep", action="store_true", help="all tile sizes instead of the defaults")
    parser.add_argument("--output", type=Path, help="a file for all records, as JSON")
    parser.add_argument("--records", type=Path, help="a file that records are appended to, one line each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise InputError("no CUDA device was found; run this where torch.cuda.is_available() is true")
    records: list[dict[str, Any]] = []
    where = environment()
    start = time.perf_counter()
    for record in _measured(args.only, args.graphs, args.sweep):
        records.append(record)
        print(f"{time.perf_counter() - start:6.1f} s  {_line(record)}", flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps({"environment": where, "records": records}, indent=1))
        if args.records is not None:
            append(args.records, Record("bench-gpu", {"part": args.only or "all"}, record, where))


def _measured(only: str | None, graphs: Sequence[str], is_sweep: bool) -> Iterator[dict[str, Any]]:
    """The records of one part, or of all."""
    for part, whole in _WHOLE.items():
        if only in (None, part) and not is_sweep:
            yield from whole()
    for name in graphs if only not in _WHOLE else ():
        edge_index, num_nodes = GRAPHS[name]()
        for part, measure in (_SWEEPS if is_sweep else _PARTS).items():
            if only in (None, part):
                yield from measure(name, edge_index, num_nodes)


if __name__ == "__main__":
    main()
