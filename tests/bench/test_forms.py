"""bench/forms: records that compare a form with CSR as planned, and whole models beside the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.bench import forms
from plait.errors import InputError
from plait.graph import Graph
from plait.graph.io import save
from plait.measure import read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A union of three cliques and two edgeless nodes, and a ring."""
    u, v = np.nonzero(1 - np.eye(12, dtype=int))
    first = 12 * np.arange(3)[:, None]
    cliques = Graph.from_edge_index((first + u).ravel(), (first + v).ravel(), 38)
    save(tmp_path / "cliques.npz", cliques, graph_ptr=np.array([0, 12, 24, 38]), graph_y=np.array([0, 1, 1]))
    ring = Graph.from_edge_index(np.arange(9), (np.arange(9) + 1) % 9, 9)
    save(tmp_path / "ring.npz", ring)
    return tmp_path


def test_every_graph_and_layer_has_a_record_that_says_how_it_compares(folder: Path) -> None:
    options = forms.Options(("gcn", "sage-max"), folder / "records.jsonl")
    records = list(forms.run(forms.graphs_in(str(folder)), options))
    assert {(r.case["graph"], r.case["model"]) for r in records} == {
        (graph, layer) for graph in ("cliques", "ring") for layer in ("gcn", "sage-max")
    }
    for record in records:
        result: Any = record.result
        assert result["error"] <= 1e-5
        assert result["gradient_error"] <= 1e-4
        assert result["gain"] > 0
        assert result["run_gain"] > 0
        assert set(result["sides"]) == {"csr", "forms"}
    assert len(list(read(folder / "records.jsonl"))) == len(records)


def test_models_train_alike_with_and_without_forms_and_peers_have_their_lines(folder: Path) -> None:
    options = forms.Options(peers=("pyg-csr",))
    (record,) = forms.train(folder / "cliques.npz", ("gin",), options)
    sides: Any = record.result["sides"]
    assert set(sides) == {"csr", "forms", "pyg-csr"}
    for name in ("forms", "pyg-csr"):
        np.testing.assert_allclose(sides[name]["losses"], sides["csr"]["losses"], atol=1e-4)


def test_files_that_cannot_be_used_are_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(InputError, match="graph_ptr"):
        list(forms.train(folder / "ring.npz", ("gin",), forms.Options(peers=())))
    with pytest.raises(InputError, match="no npz files"):
        forms.graphs_in(str(tmp_path_factory.mktemp("empty")))
