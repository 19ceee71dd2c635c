"""analysis/executed.py: the program of every row is run, compared with its formula, and counted.

Kernels are carried out as loops that count (carried.py), what torch does beside them is counted operation by
operation from its profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import AGNNConv, EdgeConv, GCNConv

import plait
from plait.analysis.executed import BESIDE, LAYERS, REPEATED, executed
from plait.analysis.published import LOCAL
from plait.graph import Graph
from plait.ops.program import Program
from plait.plan.ways import direct
from plait.runtime import executor
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants
from plait.runtime.orders import EdgeOrders
from tests.analysis.test_training_steps import Counts
from tests.analysis.test_training_steps import counts as counts
from tests.analysis.test_work import GRAPHS, graph

K = 5  # columns
STEPS = 3  # of models with several
Values = dict[str, Tensor]


class Case:
    """A small graph with weights, diagonals, and a value for every input of a program."""

    def __init__(self, kind: str, program: Program, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        many = graph(kind, rng).astype(int)
        n = self.nodes = len(many)
        if any(step.op == "attend" for step in program.steps):
            many = many + np.eye(n, dtype=int)  # the loops such a layer adds: no softmax over nothing
        self.target, self.source = (np.repeat(ends, many[many > 0]) for ends in np.nonzero(many))
        generator = torch.Generator().manual_seed(seed)
        self.edges = Graph.from_edge_index(self.source, self.target, num_nodes=n)
        leaf = program.constants["A"]
        is_weighted = getattr(leaf, "is_weighted", False)
        self.weight = torch.rand(len(self.source), generator=generator) + 0.5 if is_weighted else None
        names = [name for name in program.constants if name != "A"]
        self.diagonals = {name: torch.full((n,), 0.3 + 0.1 * k) for k, name in enumerate(names)}
        sizes = {"N": n}
        self.values = {
            name: torch.randn([int(sizes.get(str(s), s)) for s in program.shapes[name]], generator=generator)
            for name in program.inputs
        }

    def run(self, program: Program, wrt: tuple[str, ...] = ()) -> Tensor:
        weight = self.weight
        if weight is not None and self.edges.order is not None:
            weight = weight[torch.from_numpy(self.edges.order.astype("int64"))]
        constants = Constants(self.edges, weight, self.diagonals, torch.float32)
        bound = executor.Run(direct(program, wrt), constants, Buffers(), orders=EdgeOrders(self.edges))
        return executor.apply(bound, self.values)

    def dense(self) -> Tensor:
        """A[i, j]: the weights of the edges from j to i, added up; without weights how many there are."""
        weight = torch.ones(len(self.source)) if self.weight is None else self.weight
        out = torch.zeros(self.nodes, self.nodes)
        return out.index_put((torch.from_numpy(self.target), torch.from_numpy(self.source)), weight, True)

    def by_target(self, messages: Tensor) -> Tensor:
        out = torch.zeros(self.nodes, messages.shape[1])
        return out.index_add(0, torch.from_numpy(self.target), messages)

    def softmaxed(self, scores: Tensor) -> Tensor:
        powers = (scores - scores.max()).exp() if len(scores) else scores
        target = torch.from_numpy(self.target)
        return powers / torch.zeros(self.nodes).index_add(0, target, powers)[target]


def _ends(c: Case, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    return near[torch.from_numpy(c.target)], far[torch.from_numpy(c.source)]


def _attention(c: Case, scores: Tensor, value: Tensor) -> Tensor:
    return c.by_target(c.softmaxed(scores)[:, None] * value[torch.from_numpy(c.source)])


def _pooled(c: Case, v: Values) -> Tensor:
    rows = (v["X"] @ v["P"] + v["c"]).relu()
    most = torch.zeros(c.nodes, K)
    for i, j in zip(c.target, c.source, strict=True):
        most[i] = torch.maximum(most[i].clone(), rows[j])  # after ReLU nothing is below 0
    return most @ v["W"] + v["X"] @ v["V"]


def _gat(c: Case, v: Values) -> Tensor:
    z = v["X"] @ v["W"]
    near, far = _ends(c, z @ v["t"], z @ v["s"])
    return _attention(c, nn.functional.leaky_relu(near + far, 0.2)[:, 0], z)


def _agnn(c: Case, v: Values) -> Tensor:
    near, far = _ends(c, v["B"], v["F"])
    return _attention(c, (near * far).sum(1), v["X"]) @ v["W"]


def _gated(c: Case, v: Values) -> Tensor:
    near, far = _ends(c, v["X"] @ v["W1"], v["X"] @ v["W2"])
    return c.by_target((near + far).sigmoid() * v["X"][torch.from_numpy(c.source)]) @ v["W"]


def _rectified(c: Case, v: Values) -> Tensor:
    near, far = _ends(c, v["X"] @ v["U"], v["X"] @ v["W1"])
    return c.by_target((near + far).relu())


def _gin(c: Case, v: Values) -> Tensor:
    value = c.dense() @ v["X"] + c.diagonals["e"][:, None] * v["X"]
    for k in range(STEPS):
        value = (value.relu() if k else value) @ v[f"W{k}"]
    return value


def _powers(c: Case, v: Values, factors: Mapping[int, float]) -> Tensor:
    """The sum over powers p of factor times Aᵖ X, times W: powers of A as the tables have them."""
    total = torch.zeros_like(v["X"])
    for power, factor in factors.items():
        total = total + factor * torch.linalg.matrix_power(c.dense(), power) @ v["X"]
    return total @ v["W"]


def _numbers(c: Case) -> dict[int, float]:
    return {int(name[1:]): float(value[0]) for name, value in c.diagonals.items()}


def _iterated(c: Case, v: Values) -> Tensor:
    value, (a, b) = v["X"], (float(c.diagonals[name][0]) for name in "ab")
    for _ in range(STEPS):
        value = a * c.dense() @ value + b * v["X"]
    return value @ v["W"]


MEANINGS: dict[str, Callable[[Case, Values], Tensor]] = {
    "GCN": lambda c, v: c.dense() @ v["X"] @ v["W"],
    "GraphSAGE mean": lambda c, v: (
        c.diagonals["p"][:, None] * (c.dense() @ v["X"]) @ v["W"] + v["X"] @ v["V"]
    ),
    "GraphSAGE pool": _pooled,
    "CommNet": lambda c, v: c.dense() @ v["X"] @ v["W"] + v["X"] @ v["V"],
    "EdgeConv-1": lambda c, v: c.dense() @ (v["X"] @ v["W"]),
    "Vanilla attention": lambda c, v: (c.dense() * (v["X"] @ v["X"].T)) @ v["X"] @ v["W"],
    "Dot product": lambda c, v: (c.dense() * (v["X"] @ v["X"].T)) @ v["X"] @ v["W"],
    "AGNN": _agnn,
    "MoNet": lambda c, v: c.dense() @ v["X"] @ v["W"],
    "GAT": _gat,
    "G-GCN": _gated,
    "EdgeConv-5": _rectified,
    "LINE, SDNE": lambda c, v: _powers(c, v, {1: 1.0, 2: float(c.diagonals["q1"][0])}),
    "Node2Vec": lambda c, v: _powers(c, v, _numbers(c)),
    "GIN": _gin,
    "SGC": lambda c, v: _powers(c, v, {STEPS: 1.0}),
    "DeepWalk": lambda c, v: _powers(c, v, dict.fromkeys(range(STEPS + 1), 1.0)),
    "ChebNet": lambda c, v: _powers(c, v, _numbers(c)),
    "DCNN, GDC": lambda c, v: _powers(c, v, _numbers(c)),
    **dict.fromkeys(("Auto-Regress", "PPNP", "ARMA", "ParWalks"), _iterated),
}


def program_of(model: str) -> Program:
    return REPEATED[model][1](STEPS, K, K) if model in REPEATED else LAYERS[model](K, K)


def test_every_program_has_a_meaning() -> None:
    assert set(MEANINGS) == {*LAYERS, *REPEATED}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("model", list(MEANINGS))
def test_a_row_computes_its_formula_and_no_more_than_is_counted(
    model: str, kind: str, counts: Counts
) -> None:
    program = program_of(model)
    case = Case(kind, program)
    torch.testing.assert_close(
        case.run(program), MEANINGS[model](case, case.values), rtol=1e-4, atol=1e-4, msg=model
    )
    table = "local" if any(row.model == model for row in LOCAL) else "global"
    values = {"n": case.nodes, "m": len(case.source), "k": K, "L": 1} | dict.fromkeys("KsT", STEPS)
    beside = BESIDE[model].work(**values) if model in BESIDE else 0  # what torch does: below
    assert sum(counts.flops.values()) == executed(model, table).work(**values) - beside


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("model", list(MEANINGS))
def test_the_gradients_of_a_row_are_those_of_its_formula(model: str, kind: str) -> None:
    program = program_of(model)
    case = Case(kind, program)
    for value in case.values.values():
        value.requires_grad_()
    given = tuple(case.values)
    case.run(program, given).square().sum().backward()
    ours = {name: value.grad for name, value in case.values.items()}
    for value in case.values.values():
        value.grad = None
    MEANINGS[model](case, case.values).square().sum().backward()
    for name, value in case.values.items():
        theirs = torch.zeros_like(value) if value.grad is None else value.grad
        scale = float(theirs.abs().max().clamp(min=1.0))
        torch.testing.assert_close(ours[name], theirs, rtol=1e-3, atol=1e-4 * scale, msg=f"{model} {name}")


# What torch does beside ------------------------------------------------------------------------------------


def torch_flops(events: Any) -> int:
    """Operations of torch's own in a profile, by the shapes of their operands; views and copies are none."""
    flops = 0
    for event in events:
        name, shapes = event.name.removeprefix("aten::"), [tuple(s) for s in event.input_shapes or ()]
        if name == "mm":
            (rows, inner), (_, columns) = shapes[:2]
            flops += 2 * rows * inner * columns
        elif name == "linalg_vector_norm":  # squares, their sums, roots
            flops += 2 * math.prod(shapes[0]) + shapes[0][0]
        elif name == "sum":
            flops += math.prod(shapes[0])
        elif name in ("sub", "add", "mul", "div", "clamp_min", "exp"):
            flops += math.prod(np.broadcast_shapes(*shapes[:2]))
        elif event.name.startswith("aten::"):
            assert name.rstrip("_") in _MOVES, name
    return flops


