"""What the parts of plait bench batches share: their options, their graphs, their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from plait.bench.cases import find_graph
from plait.graph import Graph
from plait.measure import BusyElsewhere, Record, environment

__all__ = ["KIND", "Bar", "Options", "Part", "load", "recorded"]

KIND = "bench-batches"


@dataclass(frozen=True)
class Bar:
    """A number that was promised: at least `limit`, or at most."""

    name: str
    value: float
    limit: float
    is_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether the promise was kept."""
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def to_dict(self) -> dict[str, object]:
        """Plain values for a record."""
        return asdict(self) | {"holds": self.holds}


@dataclass(frozen=True)
class Options:
    """How the parts are run; `is_small` is for tests: tiny graphs, few samples, the same code."""

    data_dir: str | None = None
    budget_seconds: float = 3.0
    epochs: int = 50
    breaks: int = 1000
    is_small: bool = False
    environment: Mapping[str, object] = field(default_factory=environment)

    @property
    def graphs(self) -> dict[str, str]:
        """The graphs batches are drawn from, by the names records give them."""
        if self.is_small:
            return {"rmat-small": "rmat:scale=10,edges=2e4"}
        return {"ego_twitter": "ego_twitter", "rmat-2M": "rmat:scale=17,edges=2e6"}


Measured = tuple[Mapping[str, object], Mapping[str, object], tuple[Bar, ...]]
Part = Callable[[Options], Iterator[Measured]]


def recorded(name: str, part: Part, options: Options) -> Iterator[Record]:
    """The records of a part: case and result of each thing measured, its bars, how busy the machine was."""
    cells = part(options)
    while True:
        with BusyElsewhere() as busy:
            cell = next(cells, None)
        if cell is None:
            return
        case, result, bars = cell
        more = {"bars": [bar.to_dict() for bar in bars], "busy_elsewhere": busy.share}
        yield Record(KIND, {"part": name, **case}, {**result, **more}, options.environment)


@lru_cache(maxsize=2)
def load(name: str, data_dir: str | None) -> Graph:
    """The graph of that name, kept for the next part that wants it."""
    return find_graph(name, data_dir).graph


def edge_list(graph: Graph) -> Any:
    """[2, E] of sources and targets in an order of no meaning, as a file would have them."""
    order = np.random.default_rng(1).permutation(graph.num_edges)
    ends = np.stack((graph.indices.astype(np.int64), graph.edge_rows().astype(np.int64)))
    return np.ascontiguousarray(ends[:, order])
