"""analysis/network.py: names, figures, and collectives against messages sent one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.analysis.network import (
    Network,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    network_in_use,
    network_of,
    network_path,
)
from plait.errors import InputError
from plait.ops.exchange import TRADE_MEETING

Collective = Callable[[float, int], Traffic]


def ring_all_reduce(size: int, workers: int) -> tuple[int, int, int]:
    """(total, busiest, steps) of a ring, step by step: chunks go around twice."""
    chunk, sent, steps = size // workers, [0] * workers, 0
    for _ in range(2 * (workers - 1)):
        steps += 1
        for worker in range(workers):
            sent[worker] += chunk
    return sum(sent), max(sent), steps


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_collectives_send_what_their_messages_add_up_to(workers: int) -> None:
    size = 840
    found = all_reduce(size, workers)
    total, busiest, steps = ring_all_reduce(size, workers)
    assert (found.total, found.busiest, found.messages) == pytest.approx((total, busiest, steps))
    gathered = all_gather(size, workers)  # everybody receives what the others have
    assert gathered.total == pytest.approx(workers * (size - size / workers))
    blocks = [[size / workers**2] * workers for _ in range(workers)]  # rows by owner, columns by owner
    moved = sum(b for i, row in enumerate(blocks) for j, b in enumerate(row) if i != j)
    assert all_to_all(size, workers).total == pytest.approx(moved)


def test_seconds_are_bytes_over_bandwidth_and_messages_times_latency() -> None:
    network = Network("x", 100.0, 0.5)
    assert network.seconds(Traffic(500, 200, 3)) == 2.0 + 1.5
    assert Traffic(1, 2, 3) + Traffic(4, 5, 6) * 2 == Traffic(9, 12, 15)


def test_workers_that_meet_lose_more_than_their_messages_take() -> None:
    network = Network("x", 100.0, 0.5, meeting=4.0)
    assert network.seconds(Traffic(500, 200, 3, 2)) == 2.0 + 1.5 + 8.0
    assert Traffic(1, 2, 3, 4) + Traffic(5, 6, 7, 8) * 2 == Traffic(11, 14, 17, 20)


@pytest.mark.parametrize(
    ("collective", "one"), [(all_reduce, 1), (all_gather, 1), (all_to_all, TRADE_MEETING)]
)
def test_a_collective_is_one_meeting_and_one_worker_meets_nobody(collective: Collective, one: float) -> None:
    assert [collective(840, workers).meetings for workers in (1, 2, 8)] == [0, one, one]


@pytest.mark.parametrize(
    ("given", "speed", "latency"),
    [
        ("10gbit", 1.25e9, 30e-6),
        ("40gbit,10us", 5e9, 1e-5),
        ("2GB/s", 2e9, 30e-6),
        ("100mbit, 1ms", 12.5e6, 1e-3),
        ((3e9, 0.0), 3e9, 0.0),
        (Network("own", 1.0, 2.0), 1.0, 2.0),
    ],
)
def test_networks_by_name_and_by_figures(given: object, speed: float, latency: float) -> None:
    found = network_of(given)
    assert (found.bytes_per_s, found.latency) == pytest.approx((speed, latency))


@pytest.mark.parametrize(
    ("given", "meeting"),
    [("40gbit", 0.0), ("40gbit,10us", 0.0), ("40gbit,10us,500us", 5e-4), ((1e9, 1e-5, 2e-4), 2e-4)],
)
def test_a_third_figure_is_what_a_meeting_costs(given: object, meeting: float) -> None:
    assert network_of(given).meeting == pytest.approx(meeting)


@pytest.mark.parametrize(
    "given",
    [
        "carrier pigeon", "-10gbit", "0gbit", "10gbit,-5us", "10gbit,5us,-1us", "10gbit,5us,1us,1us",
        "1.2.3gbit", (0, 1), (1, -1), (1, 1, -1), (1, 1, 1, 1), None, 7,
    ],
)  # fmt: skip
def test_bad_networks_are_refused_with_what_to_write(given: object) -> None:
    with pytest.raises(InputError, match=r"network: .*10gbit"):
        network_of(given)


def test_a_record_gives_back_the_network_that_was_measured(tmp_path: Path) -> None:
    measured = Network("measured", 1.9e9, 4e-4, 5e-4, 3e-4)
    measured.save(tmp_path / "between" / "network.json")
    assert network_of(tmp_path / "between" / "network.json") == measured
    assert network_of(str(tmp_path / "between" / "network.json")) == measured


def test_without_a_name_the_network_that_was_kept_is_meant_and_10gbit_where_none_was(tmp_path: Path) -> None:
    assert network_in_use(None, tmp_path) == network_of("10gbit")
    kept = Network("measured", 1.9e9, 4e-4)
    kept.save(network_path(tmp_path))
    assert network_in_use(None, tmp_path) == kept
    assert network_in_use("1gbit", tmp_path) == network_of("1gbit")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": "plait-network-1"}',
        '{"format": "plait-network-1", "name": "n", "bytes_per_s": "fast", "latency": 0}',
        '{"format": "plait-network-1", "name": "n", "bytes_per_s": -1, "latency": 0}',
        '{"format": "plait-network-1", "name": "n", "bytes_per_s": 1, "latency": 0, "busy": -1}',
    ],
)  # fmt: skip
def test_damaged_records_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(text)
    with pytest.raises(InputError, match="network: "):
        network_of(path)
    with pytest.raises(InputError, match="network: cannot read"):
        network_of(tmp_path / "none.json")
