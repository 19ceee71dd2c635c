"""Slow, obvious caches on Python lists and sets, which the kernels are compared with.

All follow one protocol: a batch is looked up as a whole, then the rows found are touched in order, then the
rows missing are admitted in order.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

NEVER = 10**9


def unique(batch: list[int]) -> list[int]:
    return list(dict.fromkeys(batch))


class Queue:
    """What the classical rules share; `keep` is ordered from the next to leave to the last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keep: list[int] = []

    def batch(self, ids: list[int]) -> int:
        found = [i for i in ids if i in self.keep]
        for i in found:
            self.touch(i)
        for i in ids:
            if i not in found:
                if len(self.keep) == self.capacity:
                    self.evict()
                self.admit(i)
        return len(found)

    def touch(self, row: int) -> None:
        raise NotImplementedError

    def evict(self) -> None:
        raise NotImplementedError

    def admit(self, row: int) -> None:
        self.keep.append(row)


class Lru(Queue):
    def touch(self, row: int) -> None:
        self.keep.remove(row)
        self.keep.append(row)

    def evict(self) -> None:
        self.keep.pop(0)


class Lfu(Queue):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.count: dict[int, int] = {}

    def touch(self, row: int) -> None:
        self.count[row] += 1
        self.keep.remove(row)
        self.keep.append(row)

    def evict(self) -> None:
        least = min(self.count[i] for i in self.keep)
        row = next(i for i in self.keep if self.count[i] == least)
        self.keep.remove(row)
        del self.count[row]

    def admit(self, row: int) -> None:
        self.count[row] = 1
        self.keep.append(row)


class Clock(Queue):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.used: set[int] = set()

    def touch(self, row: int) -> None:
        self.used.add(row)

    def evict(self) -> None:
        # the list turned so that the hand is at its head is the same as a second-chance queue
        while self.keep[0] in self.used:
            self.used.remove(self.keep[0])
            self.keep.append(self.keep.pop(0))
        self.keep.pop(0)


class Sieve(Queue):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.used: set[int] = set()
        self.hand = 0

    def touch(self, row: int) -> None:
        self.used.add(row)

    def evict(self) -> None:
        at = self.hand if self.hand < len(self.keep) else 0
        while self.keep[at] in self.used:
            self.used.remove(self.keep[at])
            at = at + 1 if at + 1 < len(self.keep) else 0
        self.keep.pop(at)
        # past the youngest row there is nothing: the hand starts at the oldest again, also after newcomers
        self.hand = at if at < len(self.keep) else 0


class S3Fifo:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.share = capacity, max(1, int(0.1 * capacity))
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.uses: dict[int, int] = {}

    def batch(self, ids: list[int]) -> int:
        found = [i for i in ids if i in self.uses]
        for i in found:
            self.uses[i] = min(self.uses[i] + 1, 3)
        for i in ids:
            if i in found:
                continue
            if len(self.uses) == self.capacity:
                self.evict()
            memory = self.ghost[-(self.capacity - self.share) :] if self.capacity > self.share else []
            (self.main if i in memory else self.small).append(i)
            self.uses[i] = 0
        return len(found)

    def evict(self) -> None:
        while True:
            if self.small and (len(self.small) >= self.share or not self.main):
                row = self.small.pop(0)
                if self.uses[row] > 1:
                    self.uses[row] = 0
                    self.main.append(row)
                else:
                    del self.uses[row]
                    self.ghost = [i for i in self.ghost if i != row] + [row]
                    return
            else:
                row = self.main.pop(0)
                if self.uses[row] == 0:
                    del self.uses[row]
                    return
                self.uses[row] -= 1
                self.main.append(row)


def look_ahead_hits(trace: list[list[int]], capacity: int, window: int) -> int:
    """Hits when of residents and batch those stay that the window needs soonest, then the most asked for."""
    kept: set[int] = set()
    hits = 0
    for t, ids in enumerate(trace):
        hits += len(kept & set(ids))
        seen = [set(b) for b in trace[: t + window + 1]]

        def rank(row: int, t: int = t, seen: list[set[int]] = seen) -> tuple[int, int]:
            use = next((b for b in range(t + 1, len(seen)) if row in seen[b]), NEVER)
            return (use, -sum(row in b for b in seen) if use == NEVER else 0)

        kept = set(sorted(kept | set(ids), key=rank)[:capacity])
    return hits


def belady_hits(trace: list[list[int]], capacity: int) -> int:
    """Counts alone: rows needed in the same batch are as good as each other."""
    hits = 0
    needed: dict[int, int] = {}
    for t, ids in enumerate(trace):
        hits += needed.pop(t, 0)
        for row in ids:
            use = next((b for b in range(t + 1, len(trace)) if row in trace[b]), None)
            if use is not None:
                needed[use] = needed.get(use, 0) + 1
        while sum(needed.values()) > capacity:
            last = max(b for b in needed if needed[b])
            needed[last] -= 1
    return hits


def most_hits(trace: list[list[int]], capacity: int) -> int:
    """The best any rule can do, by trying everything."""

    @cache
    def best(t: int, kept: frozenset[int]) -> int:
        if t == len(trace):
            return 0
        ids = frozenset(trace[t])
        pool = sorted(kept | ids)
        size = min(capacity, len(pool))
        return len(kept & ids) + max(best(t + 1, frozenset(c)) for c in combinations(pool, size))

    return best(0, frozenset())


class Massive:
    """MassiveGNN's rule with dicts, in float64; `rounded` as published."""

    def __init__(
        self, capacity: int, degree: dict[int, float], gamma: float, delta: int, rounded: bool
    ) -> None:
        first = sorted((i for i in degree if degree[i] > 0), key=lambda i: (-degree[i], i))[:capacity]
        self.keep = dict.fromkeys(first, 1.0)
        self.missed: dict[int, float] = {}
        self.gamma, self.delta, self.rounded, self.t = gamma, delta, rounded, 0
        self.fetched = len(first)
        self.evicted = 0

    def batch(self, ids: list[int]) -> int:
        self.t += 1
        found = [i for i in ids if i in self.keep]
        for i in self.keep:
            self.keep[i] *= self.gamma
        for i in found:
            self.keep[i] /= self.gamma
        limit = self.gamma**self.delta
        if self.rounded:
            tired = sorted(i for i in self.keep if self.keep[i] < round(limit, 3))
        else:
            tired = sorted(i for i in self.keep if self.keep[i] <= limit * (1 + 1e-9))
        if self.t % self.delta == 0 and tired:
            new = sorted((i for i in self.missed if self.missed[i] > 0), key=lambda i: (-self.missed[i], i))
            for old, row in zip(tired, new, strict=False):
                self.missed[old] = self.keep.pop(old)
                self.keep[row] = self.missed.pop(row)
                self.fetched += 1
                self.evicted += 1
        else:
            for i in ids:
                if i not in found:
                    self.missed[i] = self.missed.get(i, 0) + 1
        return len(found)
