"""A model on a graph as the strategies see it: seconds, exchanged columns, weights and memory by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.analysis.layers import Layer

__all__ = ["Load", "Workload", "workload_of"]

_LINE_FLOATS = 16  # of a cache line


@dataclass(frozen=True)
class Load:
    """One layer as a strategy sees it: columns its products with the graph carry, seconds, flops, weights."""

    name: str
    width_in: int
    width_out: int
    ahead: tuple[int, ...]
    behind: tuple[int, ...]
    graph_seconds: tuple[float, float]  # forward, backward
    dense_seconds: tuple[float, float]
    flops: float
    parameters: int
    held_bytes: float
    after_seconds: tuple[float, float] = (0.0, 0.0)  # of what follows: an activation, or the loss
    takes_halo: bool = False  # runs on its rows and their halo: what travels is its input
    once_seconds: float = 0.0  # products with the graph done once; mini-batches repeat them

    @property
    def gathers(self) -> tuple[int, ...]:
        """Widths of all products with the graph, forward and backward."""
        return self.ahead + self.behind

    @property
    def seconds(self) -> float:
        """Seconds of the layer on one worker."""
        return sum(self.graph_seconds) + self.row_seconds

    def narrow_seconds(self, workers: int) -> float:
        """Of the products with the graph, each with one part in this many of the columns and all edges.

        Rows are gathered by cache lines: one that fills no line takes as long as one that does.
        """

        def lines(columns: Iterable[int], parts: int) -> float:
            return sum(max(c / parts, _LINE_FLOATS) for c in columns)

        pairs = zip(self.graph_seconds, (self.ahead, self.behind), strict=True)
        return sum(took * lines(c, workers) / lines(c, 1) if c else took / workers for took, c in pairs)

    @property
    def row_seconds(self) -> float:
        """What is done row by row: products with weights, and what follows the layer."""
        return sum(self.dense_seconds) + sum(self.after_seconds)

    def widened(self, factor: float) -> Load:
        """The layer with all widths times `factor`: its graph part grows with it, its dense part twice so."""

        def wide(columns: Iterable[int]) -> tuple[int, ...]:
            return tuple(max(1, round(c * factor)) for c in columns)

        ahead, behind = self.graph_seconds
        dense = tuple(seconds * factor**2 for seconds in self.dense_seconds)
        after = tuple(seconds * factor for seconds in self.after_seconds)
        return replace(
            self, width_in=wide((self.width_in,))[0], width_out=wide((self.width_out,))[0],
            ahead=wide(self.ahead), behind=wide(self.behind), once_seconds=self.once_seconds * factor,
            graph_seconds=(ahead * factor, behind * factor), dense_seconds=(dense[0], dense[1]),
            after_seconds=(after[0], after[1]),
            flops=self.flops * factor**2, parameters=round(self.parameters * factor**2),
            held_bytes=self.held_bytes * factor,
        )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A model on a graph: its layers, the graph's size, the bytes of a number and of an edge."""

    loads: tuple[Load, ...]
    nodes: int
    edges: int
    features: int
    float_bytes: int = 4
    index_bytes: int = 4
    graphs: int = 1  # separate graphs in the data
    parameters: int | None = None  # of the whole model, where it is available; else those of the layers
    sampled_edge_seconds: float = 0.0  # to draw one edge of a mini-batch
    looked_up_row_seconds: float = 0.0  # to bring the features of a node into a mini-batch
    step_seconds: float = 0.0  # of a step of training, whatever its size
    spread_seconds: float = 0.0  # more of one over several workers
    batch_seconds: float = 0.0  # the same of a step on a mini-batch
    loss_seconds: float = 0.0  # of all rows; a part of what follows the last layer
    planned_batch_seconds: float | None = None  # of layers and what follows them, on a batch that was drawn
    # of steps with loss and optimiser, where they were timed: of every batch, and more of a whole one
    timed_batch_seconds: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Seconds of all layers on one worker."""
        return sum(load.seconds for load in self.loads)

    @property
    def flops(self) -> float:
        """Operations of all layers."""
        return sum(load.flops for load in self.loads)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the parameters."""
        known = sum(load.parameters for load in self.loads) if self.parameters is None else self.parameters
        return float(known * self.float_bytes)

    @property
    def graph_bytes(self) -> float:
        """Both directions of the graph, as the kernels read them."""
        return 2.0 * (self.edges * self.index_bytes + self.nodes * 8)

    @property
    def feature_bytes(self) -> float:
        """Bytes of the input features."""
        return float(self.nodes * self.features * self.float_bytes)

    @property
    def held_bytes(self) -> float:
        """Bytes that all layers keep and make."""
        return sum(load.held_bytes for load in self.loads)

    def rows_bytes(self, columns: float) -> float:
        """A matrix with a row for every node."""
        return self.nodes * columns * self.float_bytes

    def widened(self, factor: float) -> Workload:
        """The workload with all widths times `factor`."""
        loads = tuple(load.widened(factor) for load in self.loads)
        known = None if self.parameters is None else round(self.parameters * factor**2)
        planned, timed = self.planned_batch_seconds, self.timed_batch_seconds
        return replace(
            self, loads=loads, features=max(1, round(self.features * factor)), parameters=known,
            planned_batch_seconds=None if planned is None else planned * factor,
            timed_batch_seconds=None if timed is None else (timed[0], timed[1] * factor),
        )  # fmt: skip


Seconds = tuple[float, float]


def workload_of(
    layers: Sequence[Layer],
    nodes: int,
    edges: int,
    features: int,
    after: Callable[[Layer, bool], Seconds] = lambda layer, is_last: (0.0, 0.0),
    **more: Any,
) -> Workload:
    """The layers that could be counted; black boxes count as nothing and are marked in the analysis.

    `after` are the seconds, forward and backward, of what follows a layer: an activation, or the loss.
    """
    counted = [layer for layer in layers if not layer.is_black_box]
    loads = tuple(_load(layer, after(layer, layer is counted[-1]), layer is counted[0]) for layer in counted)
    return Workload(loads, nodes, edges, features, **more)


def _load(layer: Layer, after: Seconds, is_first: bool) -> Load:
    ahead, behind = layer.forward, layer.backward
    columns = (ahead.gathers, _returned(ahead.gathers, behind.gathers))
    if layer.has_passes:
        # rows of its input come before it runs, their gradients go back; features that never change come once
        given = () if is_first else (layer.width_in,)
        columns = (given, given if behind.gathers else ())
    return Load(
        name=layer.name,
        width_in=layer.width_in,
        width_out=layer.width_out,
        ahead=columns[0],
        behind=columns[1],
        graph_seconds=(ahead.gather_seconds, behind.gather_seconds),
        dense_seconds=(ahead.seconds - ahead.gather_seconds, behind.seconds - behind.gather_seconds),
        flops=ahead.flops + behind.flops,
        parameters=layer.parameters,
        held_bytes=layer.held_bytes,
        after_seconds=after,
        takes_halo=layer.has_passes,
        once_seconds=layer.phases["once"].gather_seconds if "once" in layer.phases else 0.0,
    )


def _returned(ahead: tuple[int, ...], behind: tuple[int, ...]) -> tuple[int, ...]:
    """Columns of the gradients' exchanges: they can go back the way the rows came, if that is narrower.

    On one machine the gradients may follow another association, whose products are wider (plan/search.py).
    """
    if len(ahead) != len(behind):
        return behind
    return tuple(min(pair) for pair in zip(reversed(ahead), behind, strict=True))
