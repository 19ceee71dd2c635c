"""What lies between workers: bandwidth and latency, and what collectives cost on it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.errors import InputError
from plait.measure.whole import write_whole
from plait.ops.exchange import TRADE_MEETING

__all__ = [
    "NAMED", "Network", "Traffic", "all_gather", "all_reduce", "all_to_all", "network_in_use", "network_of",
    "network_path",
]  # fmt: skip


@dataclass(frozen=True)
class Network:
    """Bytes per second each worker can send while receiving as many, and a message's latency in seconds.

    `meeting` is what workers lose in addition each time they wait for each other: they arrive at different
    times, and those that waited have to wake up. `busy` are the processor seconds of a message at either end.
    """

    name: str
    bytes_per_s: float
    latency: float
    meeting: float = 0.0
    busy: float = 0.0

    def seconds(self, traffic: Traffic) -> float:
        """Seconds of this traffic for the busiest worker."""
        return (
            traffic.busiest / self.bytes_per_s
            + traffic.messages * self.latency
            + traffic.meetings * self.meeting
        )

    def save(self, path: Path) -> None:
        """Write it as a record that `network=` takes by its file name."""
        write_whole(path, json.dumps({"format": _FORMAT, **asdict(self)}, indent=1), "network", True)


@dataclass(frozen=True)
class Traffic:
    """Bytes all workers send together, those of the busiest one, its messages one after the other.

    `meetings`: how often workers wait for each other; a trade of columns counts for less (ops/exchange.py).
    """

    total: float = 0.0
    busiest: float = 0.0
    messages: float = 0.0
    meetings: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.total + other.total, self.busiest + other.busiest, self.messages + other.messages,
            self.meetings + other.meetings,
        )  # fmt: skip

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.total * times, self.busiest * times, self.messages * times, self.meetings * times)


def all_reduce(size: float, workers: int) -> Traffic:
    """Every worker gets the sum of all workers' `size` bytes: a ring sends 2 (P - 1) / P of them each.

    It takes 2 (P - 1) steps, each a message, and workers wait for each other once.
    """
    share = 2.0 * (workers - 1) / workers
    return Traffic(share * size * workers, share * size, 2 * (workers - 1), int(workers > 1))


def all_gather(size: float, workers: int) -> Traffic:
    """Every worker gets all `size` bytes, of which each has an equal part."""
    share = (workers - 1) / workers
    return Traffic(share * size * workers, share * size, workers - 1, int(workers > 1))


def all_to_all(size: float, workers: int) -> Traffic:
    """`size` bytes spread by rows are spread by columns: of its part each worker keeps one part in P."""
    share = (workers - 1) / workers**2
    return Traffic(share * size * workers, share * size, workers - 1, TRADE_MEETING * (workers > 1))


_FORMAT = "plait-network-1"
NAMED = {
    "1gbit": (0.125e9, 50e-6),
    "10gbit": (1.25e9, 30e-6),
    "25gbit": (3.125e9, 20e-6),
    "100gbit": (12.5e9, 5e-6),
    "200gbit": (25e9, 3e-6),
    "400gbit": (50e9, 3e-6),
    "pcie4": (25e9, 5e-6),
    "nvlink": (300e9, 3e-6),
}
_UNITS = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "gb/s": 1e9, "mb/s": 1e6}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = r"(?:,\s*([-+.\d]+)\s*(us|µs|ms|s))?"
_FIGURES = re.compile(rf"([-+.\d]+)\s*(gbit|mbit|gb/s|mb/s){_TIME}{_TIME}")
_HELP = (
    f"name one of {', '.join(NAMED)}, write e.g. 40gbit, 5GB/s, 40gbit,10us or 40gbit,10us,500us, or name "
    "the file of a record"
)


def network_path(cache_folder: Path) -> Path:
    """The file of the network that was measured between this machine's ranks and kept."""
    return cache_folder / "network.json"


def network_in_use(given: Any, cache_folder: Path) -> Network:
    """The network given, else the one kept in this folder, else 10gbit: the same for analysis and ranks."""
    kept = network_path(cache_folder)
    if given is None:
        return network_of(kept if kept.exists() else "10gbit")
    return network_of(given)


def network_of(given: Any) -> Network:
    """A network by name ("10gbit"), by figures ("40gbit,10us"), as (bytes per second, latency), or itself.

    A third figure is what a meeting costs beside its messages: "40gbit,10us,500us". The name of a file that
    ends in .json is that of a record (`Network.save`).
    """
    if isinstance(given, Path) or (isinstance(given, str) and given.strip().endswith(".json")):
        return _recorded(Path(given))
    if isinstance(given, Network):
        return _checked(given)
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        return _checked(Network("given", *map(float, given)))
    if isinstance(given, str):
        text = given.strip().lower()
        if text in NAMED:
            return Network(text, *NAMED[text])
        match = _FIGURES.fullmatch(text)
        if match is not None:
            speed = _number(match[1]) * _UNITS[match[2]]
            late = NAMED["10gbit"][1] if match[3] is None else _number(match[3]) * _TIMES[match[4]]
            meeting = 0.0 if match[5] is None else _number(match[5]) * _TIMES[match[6]]
            return _checked(Network(text, speed, late, meeting))
    raise InputError(f"network: {given!r} is not known; {_HELP}")


def _recorded(path: Path) -> Network:
    """The network in a file."""
    again = "measure it again (plait.distributed.wire.measure_network)"
    try:
        data = json.loads(path.read_text())
    except OSError as fault:
        raise InputError(f"network: cannot read {path} ({fault.strerror}); {_HELP}") from None
    except ValueError:
        raise InputError(f"network: {path} is not JSON; {again}") from None
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise InputError(f"network: {path} is no record of a network ({_FORMAT}); {again}")
    try:
        name, figures = data.pop("name"), {key: float(value) for key, value in data.items()}
        return _checked(Network(str(name), **figures))
    except (KeyError, TypeError, ValueError) as fault:
        raise InputError(f"network: {path} is damaged ({fault}); {again}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"network: {text!r} is no number; {_HELP}") from None


def _checked(network: Network) -> Network:
    if not math.isfinite(network.bytes_per_s) or network.bytes_per_s <= 0:
        raise InputError(f"network: a bandwidth of {network.bytes_per_s:g} bytes per second; {_HELP}")
    if not math.isfinite(network.latency) or network.latency < 0:
        raise InputError(f"network: a latency of {network.latency:g} seconds; {_HELP}")
    if not math.isfinite(network.meeting) or network.meeting < 0:
        raise InputError(f"network: a meeting of {network.meeting:g} seconds; {_HELP}")
    if not math.isfinite(network.busy) or network.busy < 0:
        raise InputError(f"network: {network.busy:g} processor seconds per message; {_HELP}")
    return network
