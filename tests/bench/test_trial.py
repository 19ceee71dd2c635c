"""bench/trial.py: what kills a process is told, and kills nobody else."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from plait.bench.trial import fate

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")]


def dies_of(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGILL, signal.SIGABRT])
def test_a_crash_is_told_by_its_name(number: signal.Signals) -> None:
    told = fate(lambda: dies_of(number))
    assert told is not None
    assert number.name in told


def test_answers_and_errors_are_no_crash() -> None:
    def broken() -> None:
        raise RuntimeError("the caller sees this one itself")

    assert fate(lambda: torch.ones(3).sum()) is None
    assert fate(broken) is None


def test_a_call_that_hangs_is_let_go() -> None:
    started = time.monotonic()
    assert fate(lambda: time.sleep(60), seconds=0.2) is None
    assert time.monotonic() - started < 30


def test_products_on_several_threads_before_do_not_hang_the_child() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.rand(300, 300)
        x @ x
        assert fate(lambda: dies_of(signal.SIGILL) if float((x @ x).sum()) > 0 else None) is not None
    finally:
        torch.set_num_threads(before)
