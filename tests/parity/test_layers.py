"""Every layer and option, compiled, against PyG: outputs, gradients of the input and of every parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parity.harness import agree
from tests.pyg.cases import (
    CASES,
    SHAPES,
    WIDTH,
    Case,
    random_edges,
    random_weights,
    randomise,
    to_adj_t,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
DTYPES = [torch.float32, torch.float64]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def features(rng: np.random.Generator, rows: int, dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    return torch.from_numpy(rng.normal(size=(rows, width))).to(dtype)


def nodes_of(shape: str, rng: np.random.Generator) -> int:
    return 1 if shape == "one node" else int(rng.integers(2, 12))


def built(make: Any, rng: np.random.Generator, dtype: torch.dtype, **options: Any) -> Any:
    return randomise(make(**options).to(dtype), rng)


@dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_edge_lists(case: Case, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    for k, shape in enumerate(SHAPES if dtype == torch.float32 else SHAPES[::3]):
        nodes = nodes_of(shape, rng)
        edges = random_edges(rng, shape, nodes, nodes)
        weights = random_weights(rng, edges, case.takes_negative, dtype)
        flow = "target_to_source" if k % 3 == 2 else "source_to_target"
        for weight in (None, weights) if case.takes_weights else (None,):
            module = built(case.make, rng, dtype, flow=flow).train(k % 2 == 0 and nodes > 1)
            rest = (edges,) if weight is None else (edges, weight)
            agree(module, features(rng, nodes, dtype), *rest)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_constant_input_seen_again_and_again(case: Case) -> None:
    """Products of the input may be kept from call to call; the answers may not change."""
    rng, dtype = np.random.default_rng(2), torch.float64
    edges = random_edges(rng, "loops", 40, 40)
    x = features(rng, 40, dtype)
    agree(built(case.make, rng, dtype), x, edges, wants_grad=False, calls=3)
    agree(built(case.make, rng, dtype), x * (x > 1.2), edges, wants_grad=False, calls=3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_gradients(case: Case) -> None:
    rng = np.random.default_rng(3)
    edges = random_edges(rng, "hub", 20, 20)
    with torch.no_grad():
        agree(built(case.make, rng, torch.float32).eval(), features(rng, 20, torch.float32), edges, calls=2)


@pytest.mark.parametrize("case", [case for case in CASES if case.takes_sparse], ids=str)
def test_sparse_matrices(case: Case) -> None:
    rng, dtype = (
        np.random.default_rng(4),
        torch.float32,
    )  # ClusterGCNConv's sparse path takes the default dtype only
    for shape in SHAPES[::2]:  # the random layers of test_fuzz.py meet sparse matrices of every shape
        nodes = nodes_of(shape, rng)
        edges = random_edges(rng, shape, nodes, nodes)
        weights = random_weights(rng, edges, case.takes_negative, dtype)
        for weight in (None, weights) if case.takes_weights else (None,):
            adj_t = to_adj_t(edges, weight, nodes, nodes)
            agree(built(case.make, rng, dtype).eval(), features(rng, nodes, dtype), adj_t)


@dtypes
@pytest.mark.parametrize("case", [case for case in CASES if case.make_pair], ids=str)
def test_pairs(case: Case, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    for shape in SHAPES if dtype == torch.float32 else SHAPES[::3]:
        sources, targets = (int(n) for n in rng.integers(1, 9, 2))
        edges = random_edges(rng, shape, targets, sources)
        weights = random_weights(rng, edges, case.takes_negative, dtype)
        x = (features(rng, sources, dtype), features(rng, targets, dtype, case.root_width))
        for weight in (None, weights) if case.takes_weights else (None,):
            rest = (edges,) if weight is None else (edges, weight)
            agree(built(case.make_pair, rng, dtype).eval(), x, *rest)


@pytest.mark.parametrize("case", [c for c in CASES if c.make_pair and not c.needs_root], ids=str)
def test_pairs_without_a_root(case: Case) -> None:
    rng, dtype = np.random.default_rng(6), torch.float64
    edges = random_edges(rng, "random", 7, 7)
    agree(built(case.make_pair, rng, dtype).eval(), (features(rng, 7, dtype), None), edges, must_plan=False)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("nodes", [0, 3])
def test_no_nodes_or_no_width_is_the_right_empty_result(case: Case, nodes: int) -> None:
    rng = np.random.default_rng(7)
    if nodes == 0 and ("ChebConv" in case.name or "mlp" in case.name):
        pytest.skip("PyG itself has no answer for an empty graph here")
    edges = torch.zeros((2, 0), dtype=torch.long)
    agree(built(case.make, rng, torch.float32).eval(), features(rng, nodes, torch.float32), edges)


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_tied_extremes_share_the_gradient_as_in_pyg(aggr: str) -> None:
    from torch_geometric.nn import SAGEConv

    rng = np.random.default_rng(8)
    for _ in range(20):
        edges = random_edges(rng, "repeated", 12, 12)
        x = torch.from_numpy(rng.integers(0, 3, (12, WIDTH))).double()
        agree(built(lambda: SAGEConv(WIDTH, 3, aggr=aggr), rng, torch.float64), x, edges)


def test_a_negative_degree_is_nan_where_it_is_in_pyg() -> None:
    from torch_geometric.nn import GCNConv

    edges = torch.tensor([[0, 1, 2, 3, 1], [1, 0, 3, 2, 2]])
    weight = torch.tensor([-3.0, 0.5, 1.0, 2.0, 0.0])
    with torch.no_grad():
        agree(GCNConv(4, 3), torch.rand(5, 4), edges, weight)
