"""ARCHITECTURE.md says what the source has: files, packages, autograd functions, public names."""

from __future__ import annotations

import re
from pathlib import Path

import plait
from plait.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "plait"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def _named(kind: str) -> set[str]:
    """Paths between backquotes: `plan/search.py` with kind ".py", `plan/search` without one."""
    return set(re.findall(rf"`((?:[a-z_]+/)+[a-z_]+){re.escape(kind)}[:`]", ARCHITECTURE))


def test_the_architecture_names_files_and_folders_that_exist() -> None:
    for name in _named(".py"):
        assert (SOURCE / f"{name}.py").is_file(), name
    for name in _named(""):
        there = (SOURCE / name, SOURCE / f"{name}.py", ROOT / name)
        assert any(path.exists() for path in there), name


def test_the_architecture_lists_every_autograd_function() -> None:
    table = ARCHITECTURE.split("subclasses of `torch.autograd.Function`")[1].split("\n\n")[1]
    listed = set(re.findall(r"`([\w/]+\.py)`", table))
    written = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "(torch.autograd.Function):" in path.read_text(encoding="utf-8")
    }
    assert listed == written


def test_the_table_of_packages_is_the_order_that_imports_are_checked_by() -> None:
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r"\w+", contract.split("layers = [")[1].split("]")[0])
    table = ARCHITECTURE.split("| package | job | torch? |")[1].split("\n\n")[0]
    assert re.findall(r"(?m)^\| (\w+) \|", table) == layers


def test_the_public_interface_is_what_the_package_and_the_command_offer() -> None:
    table = ARCHITECTURE.split("## The public interface")[1]
    assert {name for name in plait.__all__ if f"`plait.{name}" not in table} == set()
    said = table.split("| commands |")[1].split("|")[0]
    assert set(re.findall(r"[a-z]+", said)) - {"plait"} == set(COMMANDS)
