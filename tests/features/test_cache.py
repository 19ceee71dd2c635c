"""A cache answers as its source does, counts as the simulation does, and stands a source that fails."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features import simulate
from plait.features.cache import Cache
from plait.features.narrow import narrowed, widened

from .traces import NUM_ROWS, ONLINE, table, trace


@pytest.mark.parametrize("policy", [*ONLINE, "none"])
@pytest.mark.parametrize("capacity", [1, 10, 50, 500])
def test_rows_are_those_of_the_source(policy: str, capacity: int) -> None:
    rows, scores = table(), np.arange(NUM_ROWS)
    cache = Cache(rows, capacity, policy, scores=scores)
    for ids in trace():
        assert np.array_equal(cache.take(ids), rows[ids])


def test_a_revealed_future_is_used_as_belady_would() -> None:
    rows, batches = table(), trace()
    cache = Cache(rows, 9, window=len(batches))
    for ids in batches:
        cache.reveal(ids)
    for ids in batches:
        assert np.array_equal(cache.take(ids), rows[ids])
    assert cache.counters.remote_rows == simulate(batches, 9, "belady").remote_rows


def test_more_may_be_revealed_than_the_window_holds() -> None:
    rows, batches = table(), trace()
    cache = Cache(rows, 9, window=3)
    for ids in batches:
        cache.reveal(ids)
    for ids in batches:
        assert np.array_equal(cache.take(ids), rows[ids])
    assert cache.counters.remote_rows == simulate(batches, 9, "lookahead", window=3).remote_rows


def test_a_future_that_does_not_come_is_forgotten_and_the_rows_stay() -> None:
    rows = table()
    cache = Cache(rows, 9, window=5)
    hot = np.arange(9)
    for _ in range(3):
        cache.take(hot)
    for ids in trace(4):
        cache.reveal(ids)
    cache.forget()
    before = cache.counters.remote_rows
    assert np.array_equal(cache.take(hot), rows[hot])
    assert cache.counters.remote_rows == before
    cache.reveal(np.array([1, 2]))
    for ids in ([30, 31], [4, 5, 6], [1, 2]):  # none of them as announced
        assert np.array_equal(cache.take(np.array(ids)), rows[ids])


@pytest.mark.parametrize("policy", ["auto", "lru", "none"])
def test_repeated_ids_are_served_and_count_once(policy: str) -> None:
    rows = table()
    cache = Cache(rows, 5, policy)
    ids = np.array([7, 7, 3, 7, 3])
    cache.reveal(ids)
    assert np.array_equal(cache.take(ids), rows[ids])
    assert cache.counters.requests == 2
    assert cache.counters.remote_rows == 2


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.bool_, np.uint8])
def test_rows_of_any_dtype_are_kept(dtype: Any) -> None:
    rows = table(dtype, 1)
    cache = Cache(rows, 9, "lru")
    for ids in trace():
        assert np.array_equal(cache.take(ids), rows[ids])


def test_no_ids_are_no_rows() -> None:
    assert Cache(table(), 5).take(np.array([], np.int64)).shape == (0, 3)


@pytest.mark.parametrize("policy", ["auto", "lru", "massivegnn", "degree"])
def test_a_failing_source_leaves_the_cache_right(policy: str) -> None:
    rows = table()
    fail = [False]

    def source(ids: Any) -> Any:
        if fail[0]:
            raise TimeoutError("slow")
        return rows[ids]

    params = {"delta": 2} if policy == "massivegnn" else {}
    cache = Cache(
        source, 9, policy, num_rows=NUM_ROWS, scores=np.arange(NUM_ROWS), retries=1, pause_seconds=0, **params
    )
    for n, ids in enumerate(trace(60)):
        fail[0] = n % 3 == 2
        try:
            assert np.array_equal(cache.take(ids), rows[ids])
        except InputError as error:
            assert "slow" in str(error)  # noqa: PT017 - whether it fails depends on what is kept
    assert cache.counters.failures >= 2


def test_clearing_forgets_the_rows() -> None:
    cache = Cache(table(), 9, "lru")
    cache.take(np.arange(5))
    cache.clear()
    cache.take(np.arange(5))
    assert cache.counters.hits == 0


def test_threads_share_a_cache() -> None:
    rows = table()
    cache = Cache(rows, 9, "lru")
    wrong = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            ids = rng.choice(NUM_ROWS, 8, replace=False)
            if not np.array_equal(cache.take(ids), rows[ids]):
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert cache.counters.requests == 3 * 200 * 8


BAD: list[tuple[dict[str, Any], str]] = [
    ({"capacity": 0}, "capacity=0"),
    ({"capacity": -4}, "capacity"),
    ({"policy": "fifo"}, "choose one of"),
    ({"policy": "degree"}, "scores"),
    ({"policy": "lru", "gamma": 2}, "no parameter"),
    ({"source": lambda ids: ids}, "num_rows"),
    ({"local": np.ones(3, bool)}, "local"),
    ({"halo": np.ones(NUM_ROWS)}, "truth"),
    ({"retries": -1}, "retries"),
    ({"window": -1}, "window"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cache(**{"source": table(), "capacity": 5, **given})


@pytest.mark.parametrize("ids", [[50], [-1], [[1]], [0.5]])
def test_ids_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(InputError, match="ids"):
        Cache(table(), 5).take(ids)


@pytest.mark.parametrize("policy", ["none", "lru"])
def test_missing_lists_what_the_source_would_be_asked_for(policy: str) -> None:
    local = np.zeros(20, bool)
    local[:5] = True
    cache = Cache(np.arange(40.0).reshape(20, 2), 0 if policy == "none" else 6, policy, local=local)
    assert cache.missing([9, 3, 7, 9]).tolist() == [7, 9]
    cache.take([9, 3])
    assert cache.missing([9, 3, 7]).tolist() == ([7, 9] if policy == "none" else [7])


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("policy", [*ONLINE, "none"])
def test_rounded_rows_are_those_of_a_source_that_was_rounded_before(policy: str, precision: str) -> None:
    rows, scores, local = table(), np.arange(NUM_ROWS), np.arange(NUM_ROWS) % 3 == 0
    before = widened(narrowed(rows, precision), precision)
    assert not np.array_equal(before, rows)
    for source in (rows, lambda ids: rows[ids]):
        given = {"num_rows": NUM_ROWS, "scores": scores, "local": local}
        cache = Cache(source, 9, policy, precision=precision, **given)
        plain = Cache(before, 9, policy, **given)
        for ids in trace():
            twice = np.concatenate((ids, ids[:2]))
            for wanted in (ids, twice):
                got = cache.take(wanted)
                assert got.dtype == np.float32
                assert np.array_equal(got, plain.take(wanted))
        assert cache.row == ((3,), np.dtype(np.float32)) or (policy == "none" and cache.row is None)
        assert cache.counters.hits == plain.counters.hits
        assert 2 * cache.counters.remote_bytes == plain.counters.remote_bytes


def test_a_rounded_batch_is_written_where_it_is_wanted() -> None:
    rows = table()
    cache = Cache(rows, 9, "lru", precision="float16")
    out = np.full((6, 3), np.nan, np.float32)
    cache.fill(np.array([4, 1, 4, 49, 0, 1]), out)
    assert np.array_equal(out, rows.astype(np.float16).astype(np.float32)[[4, 1, 4, 49, 0, 1]])
    with pytest.raises(InputError, match="float32"):
        cache.fill(np.arange(6), np.empty((6, 3), np.float16))


def test_rows_that_cannot_be_rounded_are_refused() -> None:
    with pytest.raises(InputError, match="precision='int8' is unknown"):
        Cache(table(), 9, precision="int8")
    with pytest.raises(InputError, match="int64 are not rounded"):
        Cache(np.arange(8).reshape(4, 2), 2, "lru", precision="float16").take([1])
    with pytest.raises(InputError, match="float16 only 65504"):
        Cache(table() * np.float32(1e6), 9, "lru", precision="float16").take([1, 2, 3])


def test_processes_that_share_a_cache_round_alike() -> None:
    rows, name = table(), f"rounded-{os.getpid()}"
    cache = Cache(rows, 9, "lru", shared=name, precision="bfloat16")
    assert np.array_equal(cache.take([3, 4]), widened(narrowed(rows[3:5], "bfloat16"), "bfloat16"))
    with pytest.raises(InputError, match="in use for something other"):
        Cache(rows, 9, "lru", shared=name, precision="float16")
    again = pickle.loads(pickle.dumps(cache))
    assert again.precision == "bfloat16"
    again.close()
    cache.close()


class Counting:
    """Rows of an array, and how many of them were asked for."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.num_rows, self.asked = rows, rows.shape[0], 0

    def take(self, ids: Any) -> Any:
        self.asked += ids.size
        return self.rows[ids]


