"""Predicted flops against what a training step on real graphs executes, counted from the tensors at hand.

Every kernel call of the executor is counted when it is made: by the edges, weights and shapes it is handed,
not by what the plan says of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, SGConv

import plait
from plait.analysis.work import of_layer
from plait.ops.chain import unchained
from plait.ops.program import Step
from plait.runtime import executor
from plait.runtime.bind import Binding
from plait.runtime.chain import turned
from plait.runtime.constants import SparseValue
from tests.parity.test_real import GRAPHS, arrays, edges_of, features_of

LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn": GCNConv,
    "sage": SAGEConv,
    "gin": lambda a, b: GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
    "sgc": lambda a, b: SGConv(a, b, K=2),
}


class Two(nn.Module):
    def __init__(self, kind: str, widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.first, self.second = LAYERS[kind](*widths[:2]), LAYERS[kind](*widths[1:])

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def real(name: str, width: int) -> Data:
    edges, nodes = edges_of(arrays(name))
    return Data(x=torch.randn(nodes, width, generator=torch.Generator().manual_seed(0)), edge_index=edges)


def with_own_features(name: str) -> Data:
    found = arrays(name)
    edges, nodes = edges_of(found)
    return Data(x=features_of(found, nodes), edge_index=edges)


def operations(part: Step, binding: Binding, shapes: dict[str, tuple[int, int]], env: Any) -> int:
    """Of one kernel call, by its operands; leaves the shape of what it makes."""
    after = sum(part.get(role) is not None for role in ("target", "addend", "addend_scale", "bias"))
    if part.op == "spmm":
        pattern, weight = binding.matrix(part).operands(part.is_transposed)
        rows, cols = shapes[part.out] = (pattern.num_rows, shapes[part["x"]][1])
        each = 2 if weight is not None or part.get("source") is not None else 1
        return each * len(pattern.indices) * cols + rows * cols * after
    if part.op in ("gemm", "gemm_transposed"):
        left, right = part.get("x") or part["left"], part.get("w") or part["right"]
        (rows, inner), (high, wide) = _of(shapes, left), _of(shapes, right)
        cols = high if part.op == "gemm" and part.is_transposed else wide
        shapes[part.out] = (rows, cols) if part.op == "gemm" else (inner, cols)
        value = env.get(left)
        if isinstance(value, SparseValue):
            pattern, weight = value.operands(False)
            product = (1 if weight is None else 2) * len(pattern.indices) * cols
        else:
            product = 2 * rows * inner * cols
        return product + (rows * cols * after if part.op == "gemm" else 0)
    return _row_wise(part, shapes)


def _of(shapes: dict[str, tuple[int, int]], name: str) -> tuple[int, int]:
    """The shape of a value; of a weight the executor may only have the transpose."""
    if name in shapes:
        return shapes[name]
    rows, cols = shapes[turned(name)]
    return cols, rows


def _row_wise(part: Step, shapes: dict[str, tuple[int, int]]) -> int:
    rows, cols = shapes[next(name for role, name in part.reads if role in ("x", "x0", "left"))]
    shapes[part.out] = (1, cols) if part.op == "colsum" else (rows, cols)
    if part.op == "combine":
        terms = len(part.factors)
        passes = sum(f != 1.0 for f in part.factors) + terms - 1 + (part.get("bias") is not None)
        return rows * cols * passes
    return rows * cols * {"dot": 2}.get(part.op, 1)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], int]:
    """Operations by layer and pass, filled while anything runs."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    bind = executor.bind

    def counted(binding: Binding, step: Step, owns: bool) -> Callable[[Any], Any]:
        call, plan = bind(binding, step, owns), binding.run.plan
        ways = {id(plan.forward): "forward", id(plan.backward): "backward", id(plan.hoisted): "once"}

        def run(env: Any) -> Any:
            shapes = {name: _shape(value) for name, value in env.items()}
            for part in unchained(step):
                found[plan.layer, ways[id(binding.program)]] += operations(part, binding, shapes, env)
            return call(env)

        return run

    monkeypatch.setattr(executor, "bind", counted)
    return found


def _shape(value: Any) -> tuple[int, int]:
    if isinstance(value, SparseValue):
        return value.graph.num_nodes, value.graph.num_sources
    shape = tuple(value.shape)
    return shape if len(shape) == 2 else (1, value.numel())  # type: ignore[return-value]


def check(kind: str, data: Data, counts: dict[tuple[str, str], int]) -> Any:
    """One training step, counted and predicted; gives the plan."""
    model: Any = Two(kind, (data.num_features, 16, 6))
    model = plait.compile(model, data, mode="training", forms=("csr",))
    counts.clear()
    model(data.x, data.edge_index).sum().backward()
    predicted = {
        (plan.layer, name): phase
        for plan in model.plan.layers
        for name, phase in of_layer(plan).items()
        if name != "once" and phase.flops
    }
    assert set(counts) == set(predicted)
    for key, phase in predicted.items():
        if phase.is_exact:
            assert counts[key] == phase.flops, key
        else:
            assert counts[key] == pytest.approx(phase.flops, rel=0.2), key
    return predicted


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_training_step_executes_the_flops_that_were_predicted(
    kind: str, graph: str, counts: dict[tuple[str, str], int]
) -> None:
    assert all(phase.is_exact for phase in check(kind, real(graph, 24), counts).values())


@pytest.mark.parametrize("kind", list(LAYERS))
def test_sparse_features_execute_what_was_predicted_of_their_non_zeros(
    kind: str, counts: dict[tuple[str, str], int]
) -> None:
    """Exact for the features; how many non-zeros their sums over neighbours have is an estimate, and said."""
    check(kind, with_own_features("cora"), counts)
