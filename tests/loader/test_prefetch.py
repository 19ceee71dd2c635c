"""Results in order and ahead of time, errors where they belong, and no thread left."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from plait.errors import InputError
from plait.loader.prefetch import Prefetch, usable_cores


def own_threads() -> int:
    return sum(t.name.startswith("plait-prefetch") for t in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_results_come_in_order(depth: int, threads: int | None) -> None:
    def work(n: int) -> int:
        time.sleep(0.001 * (n % 3))
        return n * n

    assert list(Prefetch(work, range(30), depth, threads)) == [n * n for n in range(30)]
    assert own_threads() == 0


def test_no_jobs_are_no_results() -> None:
    assert list(Prefetch(str, [], 3)) == []


def test_no_more_than_depth_are_begun_and_not_taken() -> None:
    begun = []
    ahead = Prefetch(begun.append, range(50), 4, threads=2)
    for taken in range(1, 11):
        next(ahead)
        time.sleep(0.005)
        assert len(begun) <= taken + 4
    ahead.close()


def test_a_budget_bounds_how_many_are_ahead() -> None:
    begun = []

    def work(n: int) -> bytes:
        begun.append(n)
        return bytes(100)

    ahead = Prefetch(work, range(50), 8, weigh=len, budget_bytes=250)
    next(ahead)
    time.sleep(0.02)
    assert len(begun) <= 1 + 2
    assert len(list(ahead)) == 49


def test_a_budget_below_one_result_still_moves() -> None:
    assert len(list(Prefetch(bytes, [100] * 5, 8, weigh=len, budget_bytes=1))) == 5


def test_an_error_is_raised_in_its_turn_with_its_traceback() -> None:
    def broken(n: int) -> int:
        if n == 3:
            raise KeyError("row 3")
        return n

    ahead = Prefetch(broken, range(10), 5)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="row 3") as caught:
        next(ahead)
    assert "broken" in [frame.name for frame in caught.traceback]
    assert own_threads() == 0
    assert list(ahead) == []


def test_an_error_in_the_jobs_is_raised_too() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("jobs")

    with pytest.raises(ZeroDivisionError):
        list(Prefetch(str, jobs(), 2))
    assert own_threads() == 0


def test_jobs_are_drawn_in_the_thread_of_the_caller() -> None:
    seen = set()

    def jobs() -> Iterator[int]:
        for n in range(20):
            seen.add(threading.current_thread())
            yield n

    list(Prefetch(str, jobs(), 4))
    assert seen == {threading.current_thread()}


def test_dropping_the_iterator_ends_its_threads_and_its_jobs() -> None:
    ended = []

    def jobs() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.append(True)

    for _ in range(200):
        for n in Prefetch(str, jobs(), 3):
            if n == "2":
                break
    gc.collect()
    assert own_threads() == 0
    assert len(ended) == 200


def test_an_interrupt_while_waiting_leaves_no_thread() -> None:
    class Interrupted(KeyboardInterrupt):
        pass

    def work(n: int) -> int:
        if n == 2:
            raise Interrupted  # as Ctrl-C would in the waiting thread
        return n

    with pytest.raises(Interrupted):
        list(Prefetch(work, range(9), 2))
    assert own_threads() == 0


def test_waiting_is_counted() -> None:
    slow = Prefetch(lambda n: time.sleep(0.3), range(1), 1)
    list(slow)
    assert slow.stalled_seconds > 0.05  # far less: this thread may have begun to wait late


def test_a_closed_iterator_is_at_its_end() -> None:
    with Prefetch(str, range(9), 2) as ahead:
        next(ahead)
    assert list(ahead) == []


@pytest.mark.parametrize("given", [{"depth": 0}, {"depth": True}, {"depth": 2, "budget_bytes": -1}])
def test_bad_settings_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(InputError, match="="):
        Prefetch(str, [], **given)


def test_there_is_a_core_to_use() -> None:
    assert usable_cores() >= 1
