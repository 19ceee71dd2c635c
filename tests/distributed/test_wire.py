"""distributed/wire.py: bandwidth and latency from seconds of exchanges, and a measurement over two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.distributed.session import join
from plait.distributed.wire import fitted, measure_network, measure_sharing
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


def both(rank: int, size: int, folder: Path) -> None:
    join(60.0, None)
    network, sharing = measure_network(sizes=(8, 1 << 16, 1 << 20)), measure_sharing()
    (folder / f"{rank}.json").write_text(json.dumps([network.bytes_per_s, network.latency, sharing]))


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_agree_on_what_lies_between_them(tmp_path: Path) -> None:
    run(both, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert all(0 < number < float("inf") for number in first)
