"""One buffer for all processes of a machine: found by name, right after a crash, gone with its last user."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features.cache import Cache
from plait.features.segment import Segment, segment_path

fcntl = pytest.importorskip("fcntl")

TABLE = np.random.default_rng(0).random((300, 5))
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def name() -> Any:
    chosen = f"test-{uuid.uuid4().hex[:12]}"
    yield chosen
    gc.collect()
    assert files(chosen) == []


def files(name: str) -> list[Path]:
    path = segment_path(name)
    return sorted(path.parent.glob(path.name + "*"))


def no_mending() -> None:
    raise AssertionError("nothing was broken")


def test_the_first_one_brings_the_arrays_and_all_see_them(name: str) -> None:
    first = Segment(name, "numbers", [np.arange(5), np.ones((2, 3), np.float32)], no_mending)
    second = Segment(name, "numbers", [np.zeros(5, np.int64), np.zeros((2, 3), np.float32)], no_mending)
    second.arrays[0][2] = 77
    assert first.arrays[0].tolist() == [0, 1, 77, 3, 4]
    assert np.array_equal(second.arrays[1], np.ones((2, 3)))
    first.close()
    assert files(name)
    second.close()
    assert second.arrays[0][2] == 77  # still mapped here


def test_only_one_is_inside(name: str) -> None:
    segments = [Segment(name, "count", [np.zeros(1, np.int64)], no_mending) for _ in range(3)]

    def add(segment: Segment) -> None:
        for _ in range(300):
            with segment:
                segment.arrays[0][0] += 1

    threads = [threading.Thread(target=add, args=(s,)) for s in segments]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert segments[0].arrays[0][0] == 900
    for s in segments:
        s.close()


def test_what_is_meant_otherwise_is_refused(name: str) -> None:
    kept = Segment(name, "a", [np.zeros(3)], no_mending)
    for signature, size in (("b", 3), ("a", 4)):
        with pytest.raises(InputError, match="another name"):
            Segment(name, signature, [np.zeros(size)], no_mending)
    assert kept.arrays[0].tolist() == [0, 0, 0]
    kept.close()


def test_an_error_inside_is_mended_by_the_next(name: str) -> None:
    mended = []
    segment = Segment(name, "a", [np.zeros(3)], lambda: mended.append(True))
    with pytest.raises(KeyError), segment:
        raise KeyError
    with segment:
        assert mended == [True]
    with segment:
        assert mended == [True]
    segment.close()


@pytest.mark.parametrize("bad", ["", "a/b", "..", "x" * 99])
def test_bad_names_are_refused(bad: str) -> None:
    with pytest.raises(InputError, match="shared="):
        segment_path(bad)


@pytest.mark.parametrize("policy", ["auto", "lru", "lfu", "clock", "s3fifo", "degree"])
def test_caches_of_one_name_hold_their_rows_together(name: str, policy: str) -> None:
    scores = np.arange(300) if policy == "degree" else None
    caches = [Cache(TABLE, 120, policy, shared=name, scores=scores) for _ in range(2)]
    hot = np.arange(200, 300)
    caches[0].take(hot)
    fetched = caches[1].counters.remote_rows
    assert np.array_equal(caches[1].take(hot[::-1].copy()), TABLE[199:300][:0:-1])
    assert caches[1].counters.remote_rows == fetched
    rng = np.random.default_rng(1)
    for n in range(60):
        ids = rng.integers(0, 300, 50)
        assert np.array_equal(caches[n % 2].take(ids), TABLE[ids])


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.bool_, np.complex128, "U3"])
def test_rows_of_any_dtype_are_shared(name: str, dtype: Any) -> None:
    table = (TABLE * 9).astype(dtype)
    caches = [Cache(table, 40, shared=name) for _ in range(2)]
    for cache in caches:
        assert np.array_equal(cache.take(np.arange(30)), table[:30])


def _take(name: str, seed: int, out: Any) -> None:
    cache = Cache(TABLE, 90, "sieve", shared=name)
    rng = np.random.default_rng(seed)
    right = True
    for _ in range(150):
        ids = rng.integers(0, 150, 40)
        right &= bool(np.array_equal(cache.take(ids), TABLE[ids]))
    out.put((right, cache.counters.hits))


def _die_inside(name: str) -> None:
    cache = Cache(TABLE, 90, "sieve", shared=name)
    cache.take(np.arange(50))
    with cache._ruling:
        cache._rule.slot_of[:] = 3  # half-way through a change
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_processes_are_served_the_right_rows(name: str) -> None:
    out = SPAWN.Queue()
    workers = [SPAWN.Process(target=_take, args=(name, seed, out)) for seed in range(2)]
    for w in workers:
        w.start()
    results = [out.get(timeout=120) for _ in workers]
    for w in workers:
        w.join()
    assert all(right and hits > 0 for right, hits in results)


@pytest.mark.processes
def test_a_process_killed_inside_leaves_no_wrong_row_and_no_file(name: str) -> None:
    cache = Cache(TABLE, 90, "sieve", shared=name)
    cache.take(np.arange(100))
    worker = SPAWN.Process(target=_die_inside, args=(name,))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    for _ in range(3):
        assert np.array_equal(cache.take(np.arange(100)), TABLE[:100])
    del cache
    gc.collect()
    assert files(name) == []
    worker = SPAWN.Process(target=_die_inside, args=(name,))  # the last user is killed: its file stays
    worker.start()
    worker.join()
    assert files(name)
    again = Cache(TABLE, 90, "sieve", shared=name)  # and the next takes it for stale
    assert np.array_equal(again.take(np.arange(100)), TABLE[:100])


def test_a_thousand_early_breaks_leave_no_segment(name: str) -> None:
    from plait.loader import NeighborLoader
    from tests.loader.batches import small_data

    data = small_data()
    for _ in range(20):
        cache = Cache(data.x, 30, shared=name)
        loader = NeighborLoader(data, [2], batch_size=10, prefetch=2, features=cache)
        for _ in range(50):
            for _batch in loader:
                break
        del cache, loader
        gc.collect()
        assert files(name) == []
    assert not any(t.name.startswith("plait-prefetch") for t in threading.enumerate())


@pytest.mark.processes
def test_worker_processes_share_it_and_change_no_batch(name: str) -> None:
    from plait.loader import NeighborLoader
    from tests.loader.batches import are_same, small_data

    data = small_data()
    cache = Cache(data.x, 30, shared=name)
    given = {"batch_size": 6, "seed": 8}
    workers = NeighborLoader(data, [3, 2], features=cache, num_workers=2, **given)
    assert are_same(list(workers), list(NeighborLoader(data, [3, 2], **given)))
    with cache._ruling:
        assert (cache._rule.id_of >= 0).sum() == 30  # the workers filled it


def test_a_copy_attaches_to_the_same_buffer(name: str) -> None:
    cache = Cache(TABLE, 30, shared=name)
    cache.take(np.arange(20))
    copy = pickle.loads(pickle.dumps(cache))
    before = copy.counters.remote_rows
    assert np.array_equal(copy.take(np.arange(20)), TABLE[:20])
    assert copy.counters.remote_rows == before
    copy.close()
    with pytest.raises(InputError, match="shared="):
        pickle.dumps(Cache(TABLE, 30))


@pytest.mark.parametrize("policy", ["lookahead", "massivegnn", "none"])
def test_rules_that_cannot_be_shared_are_refused(policy: str) -> None:
    with pytest.raises(InputError, match="cannot be shared"):
        Cache(TABLE, 30, policy, shared="test-refused", scores=np.ones(300))
    assert files("test-refused") == []


def test_clearing_empties_it_for_all(name: str) -> None:
    one, two = (Cache(TABLE, 30, shared=name) for _ in range(2))
    one.take(np.arange(20))
    two.clear()
    before = one.counters.remote_rows
    one.take(np.arange(20))
    assert one.counters.remote_rows == before + 20