_MOVES = frozenset((
    "view", "expand", "expand_as", "t", "detach", "unsqueeze", "slice", "cat", "clone", "empty", "transpose",
    "alias", "select", "as_strided", "empty_strided", "reshape", "copy", "empty_like", "resize", "set",
    "linear", "matmul", "norm", "normalize",  # whose parts are counted
    "item", "_local_scalar_dense", "is_nonzero", "to", "_to_copy", "result_type", "lift_fresh", "split",
    "fill", "narrow", "numpy_T", "contiguous", "resolve_conj", "resolve_neg", "_unsafe_view", "chunk",
    "detach", "real", "conj", "view_as", "split_with_sizes", "index_select", "zeros", "zero", "new_empty",
))  # fmt: skip


class Unweighted(nn.Module):
    """AGNN as the row has it: PyG's layer with a weight behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = AGNNConv(add_self_loops=False), nn.Linear(K, K, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.weight(self.conv(x, edge_index))


class MoNet(nn.Module):
    """exp(-1/2 (h_j - w)ᵀ W⁻¹ (h_j - w)) h_j, summed, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.inverse = nn.Parameter(torch.rand(K)), nn.Parameter(torch.eye(K) / K)
        self.conv = GCNConv(K, K, normalize=False, add_self_loops=False, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        apart = x - self.mean
        power = ((apart @ self.inverse) * apart).sum(1) * -0.5
        return self.conv(power.exp()[:, None] * x, edge_index)


class Rectified(nn.Module):
    """σ(W1 (h_j - h_i) + W2 h_i), summed: PyG's EdgeConv with one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = EdgeConv(nn.Sequential(nn.Linear(2 * K, K, bias=False), nn.ReLU()), aggr="sum")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.parametrize(
    ("model", "make"), [("AGNN", Unweighted), ("MoNet", MoNet), ("EdgeConv-5", Rectified)]
)
def test_a_compiled_model_carries_out_what_its_row_counts(
    model: str, make: Callable[[], nn.Module], counts: Counts
) -> None:
    n, generator = 30, torch.Generator().manual_seed(0)
    ring = torch.stack((torch.arange(n), torch.arange(n).roll(1)))  # no softmax over nothing
    edges = torch.cat((ring, torch.randint(0, n, (2, 60), generator=generator)), dim=1)
    x = torch.randn(n, K, generator=generator)
    plain = make()
    compiled = plait.compile(plain)
    with torch.no_grad():
        compiled(x.clone(), edges)  # planned now; the second call is counted
        counts.flops.clear()
        features = x.clone()
        with torch.profiler.profile(record_shapes=True) as profile:
            out = compiled(features, edges)
        torch.testing.assert_close(out, plain(x, edges), rtol=1e-4, atol=1e-5)
    values = {"n": n, "m": 90, "k": K, "L": 1}
    assert sum(counts.flops.values()) + torch_flops(profile.events()) == executed(model, "local").work(
        **values
    )
