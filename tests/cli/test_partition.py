"""cli/partition: parts on disk, the figures printed, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.cli.main import main
from plait.distributed import Parts

GRAPH = ["--data", "sbm:num_nodes=200", "--parts", "2", "--method", "random"]


def test_the_parts_are_written_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", *GRAPH, "-o", str(tmp_path / "p")]) == 0
    out = capsys.readouterr().out
    assert "edge cut:" in out
    assert "MB over the network" in out
    assert Parts(tmp_path / "p", verify=True).num_parts == 2


def test_missing_masks_and_features_are_made_on_request(tmp_path: Path) -> None:
    graph = ["--data", "rmat:scale=7,edges=500", "--parts", "2", "--method", "fennel"]
    asked = ["--train", "0.5", "--features", "6"]
    assert main(["partition", *graph, *asked, "-o", str(tmp_path / "p")]) == 0
    parts = Parts(tmp_path / "p")
    assert parts.split("train").size == 64
    assert parts.x(0).shape[1] == 6
    labels = parts.y()
    assert labels is not None
    assert labels.max() < 16


def test_an_assignment_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "part.npy", np.arange(200) % 2)
    given = ["--assignment", str(tmp_path / "part.npy")]
    assert main(["partition", *GRAPH, *given, "-o", str(tmp_path / "p")]) == 0
    assert (Parts(tmp_path / "p").nodes()[:100] % 2 == 0).all()


@pytest.mark.parametrize(
    "bad",
    [
        ["--method", "cut"],
        ["--parts", "0"],
        ["--parts", "201"],
        ["--fanout", "a"],
        ["--assignment", "no.npy"],
        ["--assignment", __file__],
        ["--assignment", "{tmp}/far.npy"],
        ["--batch", "0"],
        ["--seed", "-1"],
        ["--train", "2"],
        ["--features", "0"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_one_line(
    bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "far.npy", np.full(200, 7))
    given = [word.replace("{tmp}", str(tmp_path)) for word in bad]
    assert main(["partition", *GRAPH, "-o", str(tmp_path / "p"), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plait: ")
    assert bad[0].lstrip("-") in line
    assert "pickle" not in line
    assert not (tmp_path / "p").exists()  # nothing is left of what was not begun