def _pipeline(cache: Cache, rows: Any, batches: list[Any], ahead: int, made_ahead: int | None = None) -> None:
    """Takes batches while `ahead` others are under way, of which `made_ahead` are made.

    What is handed out is written to.
    """
    late = ahead - (ahead if made_ahead is None else made_ahead)  # how much later than booked a batch is made
    booked: list[Any] = []
    made: list[Any] = []
    for number in range(len(batches) + ahead):
        if number < len(batches):
            booked.append(cache.book(batches[number]))
        if 0 <= number - late < len(batches):
            wanted = batches[number - late]
            with cache.making(booked[number - late]):
                made.append(cache.take(wanted))
            assert np.array_equal(made[-1], rows[wanted])
        if number >= ahead:
            if booked[number - ahead] is not None:
                cache.reclaim(booked[number - ahead])
            made[number - ahead][:] = np.nan


@pytest.mark.parametrize(
    ("ahead", "made_ahead"), [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 3), (4, 4)]
)
@pytest.mark.parametrize("is_repeated", [False, True])
def test_batches_under_way_lend_their_rows_and_take_no_slots(
    ahead: int, made_ahead: int, is_repeated: bool
) -> None:
    """As few rows as any policy can: kept when their batch is used, for those that need them soonest.

    However many of the batches under way are made.
    """
    rows, batches = table(), trace(60)
    asked = [np.concatenate((ids, ids[::2])) for ids in batches] if is_repeated else batches
    source: Any = Counting(rows)
    cache = Cache(source, 9, window=len(batches))
    for ids in batches:
        cache.reveal(ids)
    _pipeline(cache, rows, asked, ahead, made_ahead)
    assert cache.counters.hits + source.asked == cache.counters.requests
    assert source.asked == _fewest(batches, 9, ahead)
    assert cache.known == 0


