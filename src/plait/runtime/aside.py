"""Leaving calls to PyG: where inputs keep changing and calls are short, PyG may be faster, and then it runs.

A graph seen only once has to be sorted and bound before anything is gained from it. Whether that pays is not
priced but timed as the user sees it: from one call of the model to the next, with everything in between, a
few steps by plait and a few by PyG alternately. A graph that is seen again is run by its plan, except a small
one, on which planned calls may cost more Python than PyG's.
PLAIT_ASIDE=0 leaves everything to plait: the two round differently, so which of them was faster shows in the
last bits of a result.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["RESTS_AFTER", "SETTLED_AFTER", "Aside", "is_list_of_edges"]

_WARM_UP = 8  # new inputs by plait before any is timed: kernels are loaded and plans made
# Consecutive steps by the same side; the first of them is not timed. Each change of side finds other code and
# data in the caches: of blocks of 3 a step of 0.27 ms (SAGE on 20 nodes, either side) took PyG 0.31 ms.
_BLOCK = 5
_ROUNDS = 4  # blocks per side, where it is close
# steps of a size by which it is decided who runs them: the last timed one ends with the step after it
SETTLED_AFTER = _WARM_UP + 2 * _BLOCK * _ROUNDS + 1
# If PyG takes this many times as long, one round is enough. A decision against plait needs all rounds: while
# another program holds the cores, threads that wait for each other make any single round look slow.
_CLEAR = 1.5
_LONGEST_SECONDS = 0.05  # in longer steps the cost of binding does not matter
_MARGIN = 1.02  # what PyG has to be faster by
_MOST_SEEN = 256
_SMALL_EDGES = 4096  # of graphs that come back and are timed: with more, plans pay
RESTS_AFTER = 32  # consecutive calls of layers left to PyG before whole calls of the model are


_Size = tuple[bool, int, bool]
"""(with gradients, bits of the number of edges, comes back): calls that are timed together."""


@dataclass
class _Kind:
    """Calls of one sort and size, and how their steps were timed."""

    steps: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # by: is PyG
    is_out: bool | None = None  # None: not decided
    layers: set[str] = field(default_factory=set)  # those timed on graphs that come back
    anchor: str = ""  # the first of them: its next call ends the step
    started: tuple[float, bool] | None = None  # when that began, and whether PyG runs it
    call: int = 0  # of the model, in which that began

    @property
    def is_by_pyg(self) -> bool:
        """Which side runs the current step while it is undecided: alternating blocks."""
        return _is_pygs(self.steps)

    @property
    def is_by_pyg_next(self) -> bool:
        """Which side runs the step after that."""
        return _is_pygs(self.steps + 1)

    def note(self, now: float) -> None:
        """The step that began at `started` ends now."""
        if self.started is None:
            return
        began, was_pyg = self.started
        is_first = (self.steps - _WARM_UP) % _BLOCK == 0
        if self.steps >= _WARM_UP and not is_first:
            self.seconds[was_pyg].append(now - began)
        self.steps += 1
        self.decide()

    def fastest(self, is_pyg: bool) -> float:
        """Seconds per step of a side's fastest two in a row, which contain no time of other programs.

        Two are taken together: where a model is called twice before gradients are computed, the shortest step
        would be a call without any. Not whole blocks: where a loop does something else every few steps, no
        block of a side may be without it.
        """
        steps, timed = self.seconds[is_pyg], _BLOCK - 1
        firsts = (k for k in range(len(steps) - 1) if k % timed < timed - 1)
        return min(((steps[k] + steps[k + 1]) / 2 for k in firsts), default=0.0)

    def decide(self) -> None:
        """Compare the two sides after each round."""
        rounds, rest = divmod(self.steps - _WARM_UP, 2 * _BLOCK)
        if rounds < 1 or rest:
            return
        own, theirs = self.fastest(False), self.fastest(True)
        if rounds >= _ROUNDS or theirs > _CLEAR * own > 0.0:
            self.is_out = 0.0 < theirs < _LONGEST_SECONDS and own > _MARGIN * theirs


def _is_pygs(step: int) -> bool:
    after = step - _WARM_UP
    return after >= 0 and after // _BLOCK % 2 == 1


class Aside:
    """Which of a model's calls PyG runs because it is faster; one decision for each size of graph."""

    # processor time of this thread: it takes part in all work, and other programs do not count
    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self.is_off = clock, os.environ.get("PLAIT_ASIDE", "") == "0"
        self._kinds: dict[_Size, _Kind] = {}
        self._anchor: tuple[str, _Size] | None = None  # whose next call ends the step
        self._started: tuple[float, bool] | None = None  # when the step began, and whether PyG runs it
        self._began = 0  # the call of the model in which it began
        self.calls = 0  # of the model, those left to PyG as well
        self._seen: dict[tuple[str, int, int], tuple[weakref.ref[Any], int]] = {}
        self._thread = threading.get_ident()
        self.is_trying = False  # PyG runs the current step: what plait would look at first is not looked at
        self._trial: _Kind | None = None  # of graphs that come back: its current step is PyG's
        self.planned_in = 0  # the latest call of the model in which a layer was not left to PyG
        self.num_left = 0  # calls of layers left to PyG since one was not
        self.notes: dict[_Size, str] = {}
        self.reason = ""  # why the latest call that was left was

    def has_left(self, layer: str, edges: Any, weight: Any) -> bool:
        """Whether such a call is left to PyG; asked before anything else is done with it."""
        if not self.notes or not is_list_of_edges(edges):
            return False
        known = _kind(edges, comes_back=True)
        if not self._was_slow(layer, edges, known):
            known = _kind(edges)
            if known not in self.notes or self._comes_back((layer, id(edges), id(weight)), edges):
                self.num_left = 0
                return False
        self.num_left, self.reason = self.num_left + 1, self.notes[known]
        return True

    def rests(self, args: Iterable[Any]) -> bool:
        """Whether a whole call of the model is left to PyG, as all its layers have been for a while.

        The first edge list among the arguments, or in the first Data, represents all: any other that was not
        left to PyG has counted.
        """
        if self.num_left < RESTS_AFTER and self._trial is None:
            return False
        for value in args:
            edges = value if isinstance(value, torch.Tensor) else getattr(value, "edge_index", None)
            if type(edges) is torch.Tensor and is_list_of_edges(edges):
                if self.num_left < RESTS_AFTER:
                    return self._rests_to_be_timed(edges)
                return _kind(edges, self._comes_back(("", id(edges), 0), edges)) in self.notes
        return False

    def _rests_to_be_timed(self, edges: torch.Tensor) -> bool:
        """Whether PyG runs a whole call to be timed, as it would when all such calls were left to it.

        The first step of its block runs layer by layer and shows that all of them may be left.
        """
        kind = None if self._trial is None else self._kinds.get(_kind(edges, comes_back=True))
        if kind is None or kind is not self._trial or threading.get_ident() != self._thread:
            return False
        before = self.calls - 1
        if kind.call != before or self.planned_in == before or not kind.is_by_pyg_next:
            return False
        now = self._clock()
        kind.note(now)
        kind.started, kind.call = (now, True), self.calls
        return True

    def note_planned(self) -> None:
        """A layer ran by its plan: it would not have been left to PyG."""
        self.planned_in, self.num_left = self.calls, 0

    def size_of(self, edges: torch.Tensor) -> _Size:
        """What decisions about a graph that comes back are kept by, in the mode of this call."""
        return _kind(edges, comes_back=True)

    def leaves_again(self, edges: torch.Tensor) -> bool:
        """Whether graphs of this size are left to PyG although they come back."""
        return _kind(edges, comes_back=True) in self.notes

    def _comes_back(self, key: tuple[str, int, int], edges: torch.Tensor) -> bool:
        """Whether an earlier call of the model had it: then its plan pays, whoever was faster at first.

        In the same call a layer that runs several times, as in AttentiveFP, meets a graph that is still new.
        """
        known = self._seen.get(key)
        if known is not None and known[0]() is edges:
            return known[1] != self.calls
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] = weakref.ref(edges), self.calls
        return False

    def _was_slow(self, layer: str, edges: torch.Tensor, known: _Size) -> bool:
        """Whether a layer was timed to be slower than PyG on small graphs that come back, as this does."""
        is_timed = known in self.notes and layer in self._kinds[known].layers
        return is_timed and self._comes_back((layer, id(edges), 0), edges)

    def is_over(self, layer: str, edges: Any) -> bool:
        """Whether new graphs of this size were found to be plait's, and this is one or is not small.

        Nothing is tried then: this is the only check at a call on a graph that is seen once.
        """
        if not is_list_of_edges(edges):
            return False
        kind = self._kinds.get(_kind(edges))
        if kind is None or kind.is_out is not False:
            return False
        if edges.shape[1] > _SMALL_EDGES or not edges.is_cpu or threading.get_ident() != self._thread:
            return True
        return not self._comes_back((layer, id(edges), 0), edges)

    def is_pygs_turn(self, layer: str, edges: Any, is_tried_again: bool = False) -> bool:
        """Whether PyG runs a call, so that both can be timed.

        is_tried_again: on a graph that comes back too, if it is small.
        """
        if self.is_off or not is_list_of_edges(edges):
            return False
        is_tried_again = is_tried_again and self.may_be_pygs(edges)
        decided = self._kinds.get(_kind(edges))
        if decided is not None and decided.is_out is not None and not is_tried_again:
            return False
        if threading.get_ident() != self._thread or not (edges.is_cpu or edges.is_cuda):
            return False
        if edges.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if self._comes_back((layer, id(edges), 0), edges):
            return is_tried_again and self.is_pygs_again(layer, edges)
        known = _kind(edges)
        kind = self._kinds.setdefault(known, _Kind())
        if kind.is_out is not None:
            return False
        if self._anchor is None or (layer == self._anchor[0] and self._began != self.calls):
            self._next_step(layer, known, edges.is_cuda)
        return kind.is_by_pyg if kind.is_out is None else kind.is_out

    def may_be_pygs(self, edges: torch.Tensor) -> bool:
        """Whether a graph that came before is small, and plait was not found to be faster on such ones."""
        if self.is_off or not edges.is_cpu or edges.shape[1] > _SMALL_EDGES:
            return False
        kind = self._kinds.get(_kind(edges, comes_back=True))
        return (kind is None or kind.is_out is not False) and threading.get_ident() == self._thread

    def is_pygs_again(self, layer: str, edges: torch.Tensor) -> bool:
        """Whether PyG runs a call on such a graph; steps of training and of inference may take turns."""
        if not self._comes_back((layer, id(edges), 0), edges):
            return False
        known = _kind(edges, comes_back=True)
        kind = self._kinds.setdefault(known, _Kind())
        kind.layers.add(layer)
        kind.anchor = kind.anchor or layer
        if kind.is_out is None and layer == kind.anchor and kind.call != self.calls:
            now = self._clock()
            kind.note(now)
            kind.started, kind.call = (now, kind.is_by_pyg), self.calls
            self.is_trying = kind.is_out is None and kind.is_by_pyg
            self._trial = kind if self.is_trying else None
            self._say(known, kind)
        return kind.is_by_pyg if kind.is_out is None else kind.is_out

    def _next_step(self, layer: str, known: _Size, is_cuda: bool) -> None:
        """End the step that was begun, of whatever size, and begin the next."""
        now = _device_clock() if is_cuda else self._clock()
        if self._anchor is not None:
            before = self._kinds[self._anchor[1]]
            before.started = self._started
            before.note(now)
            self._say(self._anchor[1], before)
        kind = self._kinds[known]
        is_decided = kind.is_out is not None
        self._anchor = None if is_decided else (layer, known)
        self._started, self._began = None if is_decided else (now, kind.is_by_pyg), self.calls
        self.is_trying = not is_decided and kind.is_by_pyg

    def _say(self, known: _Size, kind: _Kind) -> None:
        if not kind.is_out:
            return
        own, theirs = 1e3 * kind.fastest(False), 1e3 * kind.fastest(True)
        of = "graphs" if known[2] else "new graphs"
        when = ("" if known[0] else " in calls without gradients") + ("" if known[2] else " until seen again")
        self.notes[known] = (
            f"{of} of up to {2 ** known[1]:,} edges run in PyG{when}: "
            f"a step took {own:.2f} ms by plait and {theirs:.2f} ms by PyG"
        )


def _device_clock() -> float:
    """Wall-clock seconds after the device is done: GPU steps continue after their calls return."""
    torch.cuda.synchronize()
    return time.perf_counter()


def is_list_of_edges(value: Any) -> bool:
    """Whether it identifies the graph of a call: a matrix, but not one of features."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    return value.layout is not torch.strided or not value.is_floating_point()


def _kind(edges: torch.Tensor, comes_back: bool = False) -> _Size:
    """With or without gradients, edges of the same order of magnitude."""
    return torch.is_grad_enabled(), edges.shape[1].bit_length(), comes_back
