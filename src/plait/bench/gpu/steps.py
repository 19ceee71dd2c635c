"""Whole training steps on small graphs and mini-batches: captured, by plait, by PyG and by torch.compile.

`steps`: a two-layer model with dropout and Adam on cora and pubmed. `epoch`: a two-layer SAGE by sampled
mini-batches, features on the device, both with plait's loader.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GraphSAGE

import plait
from plait.bench.cases import find_graph
from plait.bench.problem import edge_index_of
from plait.bench.task import adam_step
from plait.loader import NeighborLoader
from plait.measure.device import clock_of
from plait.measure.timer import time_calls

__all__ = ["MOVES", "epoch", "epochs", "measure", "steps"]

_HIDDEN, _CLASSES, _CHECKED = 64, 7, 20
_FEATURES = {"cora": 1433, "pubmed": 500}
_FANOUT, _BATCH, _WIDTH, _PREFETCH = [15, 10], 1024, 128, 4
_BATCH_RATE = 0.003  # of Adam, by mini-batches
_MODELS: dict[str, Callable[..., nn.Module]] = {"gcn": GCN, "sage": GraphSAGE}
MOVES: dict[str, dict[str, Any]] = {"host": {}, "pinned": {"pin_memory": True}, "loader": {"device": "cuda"}}
"""How batches reach the device: from any memory, from pinned memory, or on the loader's own stream."""


def measure(compiles: bool = True) -> Iterator[dict[str, Any]]:
    """One record per model and graph, of torch.compile and then of all."""
    cases = [(name, kind) for name in _FEATURES for kind in _MODELS]
    by_compiler = {}
    # first: where plait has been in use, torch.compile may follow PyG's layers less well
    for name, kind in cases if compiles else ():
        by_compiler[name, kind] = _compiled_ms(name, kind)
        yield {"step": kind, "graph": name, "torch.compile": by_compiler[name, kind]}
    for case in cases:
        yield steps(*case, by_compiler.get(case))


def epochs() -> Iterator[dict[str, Any]]:
    """One record per way that batches reach the device."""
    for moved in MOVES:
        yield epoch(moved)


def _model(name: str, kind: str, dropout: float) -> nn.Module:
    torch.manual_seed(1)
    return _MODELS[kind](_FEATURES[name], _HIDDEN, 2, _CLASSES, dropout=dropout).cuda()


def _compiled_ms(name: str, kind: str) -> float:
    """Milliseconds of a step whose model torch.compile made."""
    torch._dynamo.reset()
    fast: Any = torch.compile(_model(name, kind, 0.5), dynamic=False)
    step = _loop(fast, _data(name))
    timing = time_calls({"step": step}, warmup=10, budget_seconds=0.7, clock=clock_of("cuda"))
    return 1e3 * timing["step"].median


def _data(name: str) -> Data:
    graph = find_graph(name).graph
    torch.manual_seed(0)
    return Data(
        x=torch.rand(graph.num_nodes, _FEATURES[name]),
        edge_index=edge_index_of(graph),
        y=torch.randint(0, _CLASSES, (graph.num_nodes,)),
        rows=torch.randperm(graph.num_nodes)[: 20 * _CLASSES],
    ).to("cuda")


def _loss(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data.x, data.edge_index)[data.rows], data.y[data.rows])


def _loop(model: nn.Module, data: Any) -> Callable[..., Tensor]:
    return adam_step(model.parameters(), functools.partial(_loss, model, data))


