"""Thousands of sequences, every failing one kept: `make fuzz SEQUENCES=20000 SEED=1 PROCESSES=2`.

Nothing is shrunk and nothing stops the run. A script is on disk before it runs, so a crash leaves its script.
In several processes each runs shares of the sequences, every share with a seed of its own and every other one
with PLAIT_ASIDE=0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.replay import Tally, replay
from tests.fuzz.scripts import scripts

__all__ = ["main", "run", "run_shares"]

LARGEST_SHARE = 2500  # sequences of one process: a crash ends its share, no more


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


def run_shares(
    sequences: int, first: int, folder: Path, processes: int, seconds: float = math.inf
) -> list[str]:
    """What failed, a line for each draw with its seed, its number and the file that has its script."""
    size = min(LARGEST_SHARE, -(-sequences // processes))
    sizes = [min(size, sequences - start) for start in range(0, sequences, size)]
    end = time.monotonic() + seconds

    def share(number: int) -> list[str]:
        if time.monotonic() > end:
            return []
        return _in_process(sizes[number], first + number, folder, end - time.monotonic(), number % 2 == 1)

    with ThreadPoolExecutor(processes) as pool:
        return [line for found in pool.map(share, range(len(sizes))) for line in found]


def _in_process(sequences: int, first: int, folder: Path, seconds: float, is_planned: bool) -> list[str]:
    """The same for one share; a crash is the draw that was running, whose script stays on disk."""
    out = folder / f"fuzz-{first}.json"
    running = out.with_suffix(".running")
    for old in (out, running):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.many", "--sequences", str(sequences)]
    command += ["--seed", str(first), "--seconds", str(seconds), "--out", str(out)]
    aside = {"PLAIT_ASIDE": "0"} if is_planned else {}
    code = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | aside, check=False).returncode
    failures = json.loads(out.read_text()) if out.exists() else []
    lines = [
        f"seed {first}, draw {draw['number']}: {draw['what'].splitlines()[0]} ({out})" for draw in failures
    ]
    if code not in (0, 1) or running.exists():
        lines.append(f"seed {first}: ended with {code} while it ran the script in {running}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a sequence failed, and the file that says which."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.many", description=__doc__)
    parser.add_argument("--sequences", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--seconds", type=float, default=math.inf, help="draw no more after that long")
    parser.add_argument(
        "--out", type=Path, help="JSON file of the failing draws, their folder with --processes"
    )
    parser.add_argument("--processes", type=int, default=1, help="shares of the sequences run side by side")
    chosen = parser.parse_args(arguments)
    if chosen.processes > 1:
        folder = chosen.out or Path(".hypothesis")
        folder.mkdir(exist_ok=True)
        found = run_shares(chosen.sequences, chosen.seed, folder, chosen.processes, chosen.seconds)
        print("\n".join([*found, f"{chosen.sequences} sequences asked for, {len(found)} failures"]))
        return bool(found)
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
