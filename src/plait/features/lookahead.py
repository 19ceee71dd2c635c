"""The state and kernels of the look-ahead rule: slots in lists by next use, or by count when none is known.

List b % (window + 1) holds the resident rows whose next use is batch b; list window + 1 + c those with no
known use that c batches asked for, and list window + 1 those that a batch has which was made and waits: its
copy serves whoever needs them before it leaves. The first to leave are those, then the coldest without a
known use, then the one needed last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.features.eviction import push, settle, unlink
from plait.features.trace import NEVER
from plait.graph.compiled import compiled, inlined

__all__ = ["State", "release", "reveal", "start", "step"]

Array = NDArray[Any]

# Counts from here on share one list: a row requested this often is kept in any case.
_COUNTS = 4096


@dataclass(eq=False)
class State:
    """What the rule remembers; `uses` is a ring over the requests revealed and not yet stepped."""

    window: int
    ahead: Array
    behind: Array
    list_of: Array
    count: Array
    last_batch: Array
    last_request: Array
    uses: Array
    numbers: Array  # [next batch to step, batches revealed, first pending request, requests revealed, filled]


def start(capacity: int, num_ids: int, window: int) -> State:
    """An empty cache that knows nothing."""
    lists = window + 1 + _COUNTS
    links = np.arange(capacity + lists, dtype=np.int32)
    return State(
        window,
        links,
        links.copy(),
        np.zeros(capacity, np.int32),
        np.zeros(num_ids, np.int32),
        np.full(num_ids, -1, np.int32),
        np.zeros(num_ids, np.int64),
        np.empty(1024, np.int32),
        np.zeros(5, np.int64),
    )


def reveal(state: State, slot_of: Array, ids: Array) -> None:
    """Enters the next batch of the future."""
    first, end = int(state.numbers[2]), int(state.numbers[3])
    if end + ids.size - first > state.uses.size:
        _enlarge(state, first, end, ids.size)
    _reveal(
        ids,
        slot_of,
        state.ahead,
        state.behind,
        state.list_of,
        state.count,
        state.last_batch,
        state.last_request,
        state.uses,
        state.numbers,
        state.window,
    )


def _enlarge(state: State, first: int, end: int, incoming: int) -> None:
    size = state.uses.size
    while size < end + incoming - first:
        size *= 2
    longer = np.empty(size, np.int32)
    pending = np.arange(first, end)
    longer[pending & (size - 1)] = state.uses[pending & (state.uses.size - 1)]
    state.uses = longer


def release(state: State, slots: Array) -> None:
    """Lets the rows in these slots (-1: none) be the first to leave: a batch that waits has copies."""
    _release(slots, state.ahead, state.behind, state.list_of, state.window)


def step(
    state: State, slot_of: Array, id_of: Array, ids: Array, slots: Array, held: Array, waiting: int
) -> int:
    """The number of empty slots filled by the batch, which was revealed before.

    Rows that are `held`, one truth value each or no value at all, push nobody out; those that one of the
    next `waiting` batches needs, which are made, want no slot.
    """
    return int(
        _step(
            ids,
            slots,
            held,
            slot_of,
            id_of,
            state.ahead,
            state.behind,
            state.list_of,
            state.count,
            state.uses,
            state.numbers,
            state.window,
            waiting,
        )
    )


@compiled
def _release(slots: Any, ahead: Any, behind: Any, list_of: Any, window: int) -> None:
    capacity = list_of.size
    for i in range(slots.size):
        slot = slots[i]
        if slot >= 0:
            unlink(ahead, behind, slot)
            list_of[slot] = window + 1
            push(ahead, behind, capacity + window + 1, slot)


@compiled
def _reveal(
    ids: Any, slot_of: Any, ahead: Any, behind: Any, list_of: Any, count: Any, last_batch: Any,
    last_request: Any, uses: Any, numbers: Any, window: int,
) -> None:  # fmt: skip
    capacity = list_of.size
    mask = uses.size - 1
    batch = numbers[1]
    for i in range(ids.size):
        row = ids[i]
        request = numbers[3] + i
        uses[request & mask] = NEVER
        if last_batch[row] >= numbers[0]:
            uses[last_request[row] & mask] = batch
        elif slot_of[row] >= 0:
            slot = slot_of[row]
            unlink(ahead, behind, slot)
            list_of[slot] = batch % (window + 1)
            push(ahead, behind, capacity + list_of[slot], slot)
        count[row] += 1
        last_batch[row] = batch
        last_request[row] = request
    numbers[1] += 1
    numbers[3] += ids.size


@inlined
def _list_for(use: Any, count: Any, window: Any) -> Any:
    if use != NEVER:
        return np.int64(use % (window + 1))
    return np.int64(window + 1 + min(count, _COUNTS - 1))


@compiled
def _step(
    ids: Any, slots: Any, held: Any, slot_of: Any, id_of: Any, ahead: Any, behind: Any, list_of: Any,
    count: Any, uses: Any, numbers: Any, window: int, waiting: int,
) -> Any:  # fmt: skip
    capacity = id_of.size
    mask = uses.size - 1
    now, first = numbers[0], numbers[2]
    made = now + waiting  # the last batch that is
    cold = capacity + window + 1
    for i in range(ids.size):
        if slots[i] >= 0:
            slot = slots[i]
            use = int(uses[(first + i) & mask])
            unlink(ahead, behind, slot)
            list_of[slot] = window + 1 if use <= made else _list_for(use, count[ids[i]], window)
            push(ahead, behind, capacity + list_of[slot], slot)
    coldest = 0  # no resident without a known use has a smaller count
    farthest = now + window  # no resident has a later known use
    before = numbers[4]
    for i in range(ids.size):
        if slots[i] >= 0:
            continue
        use = int(uses[(first + i) & mask])
        heat = min(int(count[ids[i]]), _COUNTS - 1)
        if use <= made:
            continue
        if numbers[4] < capacity:
            slot = numbers[4]
            numbers[4] += 1
        elif held.size and held[i]:
            continue
        else:
            while coldest < _COUNTS and behind[cold + coldest] == cold + coldest:
                coldest += 1
            if coldest < _COUNTS:
                if use == NEVER and heat <= coldest:
                    continue
                slot = np.int64(behind[cold + coldest])
            else:
                while farthest > now and behind[capacity + farthest % (window + 1)] == capacity + farthest % (
                    window + 1
                ):
                    farthest -= 1
                if use >= farthest:
                    continue
                slot = np.int64(behind[capacity + farthest % (window + 1)])
            unlink(ahead, behind, slot)
        settle(slot_of, id_of, slot, ids[i])
        list_of[slot] = _list_for(use, heat, window)
        push(ahead, behind, capacity + list_of[slot], slot)
        if use == NEVER:
            coldest = min(coldest, heat)
        else:
            farthest = max(farthest, use)
    numbers[0] += 1
    numbers[2] += ids.size
    return numbers[4] - before
