"""Leaving calls to PyG: where inputs keep changing and calls are short, PyG may be faster, and then it runs.

A graph seen only once has to be sorted and bound before anything is gained from it. Whether that pays is not
priced but timed as the user sees it: from one call of a layer to the next, with everything in between, a few
steps by plait and a few by PyG alternately. Only calls that were never seen before are timed and left to PyG;
a graph that is seen again is run by its plan. PLAIT_ASIDE=0 leaves everything to plait: the two round
differently, so which of them was faster shows in the last bits of a result.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Aside"]

_WARM_UP = 8  # new inputs by plait before any is timed: kernels are loaded and plans made
_BLOCK = 3  # consecutive steps by the same side; the first of them is not timed
_ROUNDS = 4  # blocks per side, where it is close
# If PyG takes this many times as long, one round is enough. A decision against plait needs all rounds: while
# another program holds the cores, threads that wait for each other make any single round look slow.
_CLEAR = 1.5
_LONGEST_SECONDS = 0.05  # in longer steps the cost of binding does not matter
_MARGIN = 1.02  # what PyG has to be faster by
_MOST_SEEN = 64
_RESTS_AFTER = 32  # consecutive calls of layers left to PyG before whole calls of the model are


@dataclass
class _Kind:
    """Calls of one sort and size, and how their steps were timed."""

    steps: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # by: is PyG
    is_out: bool | None = None  # None: not decided

    @property
    def is_by_pyg(self) -> bool:
        """Which side runs the current step while it is undecided: alternating blocks."""
        after = self.steps - _WARM_UP
        return after >= 0 and after // _BLOCK % 2 == 1

    def decide(self) -> None:
        """Compare the fastest steps after each round: they contain no time of other programs."""
        rounds, rest = divmod(self.steps - _WARM_UP, 2 * _BLOCK)
        if rounds < 1 or rest:
            return
        own, theirs = (min(self.seconds[way], default=0.0) for way in (False, True))
        if rounds >= _ROUNDS or theirs > _CLEAR * own > 0.0:
            self.is_out = 0.0 < theirs < _LONGEST_SECONDS and own > _MARGIN * theirs


class Aside:
    """Which of a model's calls PyG runs because it is faster; one decision for each size of graph."""

    # processor time of this thread: it takes part in all work, and other programs do not count
    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self.is_off = clock, os.environ.get("PLAIT_ASIDE", "") == "0"
        self._kinds: dict[tuple[bool, int], _Kind] = {}
        self._anchor: tuple[str, tuple[bool, int]] | None = None  # whose next call ends the step
        self._started: tuple[float, bool] | None = None  # when the step began, and whether PyG runs it
        self._seen: dict[tuple[str, int, int], weakref.ref[Any]] = {}
        self._thread = threading.get_ident()
        self._num_left = 0  # calls of layers left to PyG since one was not
        self.notes: dict[tuple[bool, int], str] = {}

    def has_left(self, layer: str, edges: Any, weight: Any) -> bool:
        """Whether such a call is left to PyG; asked before anything else is done with it."""
        if not self.notes or not isinstance(edges, torch.Tensor) or edges.dim() != 2:
            return False
        is_left = _kind(edges) in self.notes and not self._comes_back((layer, id(edges), id(weight)), edges)
        self._num_left = self._num_left + 1 if is_left else 0
        return is_left

    def rests(self, args: tuple[Any, ...]) -> bool:
        """Whether a whole call of the model is left to PyG, as all its layers have been for a while.

        The first edge list among the arguments represents all: any other that was not left to PyG has
        counted.
        """
        if self._num_left < _RESTS_AFTER:
            return False
        for value in args:
            if type(value) is torch.Tensor and value.dtype is torch.int64 and value.dim() == 2:
                return _kind(value) in self.notes and not self._comes_back(("", id(value), 0), value)
        return False

    def _comes_back(self, key: tuple[str, int, int], edges: torch.Tensor) -> bool:
        """Whether such a call was made before: then its plan pays, whichever side was faster at first."""
        known = self._seen.get(key)
        if known is not None and known() is edges:
            return True
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] = weakref.ref(edges)
        return False

    def is_pygs_turn(self, layer: str, edges: Any) -> bool:
        """Whether PyG runs a call that was never seen before, so that both can be timed."""
        if self.is_off or not isinstance(edges, torch.Tensor) or edges.dim() != 2:
            return False
        decided = self._kinds.get(_kind(edges))
        if decided is not None and decided.is_out is not None:
            return False
        if threading.get_ident() != self._thread or not (edges.is_cpu or edges.is_cuda):
            return False
        if edges.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        known = _kind(edges)
        kind = self._kinds.setdefault(known, _Kind())
        if self._comes_back((layer, id(edges), 0), edges):
            return False
        if self._anchor is None:
            self._anchor = (layer, known)
        if self._anchor == (layer, known):
            self._next_step(known, kind, edges.is_cuda)
        elif layer == self._anchor[0]:  # another size: the step that was begun belongs to neither
            self._anchor, self._started = (layer, known), None
            self._next_step(known, kind, edges.is_cuda)
        return kind.is_by_pyg if kind.is_out is None else kind.is_out

    def _next_step(self, known: tuple[bool, int], kind: _Kind, is_cuda: bool) -> None:
        now = _device_clock() if is_cuda else self._clock()
        if self._started is not None:
            began, was_pyg = self._started
            is_first = (kind.steps - _WARM_UP) % _BLOCK == 0
            if kind.steps >= _WARM_UP and not is_first:
                kind.seconds[was_pyg].append(now - began)
            kind.steps += 1
            kind.decide()
        self._started = (now, kind.is_by_pyg)
        if kind.is_out is not None:
            self._anchor = self._started = None
        if kind.is_out:
            own, theirs = (1e3 * min(kind.seconds[way]) for way in (False, True))
            self.notes[known] = (
                f"new graphs of up to {2 ** known[1]:,} edges run in PyG "
                f"{'' if known[0] else 'without gradients '}if seen only once: "
                f"a step took {own:.2f} ms by plait and {theirs:.2f} ms by PyG"
            )


def _device_clock() -> float:
    """Wall-clock seconds after the device is done: GPU steps continue after their calls return."""
    torch.cuda.synchronize()
    return time.perf_counter()


def _kind(edges: torch.Tensor) -> tuple[bool, int]:
    """Calls that are timed together: with or without gradients, edges of the same order of magnitude."""
    return torch.is_grad_enabled(), edges.shape[1].bit_length()