def _fewest(batches: list[Any], slots: int, ahead: int) -> int:
    """Rows fetched by one who keeps, of all that is at hand, what is needed soonest after its batch left."""
    sets = [set(ids.tolist()) for ids in batches]
    kept: set[int] = set()
    fetched = 0

    def next_use(row: int, number: int) -> int:
        return next((k for k in range(number + 1, len(sets)) if row in sets[k]), len(sets))

    for number, wanted in enumerate(sets):
        free: set[int] = set().union(*sets[max(0, number - ahead) : number])
        fetched += len(wanted - kept - free)
        if number >= ahead:
            lent: set[int] = set().union(*sets[number - ahead + 1 : number + 1])
            here = sorted((kept | sets[number - ahead]) - lent, key=lambda row: next_use(row, number))
            kept = set(here[:slots])
    return fetched


@pytest.mark.parametrize("policy", ["auto", "lru", "presample", "none"])
def test_lending_changes_no_row_whatever_comes_between(policy: str) -> None:
    rows, batches = table(), trace(40)
    cache = Cache(rows, 9 if policy != "none" else 0, policy, scores=np.arange(NUM_ROWS))
    for number, ids in enumerate(batches):
        cache.reveal(ids if number % 7 else batches[0])  # some are not what was announced
    repeated = [np.concatenate((ids, ids[::2])) for ids in batches]
    _pipeline(cache, rows, repeated, 3, 1)
    booked = cache.book(repeated[0])
    with cache.making(booked):
        first = cache.take(repeated[0])
    cache.withdraw()
    first[:] = np.nan
    if booked is not None:
        cache.reclaim(booked)  # under way no more: nothing of it is kept
    cache.forget()
    _pipeline(cache, rows, batches, 2)
    cache.clear()
    _pipeline(cache, rows, batches[:3], 1)


