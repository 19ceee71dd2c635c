"""The order of an epoch and the jobs it is made of."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from plait.errors import InputError
from plait.features import simulate
from plait.features.cache import Cache
from plait.features.waiting import Lent
from plait.loader import NeighborLoader
from plait.loader.epochs import Job, Shuffled, shuffled
from tests.loader.batches import small_data


def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    order = Shuffled(50, 3)
    first = list(order)
    assert sorted(first) == list(range(50))
    assert list(order) == first
    order.epoch = 1
    assert list(order) != first
    assert list(Shuffled(50, 4)) != first
    assert isinstance(order, RandomSampler)
    assert len(order) == 50


@pytest.mark.parametrize(
    "given", [{}, {"shuffle": True, "sampler": [1]}, {"shuffle": True, "generator": object()}]
)
def test_what_the_user_brings_is_left_alone(given: dict[str, Any]) -> None:
    assert shuffled(5, 0, given) == given


def test_shuffle_becomes_an_order_of_our_own() -> None:
    assert isinstance(shuffled(5, 0, {"shuffle": True})["sampler"], Shuffled)


def test_a_job_names_itself() -> None:
    assert str(Job(2, 7, [0])) == "batch 7 of epoch 2"


def test_a_batch_sampler_of_the_user_is_followed() -> None:
    data = small_data()
    loader = NeighborLoader(data, [2], batch_sampler=[[4, 2], [9]], prefetch=1)
    assert [b.n_id[: b.batch_size].tolist() for b in loader] == [[4, 2], [9]]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_torchs_own_batch_sampler_may_be_given(prefetch: int) -> None:
    order = torch.utils.data.BatchSampler([7, 3, 5, 1, 9], 2, drop_last=True)
    loader = NeighborLoader(small_data(), [2], batch_sampler=order, prefetch=prefetch)
    assert [batch.input_id.tolist() for batch in loader] == [[7, 3], [5, 1]]


def test_without_a_batch_size_every_input_is_a_batch() -> None:
    loader = NeighborLoader(small_data(), [2], torch.tensor([5, 8]), batch_size=None)
    assert [b.n_id[0].item() for b in loader] == [5, 8]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_those_of_torchs_batch_sampler(drop_last: bool, shuffle: bool) -> None:
    data = small_data()
    loader = NeighborLoader(data, [2], batch_size=7, drop_last=drop_last, shuffle=shuffle, seed=3)
    expected = list(loader.batch_sampler)
    assert [b.input_id.tolist() for b in loader] == expected
    assert len(loader) == len(expected)


def test_a_budget_changes_no_batch() -> None:
    data = small_data()
    given = {"batch_size": 8, "seed": 1}
    one = [b.n_id for b in NeighborLoader(data, [2], **given)]
    two = [b.n_id for b in NeighborLoader(data, [2], prefetch=4, budget_bytes=2000, **given)]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_waiting_is_reported() -> None:
    def slow(batch: Any) -> Any:
        time.sleep(0.02)
        return batch

    loader = NeighborLoader(small_data(), [2], batch_size=8, prefetch=1, transform=slow)
    assert loader.stalled_seconds == 0
    list(loader)
    assert loader.stalled_seconds > 0.01  # nothing is ready before the first batch was slept for


def test_two_iterators_do_not_disturb_each_other() -> None:
    loader = NeighborLoader(small_data(), [2], batch_size=8, prefetch=2, shuffle=True, seed=1)
    expected = [[b.n_id for b in loader] for _ in range(2)]
    loader.set_epoch(0)
    pairs = list(zip(loader, loader, strict=True))
    for k in range(2):
        assert all(torch.equal(pair[k].n_id, n_id) for pair, n_id in zip(pairs, expected[k], strict=True))


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_cache_may_be_told_of_the_next_epoch(prefetch: int) -> None:
    data = small_data()
    given = {"batch_size": 8, "shuffle": True, "seed": 1, "prefetch": prefetch}
    plain = NeighborLoader(data, [2], **given)
    cache = Cache(data.x, 20, "lookahead", window=5)
    seeing = NeighborLoader(data, [2], features=cache, **given)
    seeing._sees_past_epochs = True
    batches = []
    for _ in range(4):
        for expected, batch in zip(plain, seeing, strict=True):
            assert torch.equal(batch.n_id, expected.n_id)
            assert torch.equal(batch.x, expected.x)
            batches.append(batch.n_id.numpy())
    # as if all epochs were one, but for the first batches, when the window fills by and by; or less, where
    # batches under way lend their rows
    as_one = simulate(batches, 20, "lookahead", window=5).remote_rows
    assert cache.counters.remote_rows <= as_one + 3
    assert prefetch or as_one <= cache.counters.remote_rows
    forgetting = Cache(data.x, 20, "lookahead", window=5)
    blind = NeighborLoader(data, [2], features=forgetting, **given)
    assert sum(1 for _ in range(4) for _ in blind) == len(batches)
    gained = forgetting.counters.remote_rows - cache.counters.remote_rows
    assert gained >= 0 if prefetch else gained > 0  # batches under way look ahead as well
    next(iter(seeing))  # left early, and resumed elsewhere
    seeing.set_epoch(1)
    plain.set_epoch(1)
    for expected, batch in zip(plain, seeing, strict=True):
        assert torch.equal(batch.x, expected.x)
    next(iter(seeing))
    assert all(torch.equal(batch.x, data.x[batch.n_id]) for batch in seeing)


def _seeing(data: Any, capacity: int = 40) -> tuple[NeighborLoader, Cache]:
    """A loader whose cache is told of the next epoch's batches, and the cache."""
    cache = Cache(data.x, capacity, "lookahead", window=12)
    given = {"batch_size": 10, "shuffle": True, "seed": 1, "prefetch": 3}
    loader = NeighborLoader(data, [3, 2], features=cache, **given)
    loader._sees_past_epochs = True
    return loader, cache


