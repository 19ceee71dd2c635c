"""Which feature rows stay near the device: pure rules that see ids and answer with slots, never with data.

A batch is looked up as a whole against what the cache held before it; then the rule decides which of its rows
are kept. A rule may keep none of them: the batch has its rows anyway. `step` returns what a cache must do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.features import eviction, lookahead

__all__ = ["LookAhead", "MassiveGNN", "NoCache", "Policy", "Recency", "Static", "Step"]

Array = NDArray[Any]
_NOTHING = np.empty(0, np.int64)
_NONE_HELD = np.empty(0, np.bool_)


@dataclass(frozen=True, eq=False)
class Step:
    """What one batch does to the cache, in this order.

    Row i of the batch is read from slots[i] (-1: it must be fetched); then row positions[j] of the batch is
    written to places[j]; rows `extra` are fetched besides and written to extra_places.
    """

    slots: Array
    positions: Array
    places: Array
    hits: int
    evicted: int
    extra: Array = field(default_factory=lambda: _NOTHING)
    extra_places: Array = field(default_factory=lambda: _NOTHING)


class Policy:
    """A rule with the slots it has filled: slot_of[id] and id_of[slot], -1 where there is none."""

    # Whether all that the rule remembers are arrays of fixed size, which processes can share.
    is_plain = False

    def __init__(self, capacity: int, num_ids: int) -> None:
        if capacity < 1:
            raise InputError(
                f"capacity={capacity}: a cache holds at least one row; use policy='none' for no cache"
            )
        self.capacity = min(int(capacity), num_ids)
        self.slot_of = np.full(num_ids, -1, np.int32)
        self.id_of = np.full(self.capacity, -1, np.int32)

    def arrays(self) -> dict[str, Array]:
        """What a plain rule remembers."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def prefill(self) -> Array:
        """The ids to fetch before the first batch, for slots 0, 1, ...; none unless the rule says so."""
        return _NOTHING

    def step(self, ids: Array) -> Step:
        """Looks the batch up, then lets the rule keep what it wants of it."""
        slots = np.empty(ids.size, np.int32)
        hits = int(eviction.look_up(self.slot_of, ids, slots))
        return self._answer(ids, slots, hits, self._update(ids, slots))

    def _update(self, ids: Array, slots: Array) -> int:
        """Changes the slots; the number of empty ones it filled."""
        raise NotImplementedError

    def _answer(self, ids: Array, slots: Array, hits: int, filled: int) -> Step:
        positions, places = np.empty(ids.size, np.int32), np.empty(ids.size, np.int32)
        count = int(eviction.admitted(self.slot_of, ids, slots, positions, places))
        return Step(slots, positions[:count], places[:count], hits, count - filled)


class NoCache(Policy):
    """Keeps nothing."""

    def __init__(self, num_ids: int) -> None:
        super().__init__(1, num_ids)

    def _update(self, ids: Array, slots: Array) -> int:
        return 0


class Static(Policy):
    """Keeps the rows with the largest positive scores once they have been fetched, and never lets go.

    Nothing is fetched ahead of need. Rows tied at the limit share the slots left to them in order of arrival,
    which favours the hotter ones (counts from few batches tie a lot); unclaimed slots go to any row.
    """

    is_plain = True

    def __init__(self, capacity: int, num_ids: int, scores: Array) -> None:
        super().__init__(capacity, num_ids)
        count = min(self.capacity, int((scores > 0).sum()))
        self._heat = np.zeros(num_ids, np.int8)
        if count:
            limit = np.partition(scores, num_ids - count)[num_ids - count]
            self._heat[scores == limit] = 1
            self._heat[scores > limit] = 2
        hotter = int((self._heat == 2).sum())
        self._state = np.array([0, hotter, count - hotter])

    def _update(self, ids: Array, slots: Array) -> int:
        unused = _NOTHING
        return int(
            eviction.static(ids, slots, self.slot_of, self.id_of, unused, unused, self._heat, self._state)
        )


class Recency(Policy):
    """The classical online rules: lru, lfu, clock, sieve and s3fifo."""

    is_plain = True

    RULES: dict[str, tuple[Callable[..., int], int]] = {  # noqa: RUF012 - a table, never written
        "lru": (eviction.lru, 1),
        "lfu": (eviction.lfu, 4096),
        "clock": (eviction.clock, 0),
        "sieve": (eviction.sieve, 1),
        "s3fifo": (eviction.s3fifo, 2),
    }

    def __init__(self, capacity: int, num_ids: int, rule: str, small: float = 0.1) -> None:
        """`small` is the share of s3fifo's small queue."""
        super().__init__(capacity, num_ids)
        self._kernel, lists = self.RULES[rule]
        self._ahead = np.arange(self.capacity + lists, dtype=np.int32)
        self._behind = self._ahead.copy()
        self._mark = np.zeros(self.capacity, np.int32)
        self._state = np.zeros(4, np.int64)
        self._ghost = _NOTHING
        if rule == "sieve":
            self._state[1] = self.capacity
        if rule == "s3fifo":
            if not 0 < small < 1:
                raise InputError(f"small={small}: the small queue takes a share between 0 and 1")
            self._state[2] = max(1, int(small * self.capacity))
            self._ghost = np.zeros(num_ids, np.int64)

    def _update(self, ids: Array, slots: Array) -> int:
        lists = (self._ahead, self._behind, self._mark, self._state)
        ghost = (self._ghost,) if self._ghost.size else ()
        return int(self._kernel(ids, slots, self.slot_of, self.id_of, *lists, *ghost))


