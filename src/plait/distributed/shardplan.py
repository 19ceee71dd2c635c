"""EXPLAIN of a sharded model: what travels in every layer, why, and what would have cost more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.plan.exchange import Choice, Link

__all__ = ["ShardPlan"]


@dataclass(frozen=True, repr=False)
class ShardPlan:
    """The exchanges of one rank's model, layer by layer, in the modes it has run in."""

    rank: int
    size: int
    link: Link
    bounds: Any
    choices: Mapping[tuple[str, str], Choice]

    @property
    def bytes_per_step(self) -> int:
        """Bytes this rank hands to all_to_all in one training step, work done once left out."""
        return sum(sum(c.bytes_each) for (_, mode), c in self.choices.items() if mode == "training")

    @property
    def bytes_per_call(self) -> int:
        """Bytes this rank hands to all_to_all in one call without gradients."""
        return sum(sum(c.bytes_each) for (_, mode), c in self.choices.items() if mode == "inference")

    @property
    def bytes_once(self) -> int:
        """Bytes handed over once, for values that never change."""
        return sum(choice.bytes_once for choice in self.choices.values())

    def to_dict(self) -> dict[str, Any]:
        layers = [
            {
                "layer": choice.layer,
                "mode": choice.mode,
                "split": choice.split,
                "travels": choice.travels,
                "bytes_per_step": sum(choice.bytes_each),
                "bytes_once": choice.bytes_once,
                "seconds": dict(choice.seconds),
                "halves": None if choice.halves is None else choice.halves.to_dict(),
                "plan": None if choice.plan is None else choice.plan.to_dict(),
            }
            for choice in self.choices.values()
        ]
        return {
            "format": "plait-shard-plan-1", "rank": self.rank, "ranks": self.size,
            "bytes_per_step": self.bytes_per_step, "bytes_once": self.bytes_once, "layers": layers,
        }  # fmt: skip

    def __str__(self) -> str:
        nodes = [int(end - begin) for begin, end in zip(self.bounds[:-1], self.bounds[1:], strict=True)]
        lines = [
            f"Shards over {self.size} ranks of {min(nodes)} to {max(nodes)} nodes; this is rank {self.rank}; "
            f"priced for {self.link.bytes_per_s / 1e9:.3g} GB/s and {self.link.latency * 1e6:.3g} us"
            + f", {self.link.meeting * 1e6:.3g} us a meeting"
            * bool(self.link.meeting),
        ]
        for choice in self.choices.values():
            lines += _lines(choice)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<ShardPlan: {len(self.choices)} layers, {self.bytes_per_step} bytes per step>"


def _lines(choice: Choice) -> list[str]:
    """One layer: what it does, what it sends, what lost."""
    size = f"{sum(choice.bytes_each) / 1e6:.3g} MB per step" if choice.bytes_each else "nothing per step"
    once = f", {choice.bytes_once / 1e6:.3g} MB once" if choice.bytes_once else ""
    action = f"{choice.plan.action()}, " if choice.plan is not None else ""
    lines = ["", f"{choice.layer} ({choice.mode}): {action}{choice.split}: {choice.travels}; {size}{once}"]
    if choice.plan is None:
        lines.append("   its passes read neighbours' rows: the halo of its input travels before it")
    best = choice.seconds.get(choice.travels, 0.0)
    for travels, seconds in sorted(choice.seconds.items(), key=lambda item: item[1]):
        if travels != choice.travels:
            ratio = f" ({seconds / best:.2f} x)" if best else ""
            lines.append(f"   lost: {travels}: {seconds * 1e3:.3f} ms{ratio} on the slowest rank")
    if choice.plan is not None:
        lines.append(f"   predicted {best * 1e3:.3f} ms on the slowest rank, exchanges included")
    if choice.halves is not None:
        lines.append(f"   {choice.halves}")
    return lines
