"""A model over ranks as plait.shard would run it: what every rank sends in the plans that all agree on."""

from __future__ import annotations

from dataclasses import dataclass

from plait.analysis.network import Traffic
from plait.ops.exchange import EXCHANGES, meetings
from plait.plan.exchange import Choice

__all__ = ["SPLITS", "Shards"]

SPLITS = ("nodes", "features")
"""Splits of plait.shard that are strategies of their own: edge cut and feature partition."""


@dataclass(frozen=True)
class Shards:
    """The choices of all ranks, by layer in the order of their calls."""

    layers: tuple[tuple[Choice, ...], ...]

    @property
    def traffic(self) -> list[Traffic]:
        """Of every layer in one step; what is sent once is left out."""
        return [_traffic(choices) for choices in self.layers]

    @property
    def seconds(self) -> float:
        """What ranks compute in one step, the slowest one between every two exchanges and in every layer."""
        return sum(_slowest(choices) for choices in self.layers)

    @property
    def exchanges(self) -> int:
        """Of one step: each waits for all ranks."""
        return sum(len(choices[0].bytes_each) for choices in self.layers)

    @property
    def is_split(self) -> bool:
        """Whether some layer sends columns: else a split by features is one by nodes."""
        return any("columns" in choice.travels for choices in self.layers for choice in choices[:1])


def _traffic(choices: tuple[Choice, ...]) -> Traffic:
    exchanges = len(choices[0].bytes_each)
    return Traffic(
        float(sum(sum(choice.bytes_each) for choice in choices)),
        max(map(_busier, choices)),
        exchanges * (len(choices) - 1),
        _meetings(choices[0]),
    )


def _meetings(choice: Choice) -> float:
    """How often ranks wait for each other; trades of columns count for less."""
    if choice.plan is None:
        return len(choice.bytes_each)
    return sum(meetings(step.step.op) for step in choice.plan.steps if step.step.op in EXCHANGES)


def _busier(choice: Choice) -> float:
    """Bytes of one rank in the busier direction of each exchange."""
    if choice.plan is None:
        return float(len(choice.bytes_each) * max(choice.bytes_each, default=0))
    steps = (step for step in choice.plan.steps if step.step.op in EXCHANGES)
    return float(sum(step.price.work.bytes_least for step in steps))


def _slowest(choices: tuple[Choice, ...]) -> float:
    """Seconds of a layer in which the ranks that arrive at an exchange first wait for the last one."""
    pieces = [_pieces(choice) for choice in choices]
    # ranks that overlap their exchanges differently still wait as often as the others
    slowest: list[float] = [max(together) for together in zip(*pieces, strict=True)]
    return sum(slowest)


def _pieces(choice: Choice) -> list[float]:
    """Seconds that one rank computes between the exchanges of a layer; of those what is done at this end."""
    if choice.plan is None:
        return [choice.pass_seconds]
    found = [0.0]
    for step in choice.plan.steps:
        if step.step.op in EXCHANGES:
            found.append(step.price.copy_seconds)
        else:
            found[-1] += step.price.seconds
    return found
