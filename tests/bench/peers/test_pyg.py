"""bench/peers/pyg: every form of PyG gives PyG's answer, on graphs with loops, hubs and lonely nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.bench.cases import EVERY_LAYER, LAYERS
from plait.bench.check import TOLERANCE, answer, worst_error
from plait.bench.peers import SameAs, Unavailable, prepare, pyg
from plait.bench.peers.pyg import csr_matrix
from plait.bench.problem import Forms, Problem
from plait.graph import Graph, generate

GRAPHS = {
    "random with repeats and loops": generate.erdos(30, 90),
    "star": generate.star(9),
    "no edges": Graph.from_edge_index([], [], 5),
    "directed": Graph.from_edge_index([0, 1, 2, 3, 4, 4], [1, 2, 3, 0, 0, 5], 7),
}


@pytest.mark.parametrize("peer", ["pyg", "pyg-csr", "pyg-edgeindex"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_form_equals_the_default(graph: str, kind: str, peer: str) -> None:
    for mode in ("inference", "training"):
        problem = Problem(kind, Forms.of(GRAPHS[graph]), 6, 4)
        if (peer == "pyg" and not problem.is_normalised) or (
            peer == "pyg-edgeindex" and problem.is_normalised
        ):
            with pytest.raises((SameAs, Unavailable)):
                prepare(peer, problem, mode)
            continue
        if (peer, kind, mode) == ("pyg-edgeindex", "sage-max", "training"):
            continue
        runner = prepare(peer, problem, mode)
        expected = answer(prepare("pyg-default", problem, mode), problem, mode)
        assert worst_error(answer(runner, problem, mode), expected)[0] <= TOLERANCE


@pytest.mark.parametrize("kind", EVERY_LAYER[len(LAYERS) :])
@pytest.mark.parametrize("graph", GRAPHS)
def test_layers_with_messages_run_on_edge_lists_only(graph: str, kind: str) -> None:
    problem = Problem(kind, Forms.of(GRAPHS[graph]), 6, 4, heads=2)
    expected = answer(prepare("pyg-default", problem, "training"), problem, "training")
    if problem.has_own_loops:
        result = answer(prepare("pyg", problem, "training"), problem, "training")
        assert worst_error(result, expected)[0] <= TOLERANCE
    for peer in ("pyg-csr", "pyg-edgeindex"):
        with pytest.raises(Unavailable, match="messages of its own"):
            prepare(peer, problem, "training")


def test_the_matrix_has_targets_as_rows_and_repeats_added_up_or_kept() -> None:
    edge_index = torch.tensor([[0, 0, 2], [1, 1, 0]])
    for keeps_repeats, entries in ((False, 2), (True, 3)):
        matrix = csr_matrix(edge_index, torch.tensor([1.0, 2.0, 5.0]), 3, keeps_repeats=keeps_repeats)
        assert matrix.values().numel() == entries
        assert matrix.to_dense().tolist() == [[0.0, 0.0, 5.0], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("kind", "index"), [("sage-mean", torch.int64), ("gin", torch.int32)])
def test_large_means_on_torch_csr_have_wide_indices(
    kind: str, index: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.dtype] = []
    wanted = pyg.csr_matrix

    def spied(*given: Any, **named: Any) -> torch.Tensor:
        matrix = wanted(*given, **named)
        made.append(matrix.col_indices().dtype)
        return matrix

    monkeypatch.setattr(pyg, "csr_matrix", spied)
    monkeypatch.setattr(pyg, "_MOST_IN_INT32", 100)
    problem = Problem(kind, Forms.of(generate.erdos(20, 60)), 6, 4)
    result = answer(prepare("pyg-csr", problem, "training"), problem, "training")
    expected = answer(prepare("pyg-default", problem, "training"), problem, "training")
    assert worst_error(result, expected)[0] <= TOLERANCE
    assert made == [index]


def test_edges_that_do_not_fit_the_memory_are_refused_with_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyg, "free_bytes", lambda device: 1000)
    with pytest.raises(Unavailable, match="GB are free"):
        prepare("pyg-default", Problem("gcn", Forms.of(generate.star(99)), 64, 64), "training")


def test_float64_answers_are_close_to_float32_ones() -> None:
    problem = Problem("pna", Forms.of(GRAPHS["star"]), 6, 4)
    truth = answer(pyg.in_double(problem, "training"), problem, "training")
    assert truth["output"].dtype == torch.float64
    expected = answer(prepare("pyg-default", problem, "training"), problem, "training")
    assert worst_error(expected, truth, "pna")[0] <= TOLERANCE


def test_torch_compile_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none_found() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(Unavailable, match="needs a C\\+\\+ compiler"):
        prepare("pyg-compile", Problem("gat", Forms.of(GRAPHS["star"]), 6, 4), "training")
