"""Every example trains to the loss of its PyG original, on small generated graphs; the notebook runs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("gcn", "gat", "neighbor", "classify", "link", "hetero")


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import compare

    return compare


def _chosen(compare, *more):
    return compare.options(["--nodes", "600", "--epochs", "2", *more])


def _losses(compare, name, side, chosen, epochs=3):
    epoch = compare.prepared(name, side, chosen)
    return [epoch() for _ in range(epochs)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "neighbor"])
def test_an_example_gives_its_originals_losses(compare, name):
    chosen = _chosen(compare)
    planned = _losses(compare, name, "plait", chosen)
    assert planned == pytest.approx(_losses(compare, name, "pyg", chosen), rel=1e-3)


def test_a_graph_over_processes_gives_the_losses_of_one(compare):
    chosen = _chosen(compare)
    spread = _losses(compare, "shard", "plait", chosen)
    assert spread == pytest.approx(_losses(compare, "gcn", "pyg", chosen), rel=1e-3)


def test_mini_batches_give_the_losses_of_the_uncompiled_model(compare):
    chosen = _chosen(compare)
    planned = _losses(compare, "neighbor", "plait", chosen)
    with compare.uncompiled():
        assert planned == pytest.approx(_losses(compare, "neighbor", "plait", chosen), rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short_and_differ_in_a_few_lines(compare, name):
    assert len(compare.source(f"{name}_plait")) < 100
    assert len(compare.source(f"{name}_pyg")) < 100
    added = [line for line in compare.difference(name) if line.startswith("+")]
    assert "+import plait" in added
    assert len(added) <= 3


def test_compare_prints_the_difference_and_the_gain(compare, capsys):
    compare.main(["hetero", "--nodes", "200", "--epochs", "1"])
    printed = capsys.readouterr().out
    assert "+    model = plait.compile(model, data)" in printed
    assert "ms per epoch" in printed
    assert "200 nodes" in printed


def test_an_example_reads_an_npz_file(compare, tmp_path):
    from plait.graph import generate

    graph = generate.erdos(50, 200)
    x = np.random.default_rng(0).standard_normal((50, 9)).astype(np.float32)
    path = tmp_path / "small.npz"
    graph.save(path, x=x, y=np.arange(50) % 3)
    losses = _losses(compare, "gcn", "plait", _chosen(compare, "--data", str(path)))
    assert np.isfinite(losses).all()


def test_the_notebook_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    namespace = {"__name__": "tour"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"tour.ipynb, cell {number}", "exec"), namespace)
    assert namespace["model"].plan.layers


@pytest.fixture(autouse=True)
def _forget_modules():
    yield
    for name in [
        name for name in sys.modules if name in ("compare", "graphs") or name.endswith(("_pyg", "_plait"))
    ]:
        if getattr(sys.modules[name], "__file__", "") and str(EXAMPLES) in str(sys.modules[name].__file__):
            del sys.modules[name]
