"""When a program is replayed and when it runs, with a stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from plait.runtime import replayed
from plait.runtime.chain import Env
from plait.runtime.replayed import Replayed


class Double:
    """out = 2 x, half = a view of out; counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, env: Env) -> None:
        self.runs += 1
        env["out"] = 2 * env["x"]
        env["half"] = env["out"][: len(env["x"]) // 2]


def fake(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
    """Runs the program now and writes to the same memory when replayed."""
    program(env)
    x, out = env["x"], env["out"]
    address, size, stride = out.untyped_storage(), out.shape, out.stride()

    def replay() -> None:
        torch.empty(0).set_(address, 0, size, stride).copy_(2 * x)

    return replay, env


def call(program: Replayed, x: torch.Tensor) -> Env:
    env = Env(x=x)
    program.run(env)
    return env


def test_the_same_addresses_are_replayed_from_the_fourth_time_on() -> None:
    double = Double()
    program, x = Replayed(double, fake), torch.arange(4.0)
    for k in range(8):
        x += 1
        env = call(program, x)
        assert env["out"].tolist() == (2 * x).tolist()
        assert env["half"].tolist() == (2 * x)[:2].tolist()
        assert env["half"].data_ptr() == env["out"].data_ptr()
        del env
        assert double.runs == min(k + 1, 4)  # the fourth is the stand-in's own


def test_what_somebody_holds_is_never_written_to() -> None:
    double = Double()
    program, x = Replayed(double, fake), torch.arange(4.0)
    for _ in range(4):
        call(program, x)
    held = call(program, x)["half"]  # a part of it is enough
    before, runs = held.clone(), double.runs
    x += 5
    other = call(program, x)["out"]
    assert double.runs == runs + 1
    assert held.tolist() == before.tolist()
    assert other.tolist() == (2 * x).tolist()
    del held
    call(program, x)
    assert double.runs == runs + 1


def test_results_may_be_changed_in_place_and_have_no_history() -> None:
    program, x = Replayed(Double(), fake), torch.arange(4.0)
    for _ in range(6):
        out = call(program, x)["out"]
        assert not out._is_view()
        assert out._version <= 1
        out.add_(1).requires_grad_()
        del out


def test_other_addresses_and_numbers_are_other_graphs() -> None:
    double = Double()
    program, x = Replayed(double, fake), torch.arange(4.0)

    def scaled(number: float) -> Env:
        env = Env(x=x, e=torch.tensor(number))
        program.run(env)
        return env

    for _ in range(5):
        scaled(1.0)
    runs = double.runs
    scaled(1.0)
    assert double.runs == runs
    scaled(2.0)
    assert double.runs == runs + 1
    call(program, x)
    assert double.runs == runs + 2


def test_programs_that_cannot_be_replayed_run() -> None:
    x = torch.arange(4.0)

    def through(env: Env) -> None:
        env["out"] = env["x"][1:]  # an input's memory

    for program in (Replayed(through, lambda run, env: (run(env), (lambda: None, env))[1]),):  # type: ignore[func-returns-value]
        for _ in range(8):
            x += 1
            assert call(program, x)["out"].tolist() == x[1:].tolist()

    def failing(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
        raise RuntimeError("operation not permitted when stream is capturing")

    double = Double()
    program = Replayed(double, failing)
    for _ in range(8):
        call(program, x)
    assert double.runs == 8


def test_large_results_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4.0)
    monkeypatch.setattr(replayed, "_MOST_BYTES", 8)
    double = Double()
    program = Replayed(double, failing_if_called)
    for _ in range(8):
        call(program, x)
    assert double.runs == 8
    monkeypatch.setenv("PLAIT_REPLAY", "0")
    double = Double()
    program = Replayed(double, failing_if_called)
    for _ in range(8):
        call(program, x)
    assert double.runs == 8


def failing_if_called(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
    raise AssertionError("captured")


def test_addresses_that_keep_changing_are_given_up() -> None:
    double = Double()
    program = Replayed(double, fake)
    inputs = [torch.arange(4.0) + k for k in range(8)]
    for _ in range(8):
        for x in inputs:
            assert call(program, x)["out"].tolist() == (2 * x).tolist()
    assert program._is_off
