"""Whether a cache should change its rule between two epochs: a measured epoch in, a choice with reason out.

A batch is prepared while the last one is computed, so an epoch stalls only for the excess:
stall = batches x max(0, prepare + rows x seconds per row - compute). All but the rows is measured; the rows
of another rule come from replaying the epoch's trace. Pure: nothing here holds a row or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.features.simulate import WINDOW_BATCHES, simulate
from plait.features.trace import pack

if TYPE_CHECKING:
    from plait.features.advise import Advice

__all__ = [
    "Choice", "Seen", "Setting", "can_gain", "candidates", "disagrees", "first_choice", "next_choice",
    "retune", "warm_rows",
]  # fmt: skip

Array = NDArray[Any]

# A prediction holds while it is off by less than this share of itself and of the epoch: epochs of one run
# differ by a few per cent from noise alone.
_OFF_SHARE = 0.25
_OFF_EPOCH = 0.05
# What must be saved of an epoch before a cache changes its rule: it starts learning again.
_WORTHWHILE = 0.03


@dataclass(frozen=True)
class Setting:
    """A rule and, for look-ahead, how many batches it sees."""

    policy: str
    window: int = 0

    def __str__(self) -> str:
        return f"{self.policy} (window {self.window})" if self.window else self.policy


@dataclass(frozen=True)
class Seen:
    """The measurements of an epoch; `prepare_seconds` includes the fetching.

    Without prefetch nothing is overlapped: every second of preparation is a stall.
    """

    batches: int
    seconds: float
    stalled_seconds: float
    prepare_seconds: float
    fetch_seconds: float
    remote_rows: int
    is_overlapped: bool = True

    def stall_with(self, remote_rows: float) -> float:
        """The stall to expect of such an epoch that fetches `remote_rows` rows."""
        per_row = self.fetch_seconds / self.remote_rows if self.remote_rows else 0.0
        prepare = self.prepare_seconds - self.fetch_seconds + per_row * remote_rows
        hidden = self.seconds - self.stalled_seconds if self.is_overlapped else 0.0
        return max(0.0, prepare - hidden)


@dataclass(frozen=True)
class Choice:
    """The setting of the next epoch, the stall expected of it (None: not known yet), and why."""

    setting: Setting
    stall_seconds: float | None
    because: str


def first_choice(policy: str, window: int, advice: Advice | None) -> Choice | None:
    """Where "auto" starts; None for every other rule."""
    if policy != "auto":
        if advice is not None:
            raise InputError(f"advice: policy={policy!r} never switches; use policy='auto'")
        return None
    if advice is None:
        return Choice(Setting("lookahead", window), None, "nothing measured yet")
    best = advice.recommended
    name = "none" if best is None else best.policy
    stall = (advice.none if best is None else best).stall_seconds
    return Choice(Setting(name, window if name == "lookahead" else 0), stall, advice.reason)


def next_choice(choice: Choice, seen: Seen, batches: Sequence[Array], capacity: int) -> Choice:
    """What follows a choice after an epoch: itself, unless its stall was another than expected.

    `batches` are the remote rows of the epoch's batches, or of the first of them.
    """
    if not disagrees(seen, choice.stall_seconds):
        return choice
    if not can_gain(seen):
        because = "no rule would save 3% of the epoch: little of it is spent waiting for feature rows"
        return Choice(choice.setting, seen.stalled_seconds, because)
    # a trace that was cut stands for the epoch it began
    scale = seen.batches / len(batches)
    options = candidates(seen.batches)
    if choice.setting not in options:
        options = (*options, choice.setting)
    rows = {s: n * scale for s, n in warm_rows(batches, capacity, options).items()}
    return retune(choice.setting, seen, rows)


def candidates(batches: int) -> tuple[Setting, ...]:
    """What can be chosen, the simpler first; no window longer than twice the epoch."""
    windows = [WINDOW_BATCHES * 4**k for k in range(3) if k == 0 or WINDOW_BATCHES * 4**k <= 2 * batches]
    return (
        Setting("none"),
        Setting("presample"),
        Setting("sieve"),
        *(Setting("lookahead", w) for w in windows),
    )


def warm_rows(batches: Sequence[Array], capacity: int, settings: Iterable[Setting]) -> dict[Setting, float]:
    """The remote rows of an epoch of these batches under each setting, in a cache that saw them once before.

    Later epochs do not start with an empty cache, so what is counted is the second of two rounds.
    """
    packed = pack([*batches, *batches])
    first = packed.first(len(batches))
    heat = np.bincount(np.concatenate(batches))

    def rows(setting: Setting) -> float:
        room = 0 if setting.policy == "none" else capacity
        params = {"window": setting.window} if setting.policy == "lookahead" else {}
        both, once = (
            simulate(t, room, setting.policy, scores=heat, **params).remote_rows for t in (packed, first)
        )
        return both - once

    return {setting: rows(setting) for setting in settings}


def disagrees(seen: Seen, predicted_seconds: float | None) -> bool:
    """Whether the measured stall differs from the predicted one; without a prediction it does."""
    if predicted_seconds is None:
        return True
    off = abs(seen.stalled_seconds - predicted_seconds)
    return off > max(_OFF_SHARE * predicted_seconds, _OFF_EPOCH * seen.seconds)


def can_gain(seen: Seen) -> bool:
    """Whether a cache that never fetched would save what is worth a change; if not, no replay is needed."""
    most = seen.stall_with(seen.remote_rows) - seen.stall_with(0)
    return most > _WORTHWHILE * seen.seconds


def retune(current: Setting, seen: Seen, rows: Mapping[Setting, float]) -> Choice:
    """The best of the settings whose remote rows per epoch are given; `current` unless a change is worth it.

    What no setting explains (such as slow sampling) is left out of the comparison; the reason says so.
    """
    stall = {setting: seen.stall_with(count) for setting, count in rows.items()}
    explained = seen.stall_with(seen.remote_rows)
    worth = _WORTHWHILE * seen.seconds
    least = min(stall.values())
    best = next(setting for setting in rows if stall[setting] <= least + worth / 2)
    if best != current and current in stall and stall[current] - stall[best] <= worth:
        best = current
    is_elsewhere = seen.stalled_seconds - explained > max(worth, 0.5 * seen.stalled_seconds)
    # what was measured, less what the change is expected to save
    expected = max(0.0, seen.stalled_seconds - explained + stall[best])
    return Choice(best, expected, _reason(current, best, stall, is_elsewhere))


def _reason(current: Setting, best: Setting, stall: Mapping[Setting, float], is_elsewhere: bool) -> str:
    if is_elsewhere:
        return f"{best}: most of the wait is not for feature rows, which no rule can change"
    if best == current:
        return f"{best} stays: no other rule would save 3% of the epoch"
    was = f"{stall[current]:.3g} s" if current in stall else "an unknown time"
    return f"{best} would stall {stall[best]:.3g} s per epoch, {current} {was}"
