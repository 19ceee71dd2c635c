"""bench/peers/dgl: DGL's layers with PyG's weights give PyG's answers and gradients."""

from __future__ import annotations

import sys

import pytest

from plait.bench.cases import ATTENTION, LAYERS
from plait.bench.check import TOLERANCE, answer, worst_error
from plait.bench.peers import Unavailable, prepare
from plait.bench.problem import Forms, Problem
from plait.graph import Graph, generate

GRAPHS = {
    "symmetric": generate.grid(5, 6),
    "directed with repeats and loops": generate.erdos(30, 90),
    "directed, silent sources": Graph.from_edge_index([0, 1, 2, 3, 4, 4], [1, 2, 3, 0, 0, 5], 7),
}


@pytest.mark.parametrize("widths", [(6, 4), (3, 8)])
@pytest.mark.parametrize("peer", ["dgl", "dgl-ops"])
@pytest.mark.parametrize("kind", [*LAYERS, *ATTENTION])
@pytest.mark.parametrize("graph", GRAPHS)
def test_dgl_equals_pyg(graph: str, kind: str, peer: str, widths: tuple[int, int]) -> None:
    pytest.importorskip("dgl", exc_type=ImportError, reason="DGL is not installed (extra: peers)")
    others = {("dgl-ops", "gat"), ("dgl-ops", "gatv2"), ("dgl", "transformer")}
    if (peer, kind) in {("dgl", "sage-max"), ("dgl-ops", "gin"), *others}:
        pytest.skip("the other DGL peer has this layer")
    if (peer, kind) == ("dgl", "tag") and graph != "symmetric":
        pytest.skip("DGL scales sources without in-edges by 1")
    for mode in ("inference", "training"):
        problem = Problem(kind, Forms.of(GRAPHS[graph]), *widths, heads=2 if kind in ATTENTION else 1)
        runner = prepare(peer, problem, mode)
        expected = answer(prepare("pyg-default", problem, mode), problem, mode)
        assert worst_error(answer(runner, problem, mode), expected)[0] <= TOLERANCE


def test_layers_that_dgl_does_not_have_are_told() -> None:
    pytest.importorskip("dgl", exc_type=ImportError, reason="DGL is not installed (extra: peers)")
    forms = Forms.of(GRAPHS["directed, silent sources"])
    for kind in ("sage-max", "tag"):
        with pytest.raises(Unavailable, match="see dgl-ops"):
            prepare("dgl", Problem(kind, forms, 4, 2), "training")


def test_without_dgl_the_peer_is_unavailable_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(Unavailable, match=r"pip install dgl==1\.1\.3"):
        prepare("dgl", Problem("gcn", Forms.of(generate.star(5)), 4, 2), "training")
