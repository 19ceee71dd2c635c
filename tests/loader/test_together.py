"""Samples drawn together, hop by hop, from pieces of the graph: those of one sampler of the whole of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph import Graph, generate
from plait.loader import Sampler, together
from plait.loader.owned import Drawn, Frontier
from plait.loader.together import TogetherSampler
from tests.loader.test_owned import owned

GRAPH = generate.sbm(300, 4, features=2).graph.with_order(None)
FIELDS = ("n_id", "row", "col", "e_id", "indptr")


class Pieces:
    """The edges of a graph held in pieces, each asked for its own nodes, the last one first."""

    def __init__(self, graph: Graph, bounds: Sequence[int]) -> None:
        self.num_nodes, self.node_type, self.edge_type = (
            graph.num_nodes,
            graph.indices.dtype,
            graph.indptr.dtype,
        )
        self.pieces = [owned(graph, a, b) for a, b in itertools.pairwise(bounds)]
        self.questions = 0

    def ask(self, frontiers: Sequence[Frontier]) -> list[list[Drawn]]:
        self.questions += 1
        return [[self._drawn(f, piece) for piece in reversed(self.pieces)] for f in frontiers]

    def _drawn(self, frontier: Frontier, piece: Any) -> Drawn:
        at = np.flatnonzero((frontier.nodes >= piece.begin) & (frontier.nodes < piece.end))
        own = Frontier(frontier.nodes[at], frontier.key, frontier.fanout, frontier.replace)
        return Drawn(at, *piece.choose(own))


def same(found: Any, expected: Any) -> None:
    for name in FIELDS:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(expected, name).dtype, name
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges


@pytest.mark.parametrize("limit", [together.STAMP_LIMIT, 0], ids=["table", "hash"])
@pytest.mark.parametrize(
    "graph",
    [GRAPH, generate.star(60), Graph.from_edge_index([], [], 60), Graph.from_edge_index([5] * 9, [5] * 9)],
    ids=["blocks", "hub", "no edges", "loops"],
)
def test_samples_are_those_of_one_sampler(graph: Graph, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "STAMP_LIMIT", limit)
    rng = np.random.default_rng(1)
    graph = graph.with_order(None)
    n = graph.num_nodes
    for fanout, replace in (([4, 3], False), ([-1, 2, 0], False), ([3, 2], True)):
        whole = Sampler(graph, fanout, replace=replace, seed=7)
        pieces = Pieces(graph, [0, n // 3, n // 3, n // 2, n])
        sampler = TogetherSampler(pieces, fanout, replace=replace, seed=7)
        for epoch in range(2):  # the second in used buffers
            seeds = [rng.integers(0, n, size) for size in (8, 1, 20)]
            numbers = [4, 9, 2]
            found = sampler.sample_many(seeds, epoch, numbers)
            for one, own, number in zip(found, seeds, numbers, strict=True):
                same(one, whole.sample(own, epoch, number))
        assert pieces.questions == 2 * len(fanout)


def test_a_failed_question_leaves_no_trace() -> None:
    pieces = Pieces(GRAPH, [0, 300])
    sampler = TogetherSampler(pieces, [3, 2])
    sampler.sample_many([np.arange(5)], 0, [0])
    asked = pieces.ask

    def fails(frontiers: Sequence[Frontier]) -> Any:
        if frontiers[0].nodes.size > 20:
            raise ConnectionError
        return asked(frontiers)

    pieces.ask = fails  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        sampler.sample_many([np.arange(20, 40)], 0, [0])
    same(
        sampler.sample_many([np.arange(20, 25)], 0, [0])[0], Sampler(GRAPH, [3, 2]).sample(np.arange(20, 25))
    )


def test_bad_arguments_are_refused() -> None:
    pieces = Pieces(GRAPH, [0, 300])
    with pytest.raises(InputError, match="fanout"):
        TogetherSampler(pieces, [])
    with pytest.raises(InputError, match="seeds holds 300"):
        TogetherSampler(pieces, [2]).sample_many([np.array([300])], 0, [0])
