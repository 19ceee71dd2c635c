"""bench/cases: the grid, its names, and where graphs are looked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.bench.cases import GRAPHS, LAYERS, LayerCase, find_graph, known, layer_cases, parse_widths
from plait.errors import GraphError, InputError
from plait.graph import generate, save


def test_the_default_grid_has_every_cell_once() -> None:
    grid = layer_cases()
    assert len(grid) == len(set(grid)) == 6 * 8 * 3 * 2
    assert [case.graph for case in grid] == sorted((case.graph for case in grid), key=GRAPHS.index)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r"unknown name 'gcm'; did you mean 'gcn'\? known are gcn, sage-mean"
    ):
        layer_cases(layers=["gcm"])
    with pytest.raises(InputError, match="--modes"):
        layer_cases(modes=["training", "serving"])
    assert known("--layers", "gcn", LAYERS) == "gcn"


def test_heads_share_the_output_of_attention_layers_only() -> None:
    gat, gcn = layer_cases(["cora"], ["gat", "gcn"], [(8, 12)], ["training"], heads=3)
    assert (gat.heads, gcn.heads) == (3, 1)
    with pytest.raises(InputError, match="--heads: 5 heads do not divide"):
        layer_cases(["cora"], ["gat"], [(8, 12)], heads=5)


@pytest.mark.parametrize("text", ["64->32", "64:32", "64-32"])
def test_widths_are_a_pair(text: str) -> None:
    assert parse_widths(text) == (64, 32)


@pytest.mark.parametrize("text", ["64", "64->", "a:b", "0:4", "64->-3", "1:2:3"])
def test_other_widths_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a pair of widths"):
        parse_widths(text)


def test_a_case_shows_its_widths() -> None:
    assert LayerCase("cora", "gcn", 64, 32, "training").widths == "64->32"


def test_a_graph_is_a_generator_a_file_or_a_name_in_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "tiny.npz", generate.grid(2, 3))
    assert find_graph("grid:rows=2,cols=3").graph.num_nodes == 6
    assert find_graph(str(tmp_path / "tiny.npz")).graph.num_nodes == 6
    assert find_graph("tiny", str(tmp_path)).graph.num_edges == 14


def test_the_environment_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "tiny.npz", generate.star(4))
    monkeypatch.setenv("PLAIT_DATA", str(tmp_path))
    assert find_graph("tiny").graph.num_nodes == 4


def test_a_name_found_nowhere_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no nothing\.npz.*--data-dir.*generator"):
        find_graph("nothing", str(tmp_path))
    with pytest.raises(InputError, match=r"--data-dir: .* is not a folder"):
        find_graph("nothing", str(tmp_path / "missing"))


def test_a_damaged_file_is_a_graph_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", something=np.arange(3))
    with pytest.raises(GraphError):
        find_graph("odd", str(tmp_path))


def test_a_file_of_another_kind_is_named_as_that(tmp_path: Path) -> None:
    listed = tmp_path / "edges.csv"
    listed.write_text("0,1\n")
    with pytest.raises(GraphError, match=r"edges\.csv: not an npz file"):
        find_graph(str(listed))