def _batches_alive() -> int:
    """Batches that were booked and that anything still refers to."""
    return sum(type(one) is Lent for one in gc.get_objects())


def test_the_next_epoch_begins_while_this_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many batches are under way at the end of an epoch as ever, so fewer rows are fetched."""
    data = small_data(200, 1500)
    rows = []
    for begins in (True, False):
        before = _batches_alive()
        loader, cache = _seeing(data)
        if not begins:
            monkeypatch.setattr(loader, "_begin_next", lambda *_: None)
        for _ in range(5):
            for batch in loader:
                assert torch.equal(batch.x, data.x[batch.n_id])
                # what was handed out keeps no memory: those under way, that in use and the one before it
                assert _batches_alive() - before <= loader.prefetch + 2
            assert cache._waiting is not None
            assert len(cache._waiting) == (loader.prefetch if begins else 0)
        rows.append(cache.counters.remote_rows)
    assert rows[0] < 0.95 * rows[1]


def _leave_at_the_end(loader: NeighborLoader, data: Any) -> None:
    """Takes all batches of an epoch and does not ask whether there are more."""
    batches = iter(loader)
    for _ in range(len(loader)):
        batch = next(batches)
        assert torch.equal(batch.x, data.x[batch.n_id])
    batches.close()  # type: ignore[attr-defined]


def _gone(drawn: Any) -> Any:
    raise OSError("gone")


@pytest.mark.parametrize("happening", ["left", "cleared", "forgotten", "taken", "moved", "failed"])
def test_what_was_begun_may_be_dropped(happening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes between two epochs, the next one has its batches in their order."""
    data = small_data(200, 1500)
    plain = NeighborLoader(data, [3, 2], batch_size=10, shuffle=True, seed=1)
    loader, cache = _seeing(data)
    list(loader)
    if happening == "left":
        _leave_at_the_end(loader, data)
    elif happening == "cleared":
        cache.clear()
    elif happening == "forgotten":
        cache.forget()
    elif happening == "taken":
        assert torch.equal(torch.from_numpy(cache.take([3, 190])), data.x[[3, 190]])
    elif happening == "moved":
        loader.set_epoch(7)
    else:
        monkeypatch.setattr(loader, "fill", _gone)
        with pytest.raises(OSError, match="gone"):
            next(iter(loader))
        monkeypatch.undo()
    plain.set_epoch(loader.epoch)
    for _ in range(2):
        for expected, batch in zip(plain, loader, strict=True):
            assert torch.equal(batch.n_id, expected.n_id)
            assert torch.equal(batch.x, expected.x)


def test_what_is_fetched_does_not_depend_on_who_is_slow() -> None:
    """Whether batches wait for their use or the loop for its batches."""
    data = small_data(200, 1500)
    found = []
    for slow in ("nobody", "source", "loop"):

        def source(ids: Any, slow: str = slow) -> Any:
            time.sleep(0.003 * (slow == "source"))
            return data.x.numpy()[ids]

        cache = Cache(source, 40, num_rows=200, window=6)
        loader = NeighborLoader(data, [3, 2], features=cache, batch_size=10, shuffle=True, seed=1, prefetch=3)
        for batch in loader:
            assert torch.equal(batch.x, data.x[batch.n_id])
            time.sleep(0.003 * (slow == "loop"))
        found.append((cache.counters.remote_rows, cache.counters.hits, cache.counters.evictions))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("transform", [None, lambda batch: _spoilt(batch)])
def test_batches_may_be_written_to_once_they_are_handed_out(transform: Any) -> None:
    data = small_data()
    given = {"batch_size": 8, "shuffle": True, "seed": 1}
    cache = Cache(data.x, 20, "lookahead", window=5)
    plain = NeighborLoader(data, [2], **given)
    cached = NeighborLoader(data, [2], features=cache, prefetch=3, transform=transform, **given)
    for _ in range(3):
        for n, (expected, batch) in enumerate(zip(plain, cached, strict=False)):
            assert torch.equal(batch.x, expected.x if transform is None else torch.zeros_like(expected.x))
            _spoilt(batch)
            if n == 4:
                break
    assert cache._waiting is None or len(cache._waiting) == 0
    assert (cache._waiting is None) == (transform is not None)


def _spoilt(batch: Any) -> Any:
    batch.x.zero_()
    return batch


def test_epochs_count_from_zero() -> None:
    with pytest.raises(InputError, match="epoch"):
        NeighborLoader(small_data(), [2]).set_epoch(-1)


@pytest.mark.parametrize(
    "way", [{}, {"prefetch": 2}, {"features": True, "prefetch": 2}, {"num_workers": 1}], ids=str
)
@pytest.mark.processes
def test_batches_go_to_the_device_by_every_road(way: dict[str, Any]) -> None:
    data = small_data()
    if "features" in way:
        way = {**way, "features": Cache(data.x, 9)}
    loader = NeighborLoader(data, [2], batch_size=20, device="meta", **way)
    assert [b.x.device.type for b in loader] == ["meta"] * 3