def test_what_is_taken_outside_is_not_lent_and_ends_what_was_booked() -> None:
    rows = table()
    source: Any = Counting(rows)
    cache = Cache(source, 2, window=4)
    batches = [np.array(ids) for ids in ([1, 2, 3], [3, 4], [1, 3])]
    for ids in batches:
        cache.reveal(ids)
    first, second = cache.book(batches[0]), cache.book(batches[1])
    assert first is not None
    assert second is not None
    assert first.wanted.tolist() == [1, 2, 3]
    assert second.wanted.tolist() == [4]
    with cache.making(first):
        cache.take(batches[0])
    assert cache.missing(np.array([1, 4, 5])).tolist() == [5]
    outside = cache.take(np.array([5, 6]))  # nobody announced it: what was under way is forgotten
    outside[:] = np.nan
    cache.reclaim(first)
    with cache.making(second):
        assert np.array_equal(cache.take(batches[1]), rows[batches[1]])
    assert np.array_equal(cache.take(np.array([5, 6, 1])), rows[[5, 6, 1]])


def test_a_booked_batch_lies_where_it_was_wanted() -> None:
    rows = table()
    cache = Cache(rows, 2, window=4)
    for ids in ([1, 2, 3], [3, 4], [4, 1]):
        cache.reveal(np.array(ids))
    room = np.full((3, *rows.shape[1:]), np.nan, rows.dtype)
    first = cache.book(np.array([1, 2, 3]), lambda count: room)
    assert cache.room is None  # of the batch being made, and none is
    second, other = cache.book(np.array([3, 4])), np.empty((2, *rows.shape[1:]), rows.dtype)
    with cache.making(first):
        assert cache.room is room
        assert cache.take(np.array([1, 2, 3]), room) is room
    assert np.array_equal(room, rows[[1, 2, 3]])
    with cache.making(second):
        cache.take(np.array([3, 4]), other)  # elsewhere than it was booked
    assert np.array_equal(other, rows[[3, 4]])
    third = cache.book(np.array([4, 1]))
    with cache.making(third):
        assert np.array_equal(cache.take(np.array([4, 1])), rows[[4, 1]])


def test_a_batch_that_could_not_be_fetched_is_left_out() -> None:
    rows = table()

    def failing(ids: Any) -> Any:
        if (ids == 2).any():
            raise OSError("gone")
        return rows[ids]

    cache = Cache(failing, 2, num_rows=NUM_ROWS, window=4, retries=0)
    batches = [np.array(ids) for ids in ([1, 2], [3], [1, 3])]
    for ids in batches:
        cache.reveal(ids)
    booked = [cache.book(ids) for ids in batches]
    with cache.making(booked[0]), pytest.raises(InputError, match="gone"):
        cache.take(batches[0])
    for ids, lent in zip(batches[1:], booked[1:], strict=True):
        with cache.making(lent):
            assert np.array_equal(cache.take(ids), rows[ids])
        assert lent is not None
        cache.reclaim(lent)
