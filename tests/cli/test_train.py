"""cli/train: one process trains, two under torchrun train alike, refusals are one line."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plait.cli.main import main
from plait.distributed import partition
from plait.graph import generate

ROOT = Path(__file__).parents[2]
SMALL = [
    "--hidden",
    "8",
    "--fanout",
    "4,4",
    "--batch",
    "32",
    "--epochs",
    "2",
    "--dropout",
    "0",
    "--num-threads",
    "1",
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("train") / "parts"
    partition(generate.sbm(300, 3, features=6, signal=1.0), 2, place, method="fennel", file=io.StringIO())
    return place


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def records(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_process_trains_and_reports(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "epochs.jsonl"
    assert main(["train", "--parts", str(parts), *SMALL, "--epochs", "4", "--output", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4
    assert "topology replicated (at most" in lines[0]
    for word in ("sampling", "look-up", "exchange", "stall", "compute", "all-reduce", "MB", "hits", "val"):
        assert word in lines[-1]
    found = records(kept)
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["accuracy"] > 0.5
    assert found[0]["bytes_in"] == 0


def test_training_and_its_evaluation_go_on_from_the_newest_checkpoint(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--parts", str(parts), *SMALL, "--no-compile", "--dropout", "0.5"]
    kept = ["--checkpoint", str(tmp_path / "kept"), "--every", "3"]
    whole, first, second = (tmp_path / f"{name}.jsonl" for name in ("whole", "first", "second"))
    assert main([*command, "--epochs", "4", "--output", str(whole)]) == 0
    assert main([*command, "--epochs", "2", *kept, "--output", str(first)]) == 0
    capsys.readouterr()
    assert main([*command, "--epochs", "4", *kept, "--output", str(second)]) == 0
    assert "resumed after batch" in capsys.readouterr().out

    def said(kept: list[dict[str, float]]) -> dict[float, tuple[float, float]]:
        return {record["epoch"]: (record["loss"], record["accuracy"]) for record in kept}

    assert said([*records(first), *records(second)]) == said(records(whole))


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(parts: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    command += ["--master-port", free_port(), "-m", "plait", "train", "--parts", str(parts), *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    both, one = tmp_path / "two.jsonl", tmp_path / "one.jsonl"
    done = subprocess.run(
        [
            *command,
            "--timeout",
            "60",
            "--topology",
            "partitioned",
            "--output",
            str(both),
            "--trace",
            str(tmp_path / "trace.json"),
            "--network",
            "10gbit",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "topology partitioned (at most" in done.stdout
    assert len(re.findall(r"^epoch.*predicted", done.stdout, re.MULTILINE)) == 2  # one rank speaks
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {"sampling", "look-up", "exchange", "stall", "compute", "all-reduce"} <= names
    assert main(["train", "--parts", str(parts), *SMALL, "--output", str(one)]) == 0
    two, alone = records(both), records(one)
    assert {(r["epoch"], r["rank"]) for r in two} == {(e, r) for e in range(2) for r in range(2)}
    mean = [np.mean([r["loss"] for r in two if r["epoch"] == e]) for e in range(2)]
    np.testing.assert_allclose(mean, [r["loss"] for r in alone], rtol=1e-4)
    np.testing.assert_allclose([two[-1]["accuracy"]], [alone[-1]["accuracy"]], atol=0.02)
    assert all(r["bytes_in"] > 0 for r in two)
    assert two[-1]["hit_rate"] > 0
    assert two[-1]["predicted_seconds"] > 0


@pytest.mark.parametrize(
    "bad",
    [
        ["--model", "mlp"],
        ["--epochs", "0"],
        ["--fanout", "x"],
        ["--wire", "int8"],
        ["--cache", "-1"],
        ["--topology", "some"],
        ["--dropout", "2"],
        ["--lr", "nan"],
        ["--cache", "nan"],
        ["--policy", "oldest"],
        ["--timeout", "nan"],
        ["--interface", "none0"],
        ["--every", "5"],
        ["--checkpoint", __file__],
        ["--output", "/"],
        ["--trace", "/"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_one_line(bad: list[str], parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--parts", str(parts), *SMALL, *bad]) == 2
    assert capsys.readouterr().err.startswith("plait: ")


def test_a_folder_without_parts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--parts", str(tmp_path)]) == 2
    assert "plait partition" in capsys.readouterr().err