def _captured(
    model: nn.Module, data: Any = None, loss: Callable[..., Tensor] = _loss, learning_rate: float = 0.01
) -> Callable[..., Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    step: Callable[..., Tensor]
    step = plait.compile(model, data, capture=True, loss=loss, optimizer=optimizer).step
    return step


def steps(name: str, kind: str, compiled_ms: float | None, budget_seconds: float = 1.5) -> dict[str, Any]:
    """Milliseconds of a step, each way; losses without dropout are compared first."""
    data = _data(name)
    plain = _model(name, kind, 0.0)
    losses = [
        [float(step()) for _ in range(_CHECKED)]
        for step in (_loop(copy.deepcopy(plain), data), _captured(copy.deepcopy(plain), data))
    ]
    error = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    model = _model(name, kind, 0.5)
    ways = {
        "pyg": _loop(copy.deepcopy(model), data),
        "plait": _loop(plait.compile(copy.deepcopy(model), data), data),
        "captured": _captured(copy.deepcopy(model), data),
    }
    timings = time_calls(ways, warmup=10, budget_seconds=budget_seconds, clock=clock_of("cuda"))
    ms = {way: 1e3 * timing.median for way, timing in timings.items()}
    if compiled_ms is not None:
        ms["torch.compile"] = compiled_ms
    ratios = {f"over {way}": value / ms["captured"] for way, value in ms.items() if way != "captured"}
    return {"step": kind, "graph": name, "loss_error": error, **ms, **ratios}


def epoch(moved: str = "pinned", name: str = "ego_twitter", epochs: int = 6) -> dict[str, Any]:
    """Seconds of an epoch (the fastest of a few), each way, and of its loading alone.

    The last batch is smaller and comes once an epoch: its step is captured in the third.

    A captured step takes batches of the host as they are; for the others the loop moves them.
    """
    graph = find_graph(name).graph
    torch.manual_seed(0)
    features = torch.rand(graph.num_nodes, _WIDTH, device="cuda")
    labels = torch.randint(0, 16, (graph.num_nodes,), device="cuda")
    data = Data(edge_index=edge_index_of(graph), num_nodes=graph.num_nodes)
    model = GraphSAGE(_WIDTH, 128, 2, 16).cuda()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(features[batch.n_id], batch.edge_index)[: batch.batch_size]
        return cross_entropy(out, labels[batch.n_id[: batch.batch_size]])

    def loop(model: nn.Module) -> Callable[[Any], Tensor]:
        return adam_step(model.parameters(), functools.partial(loss, model), _BATCH_RATE)

    ways: dict[str, Callable[[Any], Any]] = {
        "pyg": loop(copy.deepcopy(model)),
        "plait": loop(plait.compile(copy.deepcopy(model))),
        "captured": _captured(copy.deepcopy(model), None, loss, _BATCH_RATE),
        "loading": lambda batch: torch.zeros(()),
    }
    loaders = {
        way: NeighborLoader(
            data, _FANOUT, batch_size=_BATCH, shuffle=True, seed=0, prefetch=_PREFETCH, **MOVES[moved]
        )
        for way in ways
    }  # fmt: skip
    seconds: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    for k in range(epochs):
        for way, step in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            is_moved_here = moved != "loader" and way != "captured"
            batches = (b.to("cuda", non_blocking=True) if is_moved_here else b for b in loaders[way])
            seen = [step(batch).clone() for batch in batches]
            torch.cuda.synchronize()
            spent = time.perf_counter() - start
            seconds[way] = spent if k < 2 else min(seconds[way], spent)
            losses.setdefault(way, []).extend(float(value) for value in seen)
    # as the loader's own copies, which say where the edges of each target begin
    drawn = list(NeighborLoader(data, _FANOUT, batch_size=_BATCH, shuffle=True, seed=0, device="cuda"))
    alone = {way: _over(step, drawn) for way, step in ways.items() if way != "loading"}
    error = max(abs(a - b) / abs(a) for a, b in zip(losses["pyg"], losses["captured"], strict=True))
    return {
        "epoch": "sage", "graph": name, "moved": moved, "batches": len(drawn),
        "edges": int(drawn[0].num_edges), "loss_error": error, **seconds,
        "over pyg": seconds["pyg"] / seconds["captured"],
        "batches at hand": alone, "steps over pyg": alone["pyg"] / alone["captured"],
    }  # fmt: skip


def _over(step: Callable[[Any], Any], batches: list[Any]) -> float:
    """Seconds of an epoch over batches that are on the device already."""
    for batch in batches:  # captures a step for every size
        step(batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    return time.perf_counter() - start
