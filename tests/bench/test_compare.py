"""bench/compare: real changes are seen, noise and drift are not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from plait.bench.compare import _student_tails, compare
from plait.errors import InputError
from plait.measure import Record, Timing


def op_records(
    rng: np.random.Generator, factors: dict[str, float] | None = None, **result: Any
) -> list[Record]:
    """Forty operations, each 15 samples around its own time, drifting 2% from run to run."""
    records = []
    for k in range(40):
        level = (1.0 + k) * 1e-4 * rng.normal(1.0, 0.02) * (factors or {}).get(f"op{k}", 1.0)
        samples = tuple(level * rng.normal(1.0, 0.01, 15))
        case = {"op": f"op{k}", "variant": "torch", "direction": "forward", "suite": "quick"}
        records.append(
            Record("op", case, {"status": "ok", "seconds": Timing(samples, 1).to_dict(), **result})
        )
    return records


def test_two_runs_of_the_same_code_raise_no_false_alarm() -> None:
    flagged = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        flagged += sum(c.is_changed for c in compare(op_records(rng), op_records(rng)).changes)
    assert flagged <= 0.05 * 6 * 40


def gpu_run(rng: np.random.Generator, factors: dict[str, float] | None = None) -> list[Record]:
    """A run as an H200 gave them: two visits; a third of the lines is Python's, and Python's speed is the
    run's (1x to 1.6x); drift has heavy tails; backward passes scatter."""
    python, records = float(rng.uniform(1.0, 1.6)), []
    for k in range(105):
        is_hosts, is_backward = k % 3 == 0, k % 2 == 0
        scatter = (0.10 if is_backward else 0.05) if is_hosts else 0.007
        level = 2e-5 * 1.06**k * math.exp(scatter * float(rng.standard_t(3)))
        level *= (python if is_hosts else 1.0) * (factors or {}).get(f"op{k}", 1.0)
        visits = [level * math.exp(scatter * float(rng.normal())) for _ in range(2)]
        samples = tuple(float(s) for visit in visits for s in visit * rng.normal(1.0, 0.01, 8))
        seconds = Timing(samples, 1).to_dict() | {"visit_repeats": [8, 8]}
        direction = "backward" if is_backward else "forward"
        case = {"op": f"op{k}", "variant": "torch", "direction": direction, "device": "cuda"}
        result = {"status": "ok", "seconds": seconds, "host_seconds": level * (0.9 if is_hosts else 0.2)}
        records.append(Record("op", case, result))
    return records


CHANGED = {"op71": 1.15, "op73": 1 / 1.15}  # two of the lines that no Python bounds


@pytest.fixture(scope="module")
def gpu_comparisons() -> list[dict[str, str]]:
    """The verdicts of twenty pairs of runs in which two lines of 105 changed, by the operation's name."""
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        changes = compare(gpu_run(rng), gpu_run(rng, CHANGED)).changes
        found.append({str(change.case["op"]): change.verdict for change in changes})
    return found


def test_false_alarms_stay_below_a_twentieth_where_the_host_is_the_bound_and_tails_are_heavy(
    gpu_comparisons: list[dict[str, str]],
) -> None:
    flagged = [
        np.mean([verdict in ("slower", "faster") for op, verdict in found.items() if op not in CHANGED])
        for found in gpu_comparisons
    ]
    assert float(np.mean(flagged)) < 0.02
    assert float(np.mean(np.array(flagged) <= 0.05)) >= 0.95


@pytest.mark.parametrize("op", CHANGED)
def test_a_change_of_fifteen_percent_of_a_stable_lane_is_found(
    op: str, gpu_comparisons: list[dict[str, str]]
) -> None:
    expected = "slower" if CHANGED[op] > 1 else "faster"
    assert sum(found[op] == expected for found in gpu_comparisons) >= 16


def test_the_tails_are_those_of_students_distribution() -> None:
    # tables of t with 6 degrees of freedom
    for t, tails in ((0.0, 1.0), (1.943, 0.1), (2.447, 0.05), (3.707, 0.01), (5.959, 0.001)):
        assert _student_tails(t) == pytest.approx(tails, rel=2e-3)


def test_a_real_change_is_found_in_its_direction() -> None:
    rng = np.random.default_rng(0)
    found = compare(op_records(rng), op_records(rng, {"op3": 1.5, "op7": 0.5}))
    verdicts = {str(change.case["op"]): change.verdict for change in found.changes}
    assert (verdicts["op3"], verdicts["op7"]) == ("slower", "faster")
    change = next(change for change in found.changes if change.case["op"] == "op3")
    assert change.ratio == pytest.approx(1.5, abs=0.15)
    assert change.low < change.ratio < change.high


def test_a_shift_of_the_whole_machine_is_told_and_not_blamed_on_every_case() -> None:
    rng = np.random.default_rng(1)
    slow = compare(op_records(rng), op_records(rng, {f"op{k}": 1.2 for k in range(40)}))
    assert slow.shift == pytest.approx(1.2, abs=0.03)
    assert slow.count("slower") <= 2


def test_times_taken_on_a_crowded_machine_are_not_judged() -> None:
    rng = np.random.default_rng(2)
    found = compare(op_records(rng), op_records(rng, {"op3": 3.0}, busy_elsewhere=0.5))
    assert found.count("crowded") == 40
    by_processor = op_records(rng, {"op3": 3.0}, busy_elsewhere=0.5, clock="processor")
    assert compare(op_records(rng), by_processor).count("slower") == 1


def test_peers_of_layers_and_models_are_compared_one_by_one() -> None:
    def layers(factor: float) -> list[Record]:
        lines = {
            name: {"status": "timed", **Timing((t, 1.01 * t, 0.99 * t), 1).to_dict()}
            for name, t in (("pyg", 1e-3), ("plait", factor * 1e-4))
        }
        lines["dgl"] = {"status": "missing", "reason": "not here"}
        return [Record("bench-layers", {"graph": "cora", "layer": "gcn"}, {"peers": lines})]

    found = compare(layers(1.0), layers(2.0))
    assert {str(c.case["variant"]): c.verdict for c in found.changes} == {"pyg": "same", "plait": "slower"}


def test_records_without_samples_are_compared_by_their_intervals() -> None:
    def bare(median: float) -> list[Record]:
        seconds = {"median_seconds": median, "interval_seconds": [0.98 * median, 1.02 * median]}
        return [Record("op", {"op": "mm"}, {"status": "ok", "seconds": seconds})]

    assert compare(bare(1e-3), bare(2e-3)).changes[0].verdict == "slower"
    assert compare(bare(1e-3), bare(1.01e-3)).changes[0].verdict == "same"


def test_lanes_of_one_run_alone_are_counted() -> None:
    rng = np.random.default_rng(3)
    found = compare(op_records(rng)[:30], op_records(rng)[10:])
    assert (len(found.changes), found.only_before, found.only_after) == (20, 10, 10)


def test_runs_with_nothing_in_common_are_refused() -> None:
    rng = np.random.default_rng(4)
    with pytest.raises(InputError, match="no timed case in common"):
        compare(op_records(rng)[:5], op_records(rng)[5:])
