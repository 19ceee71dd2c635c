"""The plans of a compiled model: the latest of every layer, and those that graphs of one size share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from plait.kernels import launch
from plait.plan.plan import LayerPlan

__all__ = ["BySize", "Plans"]

_MOST_SIZES = 512  # a layer in pieces has up to six programs, in training and in inference


class Plans(dict[str, LayerPlan]):
    """The latest plan of each layer and expression, by name; `of` has those of one mode.

    A layer is put in when its plan changes, not at every call: reading is a plain dictionary's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_mode: dict[str, dict[str, LayerPlan]] = {"training": {}, "inference": {}}
        self.threads: int | None = None  # of the latest plan
        self.version = 0  # grows when a layer gets another plan

    def __setitem__(self, name: str, plan: LayerPlan) -> None:
        super().__setitem__(name, plan)
        self._by_mode[plan.mode][name] = plan
        self.threads = launch.num_threads()
        self.version += 1

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        for plans in self._by_mode.values():
            plans.pop(name, None)

    def pop(self, name: str, default: LayerPlan | None = None) -> LayerPlan | None:  # type: ignore[override]
        """Forget a layer and its further expressions, in both modes."""
        found = self.get(name, default)
        for own in [own for own in self if own == name or own.startswith((f"{name}#", f"{name} "))]:
            del self[own]
        return found

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        for plans in self._by_mode.values():
            plans.clear()

    @property
    def mode(self) -> str:
        """The mode the model ran in last."""
        return "training" if any(plan.mode == "training" for plan in self.values()) else "inference"

    def of(self, mode: str) -> tuple[LayerPlan, ...]:
        """The plans of one mode in the order the layers first ran; empty where the model did not run in it.

        A layer of which nothing is learned computes no gradients in training either: its only plan is one
        without, and it takes part in both.
        """
        plans = self._by_mode[mode]
        if not plans or mode == "inference":
            return tuple(plans[name] for name in self if name in plans)
        never = self._by_mode["inference"]
        return tuple(plans.get(name) or never[name] for name in self if name in plans or name in never)


class BySize:
    """Plans that graphs of one order of magnitude share; the oldest go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, tuple[int, LayerPlan, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def plan(
        self,
        layer: str,
        place: Any,
        sizes: tuple[int, ...],
        make: Callable[[], LayerPlan],
        owner: Any = None,
        first: int | None = 1,
    ) -> LayerPlan:
        """The latest plan for such sizes, made again for the `first` graphs that have them; None: for all.

        `place` tells apart what else plans depend on; `owner` is what it names by identity, kept alive.
        """
        key = (layer, place, tuple([size.bit_length() for size in sizes]))
        count, plan, _ = self._kept.get(key, (0, None, None))
        if plan is None or first is None or count < first:
            plan = make()
            while len(self._kept) >= _MOST_SIZES:
                self._kept.popitem(last=False)
            self._kept[key] = (count + 1, plan, owner)
        return plan

    def forget(self, layer: str) -> None:
        """Drop the plans of a layer."""
        for key in [key for key in self._kept if key[0] == layer]:
            del self._kept[key]
