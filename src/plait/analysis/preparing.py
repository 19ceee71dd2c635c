"""What mini-batches cost beside training: preparing a worker's own, and answering what others request.

A batch is prepared in turn with training: its edges are drawn, its rows collected, its graph put together.
Requests of other workers are answered by threads of their own whenever they come. Where a worker has a core
for them, training does not notice; where it has none, training waits for as long as they compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.analysis.fetch import Fetch
from plait.analysis.growth import Growth
from plait.analysis.network import Network, Traffic
from plait.analysis.workload import Workload

__all__ = ["HEADER", "ID_BYTES", "MET", "Crew", "Preparing", "fetched", "preparing"]

ID_BYTES, HEADER = 8, 3  # of a node's number on its way, and the numbers that say how many come
# Messages of a round of fetching: the bell, counts, ids, rows. A worker starts one for its batch, and takes
# part in those of the others.
_ROUND = 4
MET = 3  # of them, those that ranks wait for


@dataclass(frozen=True)
class Crew:
    """The threads of a worker that train, and the cores that all its threads share."""

    threads: int
    cores: float

    def lost(self, training: float, beside: float) -> float:
        """Seconds that training loses to threads beside it, which compute for `beside` processor seconds.

        Cores that training leaves idle take them first; what they cannot take is divided among all.
        """
        if beside <= 0:
            return 0.0
        return max(0.0, (min(self.threads, self.cores) * training + beside) / self.cores - training)


@dataclass(frozen=True)
class Preparing:
    """Processor seconds of one worker in an epoch beside its layers."""

    drawing: float  # edges of its own batches, and their graphs
    collecting: float  # rows of its own batches
    handling: float  # Python of every batch, whatever its size
    answering: float  # requests of other workers

    @property
    def own(self) -> float:
        """To prepare its own batches."""
        return self.drawing + self.collecting + self.handling

    def note(self, crew: Crew, lost: float) -> str:
        """It in words, with what training loses."""
        beside = (
            f"answering others {_ms(self.answering)}" if self.answering else "answering others not priced"
        )
        cost = f", which training loses {_ms(lost)} to" if lost else ""
        return (
            f"a worker prepares its batches in {_ms(self.own)} (drawing {_ms(self.drawing)}, rows "
            f"{_ms(self.collecting)}), {beside}{cost}: {_count(crew.threads, 'thread')} on "
            f"{_count(crew.cores, 'core')}"
        )


def preparing(work: Workload, growth: Growth, fetch: Fetch, network: Network, workers: int) -> Preparing:
    """Of the worker whose batches have the most nodes."""
    batches = fetch.nodes / max(1.0, growth.nodes[-1])  # the last one of an epoch is short
    asked = fetch.rounds * (workers - 1) / max(1, workers)  # by others, of which each starts as many rounds
    answered = float(max(fetch.sent, default=0.0)) * work.looked_up_row_seconds if network.busy else 0.0
    return Preparing(
        batches * sum(growth.edges) * work.sampled_edge_seconds,
        batches * growth.nodes[-1] * work.looked_up_row_seconds,
        fetch.steps * work.batch_seconds,
        asked * _ROUND * network.busy + answered,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}" + "s" * (number != 1)


def fetched(fetch: Fetch, workers: int, row_bytes: float) -> Traffic:
    """Of a remote row its number goes out and its features come back; counts of both go before them."""
    columns = row_bytes + ID_BYTES
    # a worker that lacks rows starts a round, in which all send the others the number of rows they need
    counts = fetch.rounds * (workers - 1) * ID_BYTES * HEADER
    return Traffic(
        fetch.total * columns + counts * workers,
        fetch.busiest * columns + counts,
        _ROUND * fetch.steps * (workers - 1),
        MET * fetch.steps,
    )
