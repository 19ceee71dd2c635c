"""What a checkpoint's function must repeat in its second run: the plans its layers took.

A checkpoint runs its function a second time in the backward pass and insists that the same tensors are saved.
In between plait may learn something: a graph is forgotten, an input is found to be constant, a timed check
has ended. So every call of a layer inside a checkpoint is recorded, and its second run follows the record.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from plait.plan.plan import LayerPlan

__all__ = ["Called", "now"]


@dataclass(slots=True, eq=False)
class Called:
    """How one call of a layer ran inside a checkpoint, and how far its second run has got."""

    is_pygs: bool = False
    prepared: Any = None  # the call made ready, where that depends on what was called in between
    plans: list[LayerPlan] = field(default_factory=list)  # in the order they were asked for
    place: int | None = None  # of the next plan in the second run; None in the first

    def again(self) -> Called:
        """The same call at the beginning of a second run."""
        return replace(self, place=0)

    @property
    def is_second(self) -> bool:
        """Whether everything must run as it did before."""
        return self.place is not None

    def plan(self) -> LayerPlan | None:
        """The plan that the first run took at this point; None in the first run, which is free to choose."""
        if self.place is None or self.place >= len(self.plans):
            return None
        self.place += 1
        return self.plans[self.place - 1]

    def note(self, plan: LayerPlan) -> None:
        """Record that the first run took this plan."""
        if self.place is None:
            self.plans.append(plan)


class _Now(threading.local):
    call: Called | None = None  # of the layer that runs inside a checkpoint


now = _Now()
"""What runs in this thread."""
