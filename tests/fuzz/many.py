"""Thousands of sequences, every failing one kept: `make fuzz SEQUENCES=20000 SEED=1`.

Nothing is shrunk and nothing stops the run. A script is on disk before it runs, so a crash leaves its script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.replay import Tally, replay
from tests.fuzz.scripts import scripts

__all__ = ["main", "run"]


class _Enough(KeyboardInterrupt):
    """The time is up: what else hypothesis would take for a failing draw."""


def run(
    sequences: int, first: int, out: Path, seconds: float = math.inf
) -> tuple[int, list[dict[str, object]], Tally]:
    """(sequences run, the failing ones with script and reason, tally); `out` is kept up to date."""
    failures: list[dict[str, object]] = []
    tally, count, end = Tally(), 0, time.monotonic() + seconds
    running, last = out.with_suffix(".running"), out.with_suffix(".last")

    @seed(first)
    @settings(
        max_examples=sequences, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(scripts())
    def draw(script: str) -> None:
        nonlocal count
        if time.monotonic() > end:
            raise _Enough
        count += 1
        running.write_text(script)
        try:
            replay(script, tally)
        except Exception as error:  # an error of the comparison itself is a failing draw too
            what = f"{type(error).__name__}: {error}"
            failures.append({"seed": first, "number": count, "script": script, "what": what})
            out.write_text(json.dumps(failures, indent=1))
        if not count % 100:
            last.write_text(f"{count} sequences, {len(failures)} failures\n")

    with contextlib.suppress(_Enough):
        draw()
    running.unlink()
    out.write_text(json.dumps(failures, indent=1))
    last.write_text(f"{count} sequences, {len(failures)} failures, finished\n")
    return count, failures, tally


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a sequence failed, and the file that says which."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.many", description=__doc__)
    parser.add_argument("--sequences", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--seconds", type=float, default=math.inf, help="draw no more after that long")
    parser.add_argument("--out", type=Path, help="JSON file of the failing draws")
    chosen = parser.parse_args(arguments)
    out = chosen.out or Path(".hypothesis", f"fuzz-{chosen.seed}.json")
    out.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    start = time.perf_counter()
    count, failures, tally = run(chosen.sequences, chosen.seed, out, chosen.seconds)
    seconds = time.perf_counter() - start
    print(
        f"seed {chosen.seed}: {count} sequences in {seconds:.0f} s (PLAIT_ASIDE="
        f"{os.environ.get('PLAIT_ASIDE', '')}): {tally.answered} calls compared, {tally.refused} refused by "
        f"PyG, {tally.planned} models planned, {len(failures)} failures" + f", in {out}" * bool(failures)
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
