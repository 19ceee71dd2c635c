"""Pipelines over partitions: when each stage of each layer runs, how long it all takes, and who waits.

One worker for every (layer, stage); the partitions pass each worker in order. A layer's stages are its graph
operation, its neural operation and its activation (the micro-pipeline); layers follow each other (the
macro-pipeline). Synchronous micro: a neural operation waits for the graph operations of all partitions.
Synchronous macro: a layer's graph operation waits for the activations of all partitions of the layer before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import InputError

__all__ = ["MODES", "STAGES", "Mode", "Run", "Schedule", "Times", "makespan", "schedule"]

STAGES = ("graph", "neural", "activation")


@dataclass(frozen=True)
class Mode:
    """Which of the two pipelines wait for all partitions."""

    is_micro_async: bool
    is_macro_async: bool

    @property
    def name(self) -> str:
        """The mode in words."""
        sides = (("async" if flag else "sync") for flag in (self.is_micro_async, self.is_macro_async))
        return "{} micro, {} macro".format(*sides)


MODES = tuple(Mode(micro, macro) for macro in (False, True) for micro in (False, True))

# times[layer][stage][partition] in seconds
Times = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Run:
    """One stage of one layer on one partition, from start to end."""

    layer: int
    stage: int
    partition: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Every run of a pipeline; bubble is the share of the workers' time in which they wait."""

    mode: Mode
    runs: tuple[Run, ...]
    workers: int

    @property
    def makespan(self) -> float:
        """Seconds until the last run ends."""
        return max((run.end for run in self.runs), default=0.0)

    @property
    def busy(self) -> float:
        """Seconds of all runs together."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def bubble(self) -> float:
        """The share of the workers' time spent waiting."""
        whole = self.workers * self.makespan
        return 1.0 - self.busy / whole if whole else 0.0


def schedule(times: Times, mode: Mode) -> Schedule:
    """Every run as early as its worker and what it depends on allow."""
    partitions = _check(times)
    runs: list[Run] = []
    before = [0.0] * partitions  # when each partition's activation of the layer before is done
    for layer, stages in enumerate(times):
        start = before if mode.is_macro_async else [max(before)] * partitions
        graph = _worker(runs, layer, 0, stages[0], start)
        start = graph if mode.is_micro_async else [max(graph)] * partitions
        neural = _worker(runs, layer, 1, stages[1], start)
        before = _worker(runs, layer, 2, stages[2], neural)
    return Schedule(mode, tuple(runs), len(times) * len(STAGES))


def _worker(
    runs: list[Run], layer: int, stage: int, seconds: Sequence[float], ready: Sequence[float]
) -> list[float]:
    """When each partition leaves one worker, which takes them in order."""
    free, ends = 0.0, []
    for partition, (took, start) in enumerate(zip(seconds, ready, strict=True)):
        start = max(free, start)
        free = start + took
        runs.append(Run(layer, stage, partition, start, free))
        ends.append(free)
    return ends


def _check(times: Times) -> int:
    """The number of partitions; InputError where stages disagree about it."""
    counts = {len(stage) for layer in times for stage in layer}
    if not times or any(len(layer) != len(STAGES) for layer in times) or len(counts) != 1 or counts == {0}:
        raise InputError(
            "times: give seconds[layer][graph, neural, activation][partition], at least one each"
        )
    if any(took < 0 for layer in times for stage in layer for took in stage):
        raise InputError("times: a stage takes less than no time; give seconds of at least 0")
    return counts.pop()


def makespan(
    layers: int, partitions: int, graph: float, neural: float, activation: float, mode: Mode
) -> float:
    """The makespan in closed form, for equal partitions and layers with graph >= neural >= activation.

    sync, sync: L (P g + P n + a)       async micro, sync macro: L (P g + n + a)
    sync micro, async macro: L (P g + n + a) + (P - 1) n        async, async: (P - 1) g + L (g + n + a)
    """
    if not graph >= neural >= activation >= 0:
        raise InputError(
            f"graph, neural, activation: {graph}, {neural}, {activation} do not descend; use schedule()"
        )
    L, P = layers, partitions
    if mode.is_macro_async and mode.is_micro_async:
        return (P - 1) * graph + L * (graph + neural + activation)
    if mode.is_macro_async:
        return L * (P * graph + neural + activation) + (P - 1) * neural
    if mode.is_micro_async:
        return L * (P * graph + neural + activation)
    return L * (P * graph + P * neural + activation)
