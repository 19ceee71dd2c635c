"""The bed of hosts: what it needs, what it makes, what a record lacks; as root, two hosts that talk."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GraphSAGE

from plait.features import simulate
from tests.distributed import faults

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.hosts import network  # noqa: E402 - after the path
from benchmarks.hosts.bound import fewest_rows  # noqa: E402
from benchmarks.hosts.graphs import CLASSES, WIDTH, block_model, even, make  # noqa: E402
from benchmarks.hosts.judge import Judge, prepare  # noqa: E402
from benchmarks.hosts.network import Hosts, HostsError, burst_bytes  # noqa: E402
from benchmarks.hosts.rank import values_of  # noqa: E402
from benchmarks.hosts.runs import still_lacking  # noqa: E402
from benchmarks.hosts.shards import row_text  # noqa: E402
from benchmarks.hosts.shards import summary as summary_of_shards  # noqa: E402
from benchmarks.hosts.systems import SYSTEMS, Setting  # noqa: E402
from benchmarks.hosts.table import curve_of, curves, summary, table  # noqa: E402


def test_a_bucket_holds_what_passes_in_a_millisecond_and_never_a_few_packets() -> None:
    assert burst_bytes("10gbit") == 1_250_000
    assert burst_bytes("100mbit") == 128_000
    with pytest.raises(HostsError, match="1gbit"):
        burst_bytes("fast")


def test_what_is_missing_is_named_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsError, match="as root"):
        network.requirements()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(HostsError, match="iproute2"):
        network.requirements()


def test_the_block_model_is_symmetric_without_loops_or_repeats() -> None:
    indptr, indices, community = block_model(500, 6000, 8, seed=1)
    target = np.repeat(np.arange(500), np.diff(indptr))
    pairs = set(zip(indices.tolist(), target.tolist(), strict=True))
    assert len(pairs) == indices.size
    assert all((b, a) in pairs and a != b for a, b in pairs)
    assert 5500 <= indices.size <= 6000
    assert (community[indices] == community[target]).mean() > 0.6
    again = block_model(500, 6000, 8, seed=1)
    assert all(np.array_equal(one, other) for one, other in zip((indptr, indices), again, strict=False))


def test_settings_of_earlier_records_are_read() -> None:
    setting = Setting("block", 2, "1gbit", 16, "dgl", 3)
    told = setting.to_dict()
    assert Setting.from_dict(told) == setting
    assert Setting.from_dict({**{k: v for k, v in told.items() if k != "system"}, "arm": "dgl"}) == setting


def _line(system: str, seconds: float, **changed: Any) -> dict[str, Any]:
    setting = Setting("block", 2, "1gbit", 16, system, 3)
    rank = {"seconds": seconds, "interface_bytes": 1e6, "processor_seconds": 1.0, "accuracy": 0.5}
    ranks = [{**rank, "rank": r, "epoch": e, "stall": 0.1 * r} for e in range(3) for r in range(2)]
    ranks[0]["seconds"] = 99.0  # a first epoch is not counted
    return {"setting": {**setting.to_dict(), **changed}, "ranks": ranks}


def test_a_record_is_gone_on_with() -> None:
    settings = [Setting("block", 2, "1gbit", 16, system, 5) for system in SYSTEMS]
    lines = [_line("dgl", 4.0), _line("plait-auto", 2.0, rate="10gbit")]
    assert [s.system for s in still_lacking(settings, lines, 1)] == [
        system for system in SYSTEMS if system != "dgl"
    ]
    again = [s for s in still_lacking(settings, lines, 2) if s.system == "dgl"]
    assert [s.seed for s in again] == [1]  # every repeat with a seed of its own
    assert Setting.from_dict(settings[0].to_dict()) == settings[0]


def test_a_table_has_medians_and_ratios() -> None:
    lines = [_line("dgl", 4.0), _line("plait-none", 3.0), _line("plait-auto", 2.0)]
    found = {key[4]: row for key, row in summary(lines).items()}
    assert found["dgl"]["seconds"] == found["dgl"]["most"] == 4.0
    assert found["plait-auto"]["stall"] == pytest.approx(0.05)
    row = next(line for line in table(lines).splitlines() if "plait-auto" in line)
    assert "| 2.00 [2.00, 2.00] | 2.00 | 1.50 |" in row


def test_curves_have_the_spread_over_seeds() -> None:
    lines = [_line("dgl", 4.0), _line("dgl", 4.0), _line("plait-auto", 2.0)]
    for line, last in zip(lines, (0.7, 0.9, 0.8), strict=True):
        for rank in line["ranks"]:
            rank["accuracy"] = (0.1, 0.4, last)[rank["epoch"]] if rank["rank"] == 0 else None
    assert curve_of(lines[0]) == [0.1, 0.4, 0.7]
    rows = curves(lines).splitlines()
    assert rows[2].endswith(
        "| dgl | 2 | 0.100 [0.100, 0.100] | 0.400 [0.400, 0.400] | 0.800 [0.700, 0.900] |"
    )
    assert "plait-auto | 1 " in rows[3]


def _can_make_hosts() -> bool:
    try:
        network.requirements()
        with Hosts(1, "unlimited"):
            return True
    except HostsError:
        return False


@pytest.mark.processes
def test_hosts_talk_over_their_links_and_leave_nothing_behind(tmp_path: Path) -> None:
    if not _can_make_hosts():
        pytest.skip("needs root, iproute2 and network namespaces")
    hear = "import socket; s = socket.create_server((ADDRESS, 7000)); print(s.accept()[0].recv(9).decode())"
    say = (
        "import socket, time\n"
        "for _ in range(100):\n"
        "    try: socket.create_connection((ADDRESS, 7000)).sendall(b'greetings'); break\n"
        "    except OSError: time.sleep(0.1)\n"
    )
    before = network._namespaces()
    with Hosts(2, "1gbit") as hosts, (tmp_path / "log").open("wb") as log:
        address = f"ADDRESS = {hosts.address(0)!r}\n"
        both = [
            hosts.start(i, [sys.executable, "-c", address + text], {}, log)
            for i, text in enumerate((hear, say))
        ]
        assert [process.wait(60) for process in both] == [0, 0]
        endless = hosts.start(0, [sys.executable, "-c", "import time; time.sleep(999)"], {}, log)
    assert endless.poll() is not None
    assert (tmp_path / "log").read_text().strip() == "greetings"
    assert network._namespaces() == before


@pytest.mark.processes
@pytest.mark.slow
def test_hosts_that_are_cut_off_give_up_after_the_timeout(tmp_path: Path) -> None:
    """The link of a host goes down: no connection is closed, nothing arrives any more; both ranks end."""
    if not _can_make_hosts():
        pytest.skip("needs root, iproute2 and network namespaces")
    program = (
        f"from tests.distributed import faults; faults.cut_off(__import__('pathlib').Path({str(tmp_path)!r}))"
    )
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "WORLD_SIZE": "2"}
    variables |= {"GLOO_SOCKET_IFNAME": network.INTERFACE, "MASTER_PORT": "29666"}
    with Hosts(2, "1gbit") as hosts, (tmp_path / "log").open("wb") as log:
        variables["MASTER_ADDR"] = hosts.address(0)
        both = [
            hosts.start(i, [sys.executable, "-c", program], {**variables, "RANK": str(i)}, log)
            for i in range(2)
        ]
        end = time.monotonic() + 90
        while not all((tmp_path / f"began-{i}").exists() for i in range(2)):
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
        hosts.cut(1)
        assert [process.wait(60) for process in both] == [0, 0]
    for rank in range(2):
        seconds, said = (tmp_path / f"told-{rank}.txt").read_text().split(" ", 1)
        assert float(seconds) < 4 * faults.SILENT
        assert f"rank {rank}: " in said
        assert "Timed out" in said or "timeout" in said, said


@pytest.mark.processes
def test_a_killed_bed_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    if not _can_make_hosts():
        pytest.skip("needs root, iproute2 and network namespaces")
    text = (
        "import os, signal, sys; from benchmarks.hosts.network import Hosts\n"
        "hosts = Hosts(1, '1gbit').__enter__(); hosts.start(0, ['sleep', '998877'], {}, sys.stdout.buffer)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert network.clean()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    assert not any(line.startswith("sleep 998877") for line in io.StringIO(left))


def _fewest_by_trying(batches: list[Any], slots: int, ahead: int = 0) -> int:
    """The fewest rows fetched, over everything that can be kept after every batch."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    sets = [frozenset(rows.tolist()) for rows in batches]
    for number, wanted in enumerate(sets):
        free: frozenset[int] = frozenset().union(*sets[max(0, number - ahead) : number])
        after: dict[frozenset[int], int] = {}
        for kept, fetched in states.items():
            now = fetched + len(wanted - kept - free)
            here = sorted(kept | wanted | free)
            for chosen in itertools.combinations(here, min(slots, len(here))):
                state = frozenset(chosen)
                after[state] = min(now, after.get(state, now))
        states = after
    return min(states.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_the_best_of_all_ways_to_keep_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches = [rng.choice(7, rng.integers(1, 5), replace=False) for _ in range(7)]
    for slots in (1, 2, 3):
        expected = _fewest_by_trying(batches, slots)
        assert fewest_rows(batches, slots).sum() == expected
        assert simulate(batches, slots, "belady").remote_rows == expected
        for ahead in (1, 2):
            assert fewest_rows(batches, slots, ahead).sum() == _fewest_by_trying(batches, slots, ahead)
    assert fewest_rows(batches, 0).sum() == sum(rows.size for rows in batches)


def test_rows_under_way_cost_no_slot() -> None:
    batches = [np.array(rows) for rows in ([1, 2], [3], [1], [2])]
    assert fewest_rows(batches, 0, ahead=2).tolist() == [2, 1, 0, 1]
    assert fewest_rows(batches, 1, ahead=2).tolist() == [2, 1, 0, 0]
    assert fewest_rows(batches, 0, ahead=3).sum() == 3


def test_every_part_has_as_many_seeds() -> None:
    mask = np.array([1, 1, 0, 1, 1, 1, 0], bool)
    found = even(mask, np.array([0, 1, 0, 1, 1, 0, 0]))
    assert [own.tolist() for own in found] == [[0, 5], [1, 3]]


def test_weights_are_judged_as_pyg_would(tmp_path: Path) -> None:
    loaded = make("block-small")
    prepare(loaded, tmp_path / "judge.npz")
    model = GraphSAGE(WIDTH, 8, 2, CLASSES)
    linears = [linear for conv in model.convs for linear in (conv.lin_l, conv.lin_r)]
    biases = [conv.lin_l.bias for conv in model.convs]
    target = np.repeat(np.arange(loaded.graph.num_nodes), np.diff(loaded.graph.indptr))
    edges = torch.from_numpy(np.stack((loaded.graph.indices.astype(np.int64), target)))
    with torch.no_grad():
        answers = model(torch.from_numpy(loaded.x), edges).argmax(dim=1).numpy()
    val = loaded.masks["val"]
    expected = (answers == loaded.y)[val].mean()
    found = Judge(tmp_path / "judge.npz").accuracy(*values_of(linears, biases))
    assert found == pytest.approx(expected, abs=1.5 / val.sum())  # a tie may be rounded otherwise


def test_the_balance_of_exchange_and_computation_is_that_of_steps_that_wait() -> None:
    steady = {"by_nodes": [(0.1, 0.05)] * 3, "overlapped": [(0.08, 0.02)] * 3}
    told = [{**steady, "planned": [(0.08, 0.0)] * 3}] * 2
    told[1] = {**told[1], "by_nodes": [(0.12, 0.07)] * 3}  # the slowest host's steps count
    found = summary_of_shards(told)
    assert found["by_nodes"] == pytest.approx(120)
    assert (found["exchange"], found["compute"]) == pytest.approx((60, 60))
    assert found["gain"] == pytest.approx(1.5)
    row = row_text({"model": "gcn", "rate": "1gbit", **found})
    assert "| gcn | 1gbit | 120.0 | 60.0 | 60.0 | 1.00 | 80.0 | 1.50 |" in row
