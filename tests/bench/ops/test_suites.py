"""bench/ops/suites: they can be drawn up for both devices; quick has all operations, paper its sweeps."""

from __future__ import annotations

import pytest

from plait.bench.ops.catalogue import OPERATIONS
from plait.bench.ops.suites import SUITES, bouts_of
from plait.errors import InputError


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_can_be_drawn_up(suite: str, device: str) -> None:
    bouts = bouts_of(suite, device)
    assert bouts
    assert {case.device for bout in bouts for case in bout} == {device}
    assert {case.suite for bout in bouts for case in bout} == {suite}


def test_quick_has_every_operation_in_every_direction() -> None:
    seen = {(case.op, case.direction) for bout in bouts_of("quick") for case in bout}
    assert {op for op, _ in seen} == set(OPERATIONS)
    assert all((op, "backward") in seen for op, entry in OPERATIONS.items() if entry.has_backward)


def test_paper_varies_what_the_study_varied_side_by_side() -> None:
    bouts = bouts_of("paper")
    for name in ("value_sparsity", "axis", "reduction"):
        assert any(len({getattr(case, name) for case in bout}) > 1 for bout in bouts), name
    crossover = [case for bout in bouts for case in bout if case.op == "spmm" and case.sparsity is not None]
    assert len({case.width for case in crossover}) == 3


def test_an_unknown_suite_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError, match="--suite: unknown suite 'huge'; known are quick, paper, calibrate, full"
    ):
        bouts_of("huge")
