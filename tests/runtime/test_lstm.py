"""runtime/lstm: outputs and gradients of torch's own LSTM over padded lists, with fewer steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.graph import Graph
from plait.plan.draft import Draft
from plait.plan.ways import Way
from plait.runtime.edges import Edges
from plait.runtime.lstm import Prefixes
from plait.runtime.session import Session
from plait.runtime.ways import Programs

CASES = {
    "random": ([0, 3, 1, 2, 2, 0, 1, 4], [0, 0, 0, 1, 1, 3, 3, 3], 5),
    "repeated edges and loops": ([1, 1, 0, 2, 2, 2], [0, 0, 0, 2, 2, 2], 3),
    "a hub": (list(range(12)), [3] * 12, 12),
    "equal lists": ([5, 6, 5, 6, 5, 6, 5], [0, 0, 1, 1, 2, 2, 3], 8),
    "one edge": ([0], [1], 2),
}


def padded(graph: Graph, x: Tensor, cell: nn.LSTM) -> Tensor:
    """The slow obvious way: every list in the callers' order, zeros at its end, one row each."""
    degrees = np.diff(graph.indptr)
    batch = []
    order = graph.order if graph.order is not None else np.arange(graph.num_edges)
    for v in range(graph.num_nodes):
        span = slice(graph.indptr[v], graph.indptr[v + 1])
        listed = graph.indices[span][np.argsort(order[span], kind="stable")]
        taken = x[torch.from_numpy(listed.astype(np.int64))]
        batch.append(torch.cat([taken, x.new_zeros(int(degrees.max()) - len(listed), x.shape[1])]))
    out: Tensor = cell(torch.stack(batch))[0][:, -1]
    return out


def lstm(x: Tensor, cell: nn.LSTM, graph: Graph) -> Tensor:
    """The state after every node's padded list, by a program of its own."""
    inputs = {"X": x, "G": cell.weight_ih_l0.t(), "H": cell.weight_hh_l0.t()}
    if cell.bias:
        inputs["g"] = cell.bias_ih_l0 + cell.bias_hh_l0
    prefixes = Prefixes(graph)
    levels = prefixes.levels

    def ways(wrt: tuple[str, ...] | None) -> list[Way]:
        draft, columns, units = Draft(), 4 * cell.hidden_size, cell.hidden_size
        bias = draft.input("g", 1, columns) if cell.bias else None
        rows, of_input = draft.input("X", "N", x.shape[1]), draft.input("G", x.shape[1], columns)
        reads = {
            "lists": draft.object("lists", "P", "D"), "x": draft.gemm(rows, of_input, bias),
            "w": draft.input("H", units, columns), "bias": bias,
        }  # fmt: skip
        more = [("gates", ("P", columns)), ("cell", ("P", units))] if wrt else []
        return [Way("prefixes", "", draft.program(draft.add("sequence", reads, ("N", units), more=more)))]

    sizes = {"P": levels.num_steps, "D": levels.length}
    edges = Edges(graph, ())
    return Programs("lstm", (), ways, sizes=sizes).value(Session(), edges, inputs, {"lists": prefixes})


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("name", CASES)
def test_states_and_gradients_are_those_of_the_padded_lists(name: str, width: int, has_bias: bool) -> None:
    source, target, nodes = CASES[name]
    graph = Graph.from_edge_index(np.array(source), np.array(target), nodes, nodes)
    torch.manual_seed(0)
    cell = nn.LSTM(width, width + 1, batch_first=True, bias=has_bias).double()
    ours, theirs = (torch.randn(nodes, width, dtype=torch.float64) for _ in range(2))
    ours = theirs.clone().requires_grad_()
    theirs.requires_grad_()
    made, expected = lstm(ours, cell, graph), padded(graph, theirs, cell)
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(lstm(ours, cell, graph), expected)
    seed = torch.randn_like(expected)
    mine = torch.autograd.grad(made, [ours, *cell.parameters()], seed)
    other = torch.autograd.grad(expected, [theirs, *cell.parameters()], seed)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_agree_and_take_one_step_per_distinct_padded_prefix(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, edges = 12, 40
    graph = Graph.from_edge_index(rng.integers(0, 5, edges), rng.integers(0, nodes, edges), nodes, nodes)
    torch.manual_seed(seed)
    cell, x = nn.LSTM(4, 3, batch_first=True).double(), torch.randn(nodes, 4, dtype=torch.float64)
    prefixes = Prefixes(graph)
    torch.testing.assert_close(lstm(x, cell, graph), padded(graph, x, cell))
    longest = int(np.diff(graph.indptr).max())
    order = graph.order if graph.order is not None else np.arange(graph.num_edges)
    lists = []
    for v in range(nodes):
        span = slice(graph.indptr[v], graph.indptr[v + 1])
        listed = graph.indices[span][np.argsort(order[span], kind="stable")].tolist()
        lists.append(listed + [-1] * (longest - len(listed)))
    distinct = {tuple(row[: k + 1]) for row in lists for k in range(longest)}
    assert prefixes.levels.num_steps == len(distinct)


def test_only_wanted_gradients_are_computed() -> None:
    source, target, nodes = CASES["random"]
    graph = Graph.from_edge_index(np.array(source), np.array(target), nodes, nodes)
    cell = nn.LSTM(3, 3)
    cell.weight_hh_l0.requires_grad_(False)
    lstm(torch.randn(nodes, 3), cell, graph).sum().backward()
    assert cell.weight_hh_l0.grad is None
    assert cell.weight_ih_l0.grad is not None
