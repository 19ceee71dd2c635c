"""distributed/wire.py: bandwidth and latency from seconds of exchanges, and a measurement over two ranks."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from plait.analysis.network import Network, Traffic, network_of, network_path
from plait.distributed.session import join
from plait.distributed.wire import _Steps, fitted, measure_network, measure_sharing, with_meeting
from tests.distributed.shards import run


@pytest.mark.parametrize("peers", [1, 3])
def test_exchanges_of_a_known_network_give_it_back(peers: int) -> None:
    seconds = {size: peers * 2e-4 + (size - 8) / 1.5e9 for size in (8, 1 << 16, 1 << 20, 1 << 24)}
    found = fitted(seconds, peers)
    assert (found.bytes_per_s, found.latency) == pytest.approx((1.5e9, 2e-4))


def test_one_disturbed_exchange_does_not_decide() -> None:
    seconds = {size: 1e-4 + size / 1e9 for size in (8, 1 << 18, 1 << 20, 1 << 22)}
    seconds[1 << 20] *= 50
    assert fitted(seconds, 1).bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_larger_messages_that_took_no_longer_still_give_a_network() -> None:
    assert fitted({8: 1e-4, 1 << 16: 1e-4}, 1).bytes_per_s > 0


def test_what_steps_take_longer_is_latency_bytes_and_meetings() -> None:
    network, traffic = Network("measured", 1000.0, 0.5), Traffic(400, 200, 6, 5)
    met = with_meeting(network, apart=10.0, together=10.0 + 0.2 + 6 * 0.5 + 5 * 0.25, traffic=traffic)
    assert (met.latency, met.meeting) == pytest.approx((0.5, 0.25))
    assert 10.0 + met.seconds(traffic) == pytest.approx(14.45)


def test_steps_that_take_no_longer_than_their_messages_leave_nothing_for_meetings() -> None:
    traffic, network = Traffic(400, 200, 6, 5), Network("measured", 1000.0, 0.5)
    assert with_meeting(network, 10.0, 10.0 + 0.2 + 1.2, traffic) == network
    assert with_meeting(network, 10.0, 9.0, traffic) == network


def counted(rank: int, size: int, folder: Path) -> None:
    join(60.0, None)
    steps = _Steps(32, None, meets=True)
    before = replace(steps._peers.counters)
    steps._step()
    after = steps._peers.counters
    told = [
        getattr(after, name) - getattr(before, name) for name in ("exchanges", "bytes_out", "reduced_bytes")
    ]
    (folder / f"{rank}.json").write_text(json.dumps(told))


@pytest.mark.processes
def test_steps_send_what_their_traffic_says(tmp_path: Path) -> None:
    run(counted, 2, tmp_path)
    said = _Steps.traffic(2)
    for rank in range(2):
        exchanges, sent, reduced = json.loads((tmp_path / f"{rank}.json").read_text())
        assert exchanges + 1 == said.meetings
        assert sent + reduced == said.busiest


def both(rank: int, size: int, folder: Path) -> None:
    os.environ["PLAIT_CACHE"] = str(folder / "cache")
    join(60.0, None)
    network, sharing = measure_network(sizes=(8, 1 << 16, 1 << 20), keep=True), measure_sharing()
    figures = [network.bytes_per_s, network.latency, network.meeting, network.busy, sharing]
    (folder / f"{rank}.json").write_text(json.dumps(figures))


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_agree_on_what_lies_between_them(tmp_path: Path) -> None:
    run(both, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert all(0 <= number < float("inf") for number in first)
    assert first[3] > 0  # a message keeps processors busy
    kept = network_of(network_path(tmp_path / "cache"))
    assert [kept.bytes_per_s, kept.latency, kept.meeting, kept.busy] == first[:4]
