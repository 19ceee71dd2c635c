"""plait calibrate: measures this machine and stores its profile."""

from __future__ import annotations

import argparse
import sys

from plait.cli.options import check_device, use_threads
from plait.measure.progress import Meter

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The device; the profile of a CPU is of this machine with the threads torch uses."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--num-threads", type=int, metavar="N", help="measure with this many threads")


def run(args: argparse.Namespace) -> int:
    """Measure, store, and say what was found."""

    use_threads(args.num_threads)
    check_device(args.device)
    import plait

    meter = Meter("calibrating", 100, sys.stderr)

    def tell(label: str, share: float) -> None:
        meter.label = f"calibrating: {label}"
        meter.done = round(100 * share)
        meter.show()

    profile = plait.calibrate(progress=tell, device=args.device)
    meter.label, meter.done = "calibrating", 100
    meter.close()
    print(f"profile of {profile.name} stored; plans are priced for it now")
    if profile.disturbance:
        print(f"disturbed: {profile.disturbance}; calibrate again when the machine is quiet")
    return 0
