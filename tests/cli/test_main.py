"""cli/main: help is quick, plait's errors are one line, and the exit code tells."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from plait.cli.main import COMMANDS, build_parser, main
from plait.errors import InputError


def test_help_names_every_command_and_loads_no_torch() -> None:
    code = "import sys; from plait.cli.main import main; main([]); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("plait ")


def test_an_error_of_plait_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "perceptron"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("plait: --model: unknown name 'perceptron'; known are gcn")
    assert shown.out == ""


def test_the_traceback_comes_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    with pytest.raises(InputError):
        main(["explain", "--model", "perceptron"])


def test_an_unknown_command_is_refused_by_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_a_command_that_is_nearly_one_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["explian"])
    assert stop.value.code == 2
    assert "did you mean 'explain'?" in capsys.readouterr().err


def test_the_demo_trains_as_many_models_as_its_help_says() -> None:
    from plait.bench.cases import EVERY_MODEL

    assert f"train {({3: 'three', 4: 'four'})[len(EVERY_MODEL)]} models" in COMMANDS["demo"][1]


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("plait.cli.doctor.run", interrupted)
    assert main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_misspelt_kind_or_choice_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, guess in ((["bench", "opz"], "ops"), (["explain", "--mode", "trainng"], "training")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert f"did you mean {guess!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 606. TiB"),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 409599999995904 bytes."
        ),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("plait.cli.doctor.run", run)
    assert main(["doctor"]) == 2
    assert "the memory does not suffice" in capsys.readouterr().err
    monkeypatch.setattr("plait.cli.doctor.run", lambda args: (_ for _ in ()).throw(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        main(["doctor"])


def test_a_negative_value_with_a_unit_reaches_its_option() -> None:
    parsed = build_parser(["explain"]).parse_args(["explain", "--memory-limit", "-1GB"])
    assert parsed.memory_limit == "-1GB"


@pytest.mark.parametrize(
    ("redirection", "code", "shown"),
    [
        (">/dev/full", 2, "plait: [Errno 28] No space left on device"),
        ("2>&- >/dev/null", 0, ""),
        (">&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_what_cannot_be_printed_is_no_traceback(redirection: str, code: int, shown: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m plait --version {redirection}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (done.returncode, done.stderr[: len(shown)]) == (code, shown)
    assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_shows_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert main(["analyze", "--nodes", "10", "--edges", "20", "--widths", "4,2", "--workers", "1"]) == 0
    assert b"10 nodes, 20 edges" in stream.buffer.getvalue()  # type: ignore[attr-defined]
