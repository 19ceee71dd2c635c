"""Measures what the passes of attention take compared with their prices, on made-up graphs.

The prices of such a pass (cost/price.py) compare it with a sparse product of the same rows by rough factors.
Here every candidate of GAT, GATv2 and Transformer is trained with a clock on each step; the geometric mean of
seen over predicted seconds corrects the price of that kind of pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from plait.bench.pace import at_pace
from plait.bench.problem import edge_index_of, hidden_features, training_step
from plait.graph import Graph, generate
from plait.plan.plan import LayerPlan
from plait.pyg.compile import compile
from plait.pyg.probe import Probe

__all__ = ["attention_factors", "made_up_graphs"]

_WIDTHS = ((48, 48), (128, 24), (24, 160))
_HEADS = (4,)
_WARM, _REPEATS = 2, 4
_TOO_DEAR = 3.0  # times the cheapest price: it will not be chosen, and takes longest to measure
_CANDIDATES = {GATConv: 8, GATv2Conv: 3, TransformerConv: 5}


def made_up_graphs() -> list[Graph]:
    """Graphs apart in degree and locality; none of them is anyone's data."""
    return [generate.erdos(4_000, 60_000, 21), generate.grid(120, 120), generate.rmat(13, 80_000, 22)]


def attention_factors(
    graphs: Sequence[Graph] | None = None, tell: Callable[[float], None] = lambda share: None
) -> dict[str, float]:
    """Seen over predicted seconds by kind of pass, for a profile's measured["attention"]."""
    chosen = made_up_graphs() if graphs is None else graphs
    logs: dict[str, list[float]] = {}
    for number, graph in enumerate(chosen):
        edge_index = edge_index_of(graph)
        for k, (inner, outer) in enumerate(_WIDTHS):
            x = hidden_features(graph.num_nodes, inner).requires_grad_()
            for layer, count in _layers(inner, outer):
                for rank in range(count):
                    ratios = at_pace(functools.partial(_ratios, layer, rank, x, edge_index))
                    for name, ratio in ratios.items():
                        logs.setdefault(name, []).append(math.log(ratio))
            tell((number * len(_WIDTHS) + k + 1) / (len(chosen) * len(_WIDTHS)))
    return {name: math.exp(sum(own) / len(own)) for name, own in sorted(logs.items())}


def _layers(inner: int, outer: int) -> Iterator[tuple[nn.Module, int]]:
    for heads in _HEADS:
        for kind, count in _CANDIDATES.items():
            yield kind(inner, outer // heads, heads=heads), count


def _ratios(layer: nn.Module, rank: int, x: Tensor, edge_index: Tensor) -> dict[str, float]:
    """Seen over uncorrected seconds of each pass of the candidate of this rank; none if it is too dear."""
    compiled: Any = compile(layer, None)
    probe = Probe(compiled)
    probe.take(rank, lambda: compiled(x, edge_index))
    ((name, plan),) = probe.plans.items()
    assert isinstance(plan, LayerPlan)
    if any((loser.seconds or plan.seconds) * _TOO_DEAR < plan.seconds for loser in plan.rejected):
        return {}
    seen = probe.clock(training_step(compiled, x, edge_index), _WARM, _REPEATS)
    return {
        step.price.kind: median(seen[name, step.step.out]) / step.price.uncorrected
        for step in plan.steps
        if (name, step.step.out) in seen and step.price.kind.startswith("attend")
    }
