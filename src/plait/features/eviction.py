"""One kernel per eviction rule: a batch updates which row sits in which slot.

Every kernel has the shape (ids, slots, slot_of, id_of, ahead, behind, mark, state) -> empty slots filled,
where slots[i] is the slot ids[i] had before the batch (-1: none), slot_of maps ids to slots and id_of back.
Rows that were found are touched first, then the missing ones are admitted in order: a whole batch is looked
up before any of it moves. `ahead` and `behind` link slots into circular lists whose sentinels follow the
last slot; state[0] is the number of slots filled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.graph.compiled import compiled, inlined

__all__ = ["admitted", "clock", "lfu", "look_up", "lru", "s3fifo", "sieve", "static"]


@compiled
def look_up(slot_of: Any, ids: Any, slots: Any) -> int:
    """The number of ids that have a slot; slots receives it, or -1."""
    hits = 0
    for i in range(ids.size):
        slot = slot_of[ids[i]]
        slots[i] = slot
        hits += slot >= 0
    return hits


@compiled
def admitted(slot_of: Any, ids: Any, slots: Any, positions: Any, places: Any) -> int:
    """The number of missing ids that have a slot now; where they stand in the batch and which slot it is."""
    count = 0
    for i in range(ids.size):
        if slots[i] < 0 and slot_of[ids[i]] >= 0:
            positions[count] = i
            places[count] = slot_of[ids[i]]
            count += 1
    return count


@inlined
def unlink(ahead: Any, behind: Any, slot: Any) -> None:
    """Takes the slot out of its list."""
    ahead[behind[slot]] = ahead[slot]
    behind[ahead[slot]] = behind[slot]


@inlined
def push(ahead: Any, behind: Any, sentinel: Any, slot: Any) -> None:
    """Puts the slot at the front of the list."""
    first = ahead[sentinel]
    ahead[sentinel] = slot
    behind[slot] = sentinel
    ahead[slot] = first
    behind[first] = slot


@inlined
def settle(slot_of: Any, id_of: Any, slot: Any, row: Any) -> None:
    """Gives the slot to `row`; the row that had it loses it."""
    if id_of[slot] >= 0:
        slot_of[id_of[slot]] = -1
    id_of[slot] = row
    slot_of[row] = slot


@inlined
def vacant(state: Any, capacity: Any) -> Any:
    """The next unused slot, now taken; -1 when there is none."""
    slot = state[0] if state[0] < capacity else -1
    state[0] += int(slot >= 0)
    return slot


@compiled
def static(
    ids: Any, slots: Any, slot_of: Any, id_of: Any, ahead: Any, behind: Any, mark: Any, state: Any
) -> int:
    """Slots are set apart by heat, and a row that has one stays.

    mark[id]: 2 for rows hotter than the limit, which all find room; 1 for those at the limit, of which the
    first to come do; 0 for the others, who get what is left. state[1], state[2]: slots still kept for 2 and
    for 1.
    """
    capacity = id_of.size
    before = state[0]
    for i in range(ids.size):
        if slots[i] >= 0:
            continue
        heat = mark[ids[i]]
        if heat == 2:
            state[1] -= 1
        elif heat == 1 and state[2] > 0:
            state[2] -= 1
        elif heat == 1 or state[0] + state[1] + state[2] >= capacity:
            continue
        settle(slot_of, id_of, state[0], ids[i])
        state[0] += 1
    return int(state[0] - before)


@compiled
def lru(
    ids: Any, slots: Any, slot_of: Any, id_of: Any, ahead: Any, behind: Any, mark: Any, state: Any
) -> int:
    """Evicts the least recently used."""
    capacity = id_of.size
    before = state[0]
    for i in range(ids.size):
        if slots[i] >= 0:
            unlink(ahead, behind, slots[i])
            push(ahead, behind, capacity, slots[i])
    for i in range(ids.size):
        if slots[i] >= 0:
            continue
        slot = vacant(state, capacity)
        if slot < 0:
            slot = np.int64(behind[capacity])
            unlink(ahead, behind, slot)
        settle(slot_of, id_of, slot, ids[i])
        push(ahead, behind, capacity, slot)
    return int(state[0] - before)


@compiled
def lfu(
    ids: Any, slots: Any, slot_of: Any, id_of: Any, ahead: Any, behind: Any, mark: Any, state: Any
) -> int:
    """Evicts the least frequently used since it came in, of those the least recently used.

    mark[slot] is the frequency and the number of its list; frequencies beyond the last list share it.
    state[1] is a frequency that none is below.
    """
    capacity = id_of.size
    most = ahead.size - capacity - 1
    before = state[0]
    for i in range(ids.size):
        if slots[i] >= 0:
            slot = slots[i]
            mark[slot] = min(mark[slot] + 1, most)
            unlink(ahead, behind, slot)
            push(ahead, behind, capacity + mark[slot], slot)
    for i in range(ids.size):
        if slots[i] >= 0:
            continue
        slot = vacant(state, capacity)
        if slot < 0:
            while behind[capacity + state[1]] == capacity + state[1]:
                state[1] += 1
            slot = np.int64(behind[capacity + state[1]])
            unlink(ahead, behind, slot)
        settle(slot_of, id_of, slot, ids[i])
        mark[slot] = 1
        state[1] = 1
        push(ahead, behind, capacity + 1, slot)
    return int(state[0] - before)


@compiled
def clock(
    ids: Any, slots: Any, slot_of: Any, id_of: Any, ahead: Any, behind: Any, mark: Any, state: Any
) -> int:
    """Evicts the first slot after the hand (state[1]) not used since the hand last passed."""
    capacity = id_of.size
    before = state[0]
    for i in range(ids.size):
        if slots[i] >= 0:
            mark[slots[i]] = 1
    for i in range(ids.size):
        if slots[i] >= 0:
            continue
        slot = vacant(state, capacity)
        if slot < 0:
            slot = state[1]
            while mark[slot] == 1:
                mark[slot] = 0
                slot = slot + 1 if slot + 1 < capacity else 0
            state[1] = slot + 1 if slot + 1 < capacity else 0
        settle(slot_of, id_of, slot, ids[i])
        mark[slot] = 0
    return int(state[0] - before)


@compiled
def sieve(
    ids: Any, slots: Any, slot_of: Any, id_of: Any, ahead: Any, behind: Any, mark: Any, state: Any
) -> int:
    """SIEVE (Zhang and others 2024): a queue in which used rows stay in place when the hand passes them.

    state[1] is the hand: a slot, or the sentinel for the tail.
    """
    capacity = id_of.size
    before = state[0]
    for i in range(ids.size):
        if slots[i] >= 0:
            mark[slots[i]] = 1
    for i in range(ids.size):
        if slots[i] >= 0:
            continue
        slot = vacant(state, capacity)
        if slot < 0:
            slot = state[1]
            if slot == capacity:
                slot = np.int64(behind[capacity])
            while mark[slot] == 1:
                mark[slot] = 0
                slot = np.int64(behind[slot])
                if slot == capacity:
                    slot = np.int64(behind[capacity])
            state[1] = behind[slot]
            unlink(ahead, behind, slot)
        settle(slot_of, id_of, slot, ids[i])
        mark[slot] = 0
        push(ahead, behind, capacity, slot)
    return int(state[0] - before)


@compiled
def s3fifo(
    ids: Any, slots: Any, slot_of: Any, id_of: Any, ahead: Any, behind: Any, mark: Any, state: Any, ghost: Any
) -> int:
    """S3-FIFO (Yang and others 2023): a small queue for newcomers, a main one, and a ghost of who left early.

    mark[slot] counts uses up to 3. state: [1] length of the small queue, [2] its share of the slots, [3] rows
    sent to the ghost so far; ghost[id] is that number when the id was sent, and it is remembered for as many
    as the main queue holds.
    """
    capacity = id_of.size
    small, main = capacity, capacity + 1
    before = state[0]
    for i in range(ids.size):
        if slots[i] >= 0:
            mark[slots[i]] = min(mark[slots[i]] + 1, 3)
    for i in range(ids.size):
        if slots[i] >= 0:
            continue
        slot = vacant(state, capacity)
        if slot < 0:
            slot = _s3fifo_victim(id_of, ahead, behind, mark, state, ghost)
        is_ghost = ghost[ids[i]] > 0 and state[3] - ghost[ids[i]] < capacity - state[2]
        settle(slot_of, id_of, slot, ids[i])
        mark[slot] = 0
        if is_ghost:
            push(ahead, behind, main, slot)
        else:
            push(ahead, behind, small, slot)
            state[1] += 1
    return int(state[0] - before)


@compiled
def _s3fifo_victim(id_of: Any, ahead: Any, behind: Any, mark: Any, state: Any, ghost: Any) -> int:
    """A slot, taken out of its queue."""
    capacity = id_of.size
    small, main = capacity, capacity + 1
    while True:
        if state[1] > 0 and (state[1] >= state[2] or behind[main] == main):
            slot = behind[small]
            unlink(ahead, behind, slot)
            state[1] -= 1
            if mark[slot] > 1:
                mark[slot] = 0
                push(ahead, behind, main, slot)
            else:
                state[3] += 1
                ghost[id_of[slot]] = state[3]
                return int(slot)
        else:
            slot = behind[main]
            unlink(ahead, behind, slot)
            if mark[slot] == 0:
                return int(slot)
            mark[slot] -= 1
            push(ahead, behind, main, slot)
