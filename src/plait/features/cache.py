"""A cache of feature rows before a slow source: the rule says which rows stay, this file moves them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.features.counters import Counters
from plait.features.ids import Distinct, checked, first_places, mask_of
from plait.features.narrow import NarrowRows, check_precision, widened
from plait.features.policies import LookAhead, Policy
from plait.features.rows import RetryingRows, Row, as_rows, gather, place
from plait.features.segment import Segment
from plait.features.simulate import WINDOW_BATCHES, make_policy
from plait.features.stock import Stock
from plait.features.tune import Seen, Setting, first_choice, next_choice
from plait.features.waiting import Lent, Waiting

if TYPE_CHECKING:
    from plait.features.advise import Advice

__all__ = ["Cache"]

Array = NDArray[Any]

# Rows of an epoch that "auto" remembers: enough for a verdict, replayed under all rules in 0.1 s.
_TRACE_ROWS = 500_000


class Cache:
    """A cache of `capacity` rows in front of a slow `source`; read rows with `take(ids)`.

    source: an array, the path of a .npy file, or a function from an int64 array of ids to rows; a function
        needs `num_rows`, the number of rows there are. If it raises, it is called `retries` times more.
    policy: "auto" and "lookahead" keep the rows that are needed soonest. Announce batches with `reveal`, up
        to `window` of them ahead (a loader does); without that they keep the rows needed most often. "auto"
        starts like this, or as `advice` recommends, and may change its rule at `end_epoch` (a loader calls
        it) when the measured stall is not the expected one; `choice` is what was chosen and why.
    local: a mask of rows that are at hand in the source: they bypass the cache and are not counted.
    shared: a name; all processes of this machine that give it share one buffer. The rule is then an online
        or a static one ("auto": static where scores are given, else sieve). The buffer is gone when the last
        process has closed it or ended.
    precision: "float16" or "bfloat16" rounds all float32 rows and keeps them in half the bytes; `take`
        returns float32, the same for cached and fetched rows.

    Several threads may call `take`; they are served one after the other. A batch that is booked (`book`)
    lends its rows to later ones until `reclaim` hands it out.
    """

    def __init__(
        self,
        source: object,
        capacity: int,
        policy: str = "auto",
        *,
        num_rows: int | None = None,
        scores: ArrayLike | None = None,
        local: ArrayLike | None = None,
        halo: ArrayLike | None = None,
        window: int = WINDOW_BATCHES,
        retries: int = 2,
        pause_seconds: float = 0.05,
        advice: Advice | None = None,
        shared: str | None = None,
        precision: str | None = None,
        **params: Any,
    ) -> None:
        if shared is not None and policy == "auto":
            policy = "sieve" if scores is None else "presample"
        check_precision("precision", precision)
        rows = as_rows(source, num_rows)
        if precision is not None and getattr(rows, "precision", None) != precision:
            rows = NarrowRows(rows, precision)
        self.precision = precision
        self._narrow: Array | None = None  # where a batch lies until it is widened
        if rows.num_rows is None:
            raise InputError("num_rows is missing: the source does not say how many rows it has")
        self.num_rows: int = rows.num_rows
        self.choice = first_choice(policy, window, advice)
        self.policy = str(policy) if self.choice is None else self.choice.setting.policy
        if self.policy == "lookahead":
            params["window"] = window
        self.window = window if self.policy == "lookahead" else 0
        self._seen: list[Array] = []  # the batches of this epoch, for auto to replay
        self._rows_seen = 0
        self._local = mask_of("local", local, self.num_rows)
        self._halo = mask_of("halo", halo, self.num_rows)
        self._new_rule = partial(make_policy, self.policy, capacity, self.num_rows, scores, **params)
        self._rule: Policy = self._new_rule()
        self.capacity = 0 if policy == "none" else min(capacity, self.num_rows)
        self.counters = Counters()
        self._stock = Stock(RetryingRows(rows, retries, pause_seconds), self.capacity, self.counters)
        self._is_filled = False
        self._ahead: deque[Array] = deque()
        self._distinct = Distinct(self.num_rows)
        self._waiting: Waiting | None = None  # batches that were booked and are not handed out yet
        self._booked = threading.local()
        self._taking = threading.Lock()  # batches are served in turn
        # other threads and processes announce later batches to the rule while one is being fetched
        self._ruling: Segment | threading.Lock = threading.Lock()
        self.is_shared = shared is not None
        if shared is not None:
            self._ruling = self._attached(shared)
            given = {"num_rows": num_rows, "scores": scores, "local": local, "halo": halo, **params}
            given["precision"] = precision
            tries = {"retries": retries, "pause_seconds": pause_seconds, "shared": shared}
            self._made_with = ((source, capacity, policy), {**given, **tries})

    def _attached(self, name: str) -> Segment:
        """The segment of that name, with the rule's arrays and the rows in it."""
        if not self._rule.is_plain:
            raise InputError(
                f"shared: policy {self.policy!r} cannot be shared; choose an online or a static one"
            )
        row = self._stock.fetched(np.zeros(1, np.int64), 1)  # says what the rows are
        kept = np.broadcast_to(np.zeros((), row.dtype), (self.capacity, *row.shape[1:]))
        kind = self.precision or row.dtype
        signature = f"{self.policy} over {self.capacity} of {self.num_rows} rows of {kind}"
        arrays = self._rule.arrays()
        mend = weakref.WeakMethod(self._empty_rule)  # a circle would outlive the cache until collected

        def mended() -> None:
            if (empty_rule := mend()) is not None:
                empty_rule()

        segment = Segment(name, signature, [*arrays.values(), kept], mended)
        vars(self._rule).update(zip(arrays, segment.arrays, strict=False))
        self._stock.kept = segment.arrays[-1]
        return segment

    def _empty_rule(self) -> None:
        """A rule that holds nothing; a shared one stays where it is."""
        fresh = self._new_rule()
        if not self.is_shared:
            self._rule = fresh
            return
        for shared, empty in zip(self._rule.arrays().values(), fresh.arrays().values(), strict=True):
            shared[...] = empty

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy for another process: the same buffer when it is shared, none otherwise."""
        if not self.is_shared:
            raise InputError(
                "a cache stays in its process; give it a name with shared= to have it in several"
            )
        positional, named = self._made_with
        return partial(Cache, **named), positional

    def close(self) -> None:
        """Releases a shared buffer; only needed to release it before the cache is dropped."""
        if isinstance(self._ruling, Segment):
            self._ruling.close()

    def __repr__(self) -> str:
        return (
            f"Cache({self.capacity:,} of {self.num_rows:,} rows, {self.policy!r}, "
            f"hit rate {self.counters.hit_rate:.1%})"
        )

    def reveal(self, ids: ArrayLike) -> None:
        """Announces the next batch after the last known one; rules that do not look ahead ignore it."""
        if not isinstance(self._rule, LookAhead):
            return
        wanted = first_places(self._far(self._checked(ids)))
        with self._ruling:
            self._ahead.append(wanted)
            self._tell()

    @property
    def known(self) -> int:
        """The number of batches that were revealed and not requested yet."""
        return len(self._ahead) + (self._rule.known if isinstance(self._rule, LookAhead) else 0)

    def missing(self, ids: ArrayLike) -> Array:
        """The ids, each once and ascending, that would be fetched from the source now."""
        far = self._far(self._checked(ids))
        if self.policy != "none":
            with self._ruling:
                far = far[(self._rule.slot_of[far] < 0) & ~self._waits(far)]
        return np.unique(far)

    def book(self, ids: ArrayLike, memory: Callable[[int], Array | None] | None = None) -> Lent | None:
        """Settles where the rows of the next batch will come from, before they are taken; None if it cannot.

        From here on the batch serves later ones from its own memory, which is memory(number of rows) where it
        returns some, and needs no slots. What is fetched depends on the order of `book` and `reclaim` alone,
        not on how long anything takes. Only look-ahead, which knows who will need the rows, books any; nobody
        may write to them before the batch is reclaimed.
        """
        if self.precision is not None or not isinstance(self._rule, LookAhead):
            return None
        wanted = self._checked(ids)
        unique, inverse = self._distinct(wanted)
        at = np.arange(unique.size) if self._local is None else np.flatnonzero(~self._local[unique])
        far = unique[at]
        with self._ruling:
            rule = self._rule
            if not isinstance(rule, LookAhead):
                return None
            self._tell()
            announced = rule.announced(0 if self._waiting is None else len(self._waiting))
            if announced is None or not np.array_equal(announced, far):
                return None
            if self._waiting is None:
                self._waiting = Waiting(self.num_rows)
            slots = rule.slot_of[far]
            lent = self._waiting.add(unique, inverse, at, slots.copy())
            rule.release(slots)
            if memory is not None and inverse is None:
                lent.rows = memory(unique.size)
            if self._stock.source.row is not None:
                lent.room(self._stock.source.row)
        return lent

    @contextmanager
    def making(self, booked: Lent | None) -> Iterator[None]:
        """Within it, what this thread takes is the batch that was booked."""
        self._booked.batch = booked
        try:
            yield
        finally:
            self._booked.batch = None

    @property
    def room(self) -> Array | None:
        """The memory of the booked batch that this thread makes; None where its rows lie there otherwise."""
        lent: Lent | None = getattr(self._booked, "batch", None)
        return None if lent is None or lent.inverse is not None else lent.rows

    def reclaim(self, booked: Lent) -> None:
        """Hands out the batch that was booked first: it lends no longer, and the rule keeps rows of it."""
        with self._ruling:
            while self._waiting is not None and booked in self._waiting:
                first = self._waiting.first()
                if not first.is_made or first.rows is None:
                    self._forget()  # it was left out
                    return
                self._keep(first.ids, first.at, first.rows, is_handed_out=True)

    def withdraw(self) -> None:
        """Ends the lending of batches that will not be used; those still to be made take rows as usual."""
        with self._ruling:
            self._lend_none()

    def _lend_none(self) -> None:
        if self._waiting is not None:
            self._waiting.clear()

    def _waits(self, ids: Array) -> Array:
        """Which of the rows a batch under way has."""
        return np.zeros(ids.size, bool) if self._waiting is None else self._waiting.has(ids)

    def forget(self) -> None:
        """Drops what was revealed and not requested, as when an epoch was left early; the rows stay."""
        with self._taking, self._ruling:
            self._forget()
            self._seen_batches()

    def end_epoch(self, seen: Seen) -> None:
        """Lets "auto" look at a finished epoch and change its rule for the next; the rows stay."""
        with self._taking, self._ruling:
            batches = self._seen_batches()
            if self.choice is None or not batches:
                return
            chosen = next_choice(self.choice, seen, batches, self.capacity)
            if chosen.setting != self.choice.setting:
                self._switch(chosen.setting, np.bincount(np.concatenate(batches), minlength=self.num_rows))
            self.choice = chosen

    def _switch(self, setting: Setting, heat: Array) -> None:
        """Another rule over the rows there are; what it would not keep is dropped."""
        old = self._rule
        self.policy, self.window = setting.policy, setting.window
        params = {"window": setting.window} if setting.policy == "lookahead" else {}
        self._new_rule = partial(make_policy, setting.policy, self.capacity, self.num_rows, heat, **params)
        self._rule, self._is_filled = self._new_rule(), True
        self._ahead.clear()
        self._lend_none()
        held = old.id_of[old.id_of >= 0].astype(np.int64)
        kept = self._stock.kept
        if held.size == 0 or kept is None or setting.policy == "none":
            return
        step = self._rule.step(held)
        kept[step.places] = kept[old.slot_of[held[step.positions]]]

    def take(self, ids: ArrayLike, out: Array | None = None) -> Array:
        """A fresh array, or `out`, whose row i is row ids[i] of the source."""
        wanted = self._checked(ids)
        if out is not None:
            self._check_room(wanted.size, out)
        booked: Lent | None = getattr(self._booked, "batch", None)
        if booked is not None and wanted.size == _asked(booked):
            with self._taking:
                rows = self._booked_rows(booked, wanted, out)
            if rows is not None:
                return rows
        with self._taking:
            unique, inverse = self._distinct(wanted)
            if self.precision is not None:
                return self._widened(unique, inverse, self.precision, out)
            rows = self._distinct_rows(unique, out if inverse is None else None)
        if inverse is None:
            return rows
        if out is None:
            out = np.empty((wanted.size, *rows.shape[1:]), rows.dtype)
        gather(rows, inverse, out)
        return out

    def _booked_rows(self, lent: Lent, wanted: Array, out: Array | None) -> Array | None:
        """The rows of a batch that was booked, in `out` where it is given; None where it is not under way."""
        if not np.array_equal(lent.unique if lent.inverse is None else lent.unique[lent.inverse], wanted):
            return None
        with self._ruling:
            if self._waiting is None or lent not in self._waiting or lent.is_made:
                return None
            # of those after it too: the slots they have rows in may be wanted while this one waits for others
            self._waiting.copy(self._stock.kept)
            if not lent.is_ready:
                return None  # one that it copies from was left out
        self._note(lent.ids)
        missing = np.ones(lent.unique.size, bool)
        missing[lent.at] = lent.missing
        lacking = None if missing.all() else np.flatnonzero(missing)
        rows = self._stock.fetched(lent.unique, int(lent.missing.sum()), lacking, lent.rows)
        self.counters.count(lent.ids, ~lent.missing, self._halo)
        with self._ruling:
            self._stock.slots(rows)
            lent.rows = rows
            if lent.inverse is not None:
                out = np.empty((wanted.size, *rows.shape[1:]), rows.dtype) if out is None else out
                gather(rows, lent.inverse, out)
                place_of = np.empty(lent.unique.size, np.int64)
                place_of[lent.inverse] = np.arange(wanted.size)
                self._waiting.move(lent, place_of, out)
            elif out is not None and out.ctypes.data != rows.ctypes.data:
                gather(rows, np.arange(wanted.size), out)
                lent.rows = out
            lent.is_made = True
            return lent.rows

    def _widened(self, ids: Array, inverse: Array | None, precision: str, out: Array | None) -> Array:
        """The rows of distinct ids, as often as `inverse` says, in float32."""
        row = self._stock.source.row
        if row is not None and (self._narrow is None or self._narrow.shape[0] < ids.size):
            self._narrow = np.empty((ids.size + ids.size // 8, *row[0]), row[1])
        rows = self._distinct_rows(ids, None if self._narrow is None else self._narrow[: ids.size])
        return widened(rows if inverse is None else rows[inverse], precision, out)

    @property
    def row(self) -> Row | None:
        """The shape and type of a row; None until the first came from a source that does not say."""
        row = self._stock.row
        return row if row is None or self.precision is None else (row[0], np.dtype(np.float32))

    def fill(self, ids: ArrayLike, out: Array) -> None:
        """out[i] = row ids[i] of the source."""
        self.take(ids, out)

    __getitem__ = take

    def clear(self) -> None:
        """Forgets every row."""
        with self._taking, self._ruling:
            self._clear()

    def _clear(self) -> None:
        self._empty_rule()
        self._is_filled = False
        self._ahead.clear()
        self._lend_none()

    def _forget(self) -> None:
        """A fresh look-ahead rule that holds the same rows in the same slots and knows no future."""
        rule = self._rule
        self._lend_none()
        if not isinstance(rule, LookAhead) or (rule.known == 0 and not self._ahead):
            self._ahead.clear()
            return
        self._ahead.clear()
        kept = rule.id_of[rule.id_of >= 0].astype(np.int64)
        fresh = self._new_rule()
        assert isinstance(fresh, LookAhead)
        if kept.size:
            fresh.step(kept)
            # slots are filled in order and never emptied, so each row finds the slot it had
            if not np.array_equal(fresh.slot_of[kept], rule.slot_of[kept]):
                fresh = self._new_rule()
        self._rule = fresh

    def _tell(self) -> None:
        rule = self._rule
        assert isinstance(rule, LookAhead)
        while self._ahead and rule.known <= rule.window:
            rule.reveal(self._ahead.popleft())

    def _distinct_rows(self, ids: Array, out: Array | None) -> Array:
        """One row per distinct id, in `out` where it is given: near ones from here, the others fetched."""
        far = self._far(ids)
        self._note(far)
        if far.size == 0 or self.policy == "none":
            rows = self._stock.fetched(ids, far.size, None, out)
            self.counters.count(far, np.zeros(far.size, bool), self._halo)
            return rows
        self._prefill()
        at = np.arange(far.size) if self._local is None else np.flatnonzero(~self._local[ids])
        missing = np.ones(ids.size, bool)
        with self._ruling:
            # copied now: others may move them later
            is_near, out = self._stock.copied(self._rule.slot_of[far], at, ids.size, out)
        missing[at[is_near]] = False
        # fetched before the rule moves: when the source fails, the cache is as it was
        lacking = None if missing.all() else np.flatnonzero(missing)
        rows = self._stock.fetched(ids, int(far.size - is_near.sum()), lacking, out)
        self.counters.count(far, is_near, self._halo)
        with self._ruling:
            self._keep(far, at, rows)
        return rows

    def _keep(self, far: Array, at: Array, rows: Array, is_handed_out: bool = False) -> None:
        """Lets the rule keep what it wants of the batch, whose remote rows are rows[at]."""
        rule = self._rule
        given: dict[str, Any] = {}
        if isinstance(rule, LookAhead):
            self._tell()
            is_out_of_turn = not is_handed_out and bool(self._waiting)  # others were booked before it
            announced = rule.announced()
            if is_out_of_turn or (announced is not None and not np.array_equal(announced, far)):
                self._forget()
                rule = self._rule
            under_way = 0 if self._waiting is None else len(self._waiting)
            given = {"waiting": under_way} if is_handed_out else {"held": self._stock.source.held(far)}
        step = rule.step(far, **given)
        slots = self._stock.slots(rows)
        if self._waiting is not None:
            self._waiting.save(slots, step.places)
        place(rows, at[step.positions], step.places, slots)
        self.counters.evictions += step.evicted
        if step.extra.size:
            self._keep_extra(slots, step.extra.astype(np.int64), step.extra_places)

    def _keep_extra(self, slots: Array, ids: Array, places: Array) -> None:
        try:
            slots[places] = self._stock.fetched(ids, ids.size)
        except BaseException:
            self._clear()  # the rule counts on rows that did not come
            raise

    def _prefill(self) -> None:
        if self._is_filled:
            return
        ids = self._rule.prefill().astype(np.int64)
        if ids.size:
            rows = self._stock.fetched(ids, ids.size)
            self._stock.slots(rows)[: ids.size] = rows
        self._is_filled = True

    def _note(self, far: Array) -> None:
        if self.choice is not None and self._rows_seen < _TRACE_ROWS:
            self._seen.append(far.astype(np.int32))
            self._rows_seen += far.size

    def _seen_batches(self) -> list[Array]:
        """The batches noted so far; the notes are cleared."""
        batches, self._seen, self._rows_seen = self._seen, [], 0
        return batches

    def _far(self, ids: Array) -> Array:
        return ids if self._local is None else ids[~self._local[ids]]

    def _check_room(self, count: int, out: Array) -> None:
        row = self.row
        if out.shape[0] != count or (row is not None and (out.shape[1:], out.dtype) != row):
            wanted = "rows" if row is None else f"rows of shape {row[0]} and type {row[1]}"
            raise InputError(
                f"out has shape {out.shape} and type {out.dtype}; give room for {count} {wanted}"
            )

    def _checked(self, ids: ArrayLike) -> Array:
        return checked(ids, self.num_rows)


def _asked(lent: Lent) -> int:
    """How many ids a booked batch had."""
    return int(lent.unique.size if lent.inverse is None else lent.inverse.size)
