"""The `plait` command: finds the subcommand, runs it, and turns plait's errors into one line."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from plait.errors import PlaitError, did_you_mean

__all__ = ["build_parser", "main"]

# name -> (module with add_arguments(parser) and run(args), one line of help). A module is imported only when
# its command is named: `plait --help` must not wait for torch.
COMMANDS = {
    "demo": ("plait.cli.demo", "train four models with PyG and with plait on a built-in graph"),
    "explain": ("plait.cli.explain", "print the plan of a model on a graph"),
    "analyze": ("plait.cli.analyze", "count work and depth, and price every parallelisation strategy"),
    "bench": ("plait.cli.bench", "compare plait with its peers, layer by layer or as whole models"),
    "report": ("plait.cli.report", "draw records and plans as one HTML page"),
    "calibrate": ("plait.cli.calibrate", "measure this machine, so that plans are priced for it"),
    "hag": ("plait.cli.hag", "count and time what summing shared neighbours once would save on a graph"),
    "cache": ("plait.cli.cache", "advise whether to cache remote features, with which policy and size"),
    "partition": ("plait.cli.partition", "divide a graph into parts that several machines train on"),
    "train": ("plait.cli.train", "train on the parts of a graph, in one process or several under torchrun"),
    "doctor": ("plait.cli.doctor", "show what is installed, what is used and what is missing"),
}


class _Parser(argparse.ArgumentParser):
    """argparse with a suggestion where a name is not one of the choices; commands' parsers use it too.

    "--memory-limit -1GB" is a wrong value, not an option without one: the command says what is wrong with it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"^-[\d.]")

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if found:
            guess = did_you_mean(found[1], [name.strip("' ") for name in found[2].split(",")])
            message = message.replace(" (choose from", f"; {guess}(choose from") if guess else message
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it worked, 2 when plait refused, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # torch's profiler warns about every block it did not see allocated; read when torch is first imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _take_any_stream()
    try:
        parser = build_parser(arguments)
        args = parser.parse_args(arguments)
        code = int(args.run(args) or 0)
        sys.stdout.flush()  # here, where a full disk is an error with a name
        return code
    except PlaitError as error:
        if os.environ.get("PLAIT_DEBUG"):
            raise
        print(f"plait: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if os.environ.get("PLAIT_DEBUG") or not _is_lack_of_memory(error):
            raise
        print(f"plait: the memory does not suffice ({error}); choose smaller numbers", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plait: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if os.environ.get("PLAIT_DEBUG"):
            raise
        # what is still to be printed goes nowhere, or the interpreter would complain of it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
            return 0
        print(f"plait: {error}; PLAIT_DEBUG=1 shows where", file=sys.stderr)
        return 2


def _take_any_stream() -> None:
    """Closed streams swallow what is printed, and those of another encoding than UTF-8 replace characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open as long as the process
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_lack_of_memory(error: Exception) -> bool:
    """numpy raises MemoryError; torch a RuntimeError, with a class of its own only on devices."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "allocate memory" in str(error)


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser with the arguments of the command that is named, and only the names of the others."""
    parser = _Parser(
        prog="plait",
        description="A query planner for graph neural networks: the same PyG model and results, faster.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=lambda args: _bare(parser, args))
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    named = next((word for word in arguments if not word.startswith("-")), None)
    if named is not None and named not in COMMANDS:
        parser.error(
            f"unknown command {named!r}; {did_you_mean(named, COMMANDS)}known are {', '.join(COMMANDS)}"
        )
    for name, (module, help_line) in COMMANDS.items():
        command = commands.add_parser(
            name, help=help_line, description=f"{help_line[0].upper()}{help_line[1:]}."
        )
        if name == named:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    return parser


def _bare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.version:
        from plait.measure.environment import version_of

        print(f"plait {version_of('plait')}")
        return 0
    parser.print_help()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
