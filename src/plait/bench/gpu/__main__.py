"""python -m plait.bench.gpu: see plait.bench.gpu."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from plait.bench.gpu import attending, building, families, gates, products, steps
from plait.bench.gpu.graphs import GRAPHS
from plait.errors import InputError
from plait.measure import environment

_PARTS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "products": products.measure,
    "attention": attending.measure,
    "gates": gates.measure,
    "families": families.measure,
}
_SWEEPS = {"products": products.sweep, "attention": attending.sweep}


def _line(record: dict[str, Any]) -> str:
    shown = {k: v for k, v in record.items() if k not in ("times", "errors")}
    if "times" in record:
        shown["best"], shown["count"] = record["times"][:3], len(record["times"])
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m plait.bench.gpu", description=__doc__)
    parser.add_argument("--only", choices=(*_PARTS, "building", "steps"), help="one part (default all)")
    parser.add_argument("--graphs", nargs="+", choices=tuple(GRAPHS), default=tuple(GRAPHS))
    parser.add_argument("--sweep", action="store_true", help="all tile sizes instead of the defaults")
    parser.add_argument("--output", type=Path, help="a file for all records, as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise InputError("no CUDA device was found; run this where torch.cuda.is_available() is true")
    records: list[dict[str, Any]] = []
    where = environment()
    start = time.perf_counter()

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        print(f"{time.perf_counter() - start:6.1f} s  {_line(record)}", flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps({"environment": where, "records": records}, indent=1))

    if args.only in (None, "building") and not args.sweep:
        for record in building.measure():
            keep(record)
    if args.only in (None, "steps") and not args.sweep:
        for record in steps.measure():
            keep(record)
    for name in () if args.only in ("building", "steps") else args.graphs:
        edge_index, num_nodes = GRAPHS[name]()
        for part, measure in (_SWEEPS if args.sweep else _PARTS).items():
            if args.only in (None, part):
                for record in measure(name, edge_index, num_nodes):
                    keep(record)


if __name__ == "__main__":
    main()