class MassiveGNN(Policy):
    """MassiveGNN's rule as its code has it (Sarkar and others 2024): degree first, then a budget of misses.

    The hottest rows are fetched before the first batch with score 1. Every batch multiplies all scores by
    gamma; a hit takes that back. Every `delta` batches, rows whose score fell below gamma**delta, in order
    of id, make place for the rows missed most often, whose miss count becomes their score. `rounded` keeps
    the published threshold round(gamma**delta, 3) with a strict comparison in float32, which for some
    settings never evicts.
    """

    def __init__(
        self,
        capacity: int,
        num_ids: int,
        scores: Array,
        gamma: float = 0.995,
        delta: int = 32,
        rounded: bool = False,
        halo: Array | None = None,
    ) -> None:
        """`halo` marks the ids that may be cached and scored; all of them when None."""
        super().__init__(capacity, num_ids)
        if not 0 < gamma < 1:
            raise InputError(f"gamma={gamma}: the decay is between 0 and 1, such as 0.995")
        if delta < 0:
            raise InputError(f"delta={delta}: the eviction interval is a number of batches, 0 for never")
        self.gamma, self.delta, self.rounded = gamma, int(delta), rounded
        self.halo = np.ones(num_ids, bool) if halo is None else np.asarray(halo, bool)
        first = hottest(np.where(self.halo, scores, 0), self.capacity)
        self._first = np.sort(first)
        self.id_of[: first.size] = self._first
        self.slot_of[self._first] = np.arange(first.size)
        self._keep_score: Array = np.ones(self.capacity, np.float32 if rounded else np.float64)
        self._miss_score = np.zeros(num_ids)
        self._miss_score[self._first] = -1
        self._batches = 0

    def prefill(self) -> Array:
        return self._first

    def step(self, ids: Array) -> Step:
        self._batches += 1
        slots = np.empty(ids.size, np.int32)
        hits = int(eviction.look_up(self.slot_of, ids, slots))
        self._keep_score *= self.gamma
        self._keep_score[slots[slots >= 0]] /= self.gamma
        is_due = self.delta > 0 and self._batches % self.delta == 0
        tired = self._tired() if is_due else _NOTHING
        if tired.size == 0:
            missed = ids[slots < 0]
            self._miss_score[missed[self.halo[missed]]] += 1
            return Step(slots, _NOTHING, _NOTHING, hits, 0)
        new = np.flatnonzero(self._miss_score > 0)
        new = new[np.argsort(-self._miss_score[new], kind="stable")]
        count = min(tired.size, new.size)
        return self._swap(tired[:count], new[:count], slots, hits)

    def _tired(self) -> Array:
        """The slots whose score fell below the threshold, by the id they hold."""
        filled = self.id_of >= 0
        if self.rounded:
            low = self._keep_score < round(self.gamma**self.delta, 3)
        else:
            # repeated products are off by a few units in the last place; one lost batch is 1 - gamma
            low = self._keep_score <= self.gamma**self.delta * (1 + 1e-9)
        at = np.flatnonzero(filled & low)
        return at[np.argsort(self.id_of[at])]

    def _swap(self, places: Array, new: Array, slots: Array, hits: int) -> Step:
        old = self.id_of[places]
        score = self._miss_score[new].copy()
        self._miss_score[old] = self._keep_score[places]
        self._miss_score[new] = -1
        self._keep_score[places] = score
        self.slot_of[old] = -1
        self.slot_of[new] = places
        self.id_of[places] = new
        return Step(slots, _NOTHING, _NOTHING, hits, places.size, new, places)


class LookAhead(Policy):
    """Keeps what is needed soonest: Belady's rule within the batches revealed so far.

    Rows not needed in any of them are ranked by how many batches have asked for them, the revealed ones
    included. A row that would be needed later than all those kept is passed through without a slot.
    """

    def __init__(self, capacity: int, num_ids: int, window: int) -> None:
        super().__init__(capacity, num_ids)
        if window < 0:
            raise InputError(f"window={window}: give the number of batches known ahead, 0 or more")
        self.window = int(window)
        self._revealed: deque[Array] = deque()
        self._state = lookahead.start(self.capacity, num_ids, self.window)

    @property
    def known(self) -> int:
        """How many batches after the current one have been revealed."""
        return len(self._revealed)

    def announced(self, after: int = 0) -> Array | None:
        """The batch that comes `after` this many others, where it has been revealed."""
        return self._revealed[after] if after < len(self._revealed) else None

    def reveal(self, ids: Array) -> None:
        """Announces the batch after the last known one."""
        if len(self._revealed) > self.window:
            raise InputError(f"reveal: {self.window} batches ahead are known already; step first")
        self._revealed.append(ids)
        lookahead.reveal(self._state, self.slot_of, ids)

    def release(self, slots: Array) -> None:
        """Takes back slots (-1: none) whose rows a batch has that is made and not stepped yet."""
        lookahead.release(self._state, slots)

    def step(self, ids: Array, held: Array = _NONE_HELD, waiting: int = 0) -> Step:
        """As any rule's; rows of the batch that are `held` elsewhere until they are needed take no slot.

        Nor do those that one of the next `waiting` batches has, which are made already.
        """
        if not self._revealed:
            self.reveal(ids)
        if self._revealed.popleft().size != ids.size:
            raise InputError("step: this is not the batch that was revealed next; batches come in order")
        slots = np.empty(ids.size, np.int32)
        hits = int(eviction.look_up(self.slot_of, ids, slots))
        filled = lookahead.step(self._state, self.slot_of, self.id_of, ids, slots, held, waiting)
        return self._answer(ids, slots, hits, filled)


def hottest(scores: Array, count: int) -> Array:
    """The ids with the `count` largest positive scores, ties to the smaller id, in no order."""
    positive = int((scores > 0).sum())
    count = min(count, positive)
    if count == 0:
        return _NOTHING
    least = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > least)
    return np.concatenate((above, np.flatnonzero(scores == least)[: count - above.size]))
