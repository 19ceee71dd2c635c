"""bench/ops/suites: they can be drawn up for both devices; quick has all operations, paper its sweeps."""

from __future__ import annotations

import pytest

from plait.bench.ops.catalogue import OPERATIONS
from plait.bench.ops.suites import SUITES, groups_of
from plait.errors import InputError


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_can_be_drawn_up(suite: str, device: str) -> None:
    groups = groups_of(suite, device)
    assert groups
    assert {case.device for group in groups for case in group} == {device}
    assert {case.suite for group in groups for case in group} == {suite}


def test_quick_has_every_operation_in_every_direction() -> None:
    seen = {(case.op, case.direction) for group in groups_of("quick") for case in group}
    assert {op for op, _ in seen} == set(OPERATIONS)
    assert all((op, "backward") in seen for op, entry in OPERATIONS.items() if entry.has_backward)


def test_paper_varies_what_the_study_varied_side_by_side() -> None:
    groups = groups_of("paper")
    for name in ("value_sparsity", "axis", "reduction"):
        assert any(len({getattr(case, name) for case in group}) > 1 for group in groups), name
    crossover = [
        case for group in groups for case in group if case.op == "spmm" and case.sparsity is not None
    ]
    assert len({case.width for case in crossover}) == 3


def test_an_unknown_suite_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError, match="--suite: unknown suite 'huge'; known are quick, paper, calibrate, full"
    ):
        groups_of("huge")
