"""kernels/compiled.py: compiled once per machine, whatever happens to the files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.kernels import compiled
from plait.kernels.spmm import cpu

pytestmark = pytest.mark.processes

# one product of every kind, in a process of its own
STEP = """
import torch
from plait.kernels import gemm, spmm
import numpy as np
pattern = spmm.Pattern(np.array([0, 2, 3], np.int32), np.array([0, 1, 1], np.int32), 2)
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
assert spmm.spmm(pattern, x, torch.empty(2, 2)).tolist() == [[4.0, 6.0], [3.0, 4.0]]
assert torch.equal(gemm.gemm(x, torch.eye(2), torch.empty(2, 2)), x)
assert torch.equal(gemm.gemm_transposed(x, torch.eye(2)), x.t())
"""


def multiply(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEP],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PLAIT_CACHE": str(folder)},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    multiply(folder)
    return folder


def kernels(folder: Path) -> list[Path]:
    return sorted((folder / "kernels").iterdir())


def test_a_later_process_compiles_nothing(filled: Path) -> None:
    before = [(path, path.stat().st_mtime_ns) for path in kernels(filled)]
    assert len(before) == 3
    multiply(filled)
    assert [(path, path.stat().st_mtime_ns) for path in kernels(filled)] == before


def test_a_damaged_file_is_compiled_again(filled: Path) -> None:
    truncated, empty, other_bytes = kernels(filled)
    truncated.write_bytes(truncated.read_bytes()[: truncated.stat().st_size // 2])
    empty.write_bytes(b"")
    other_bytes.write_bytes(b"x" * other_bytes.stat().st_size)
    assert all(compiled._read(path) is None for path in kernels(filled))
    multiply(filled)
    assert all(compiled._read(path) is not None for path in kernels(filled))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_costs_only_the_compilation(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        multiply(tmp_path)
        assert not list(tmp_path.iterdir())
    finally:
        tmp_path.chmod(0o700)


def test_a_cache_that_is_a_file_costs_only_the_compilation(tmp_path: Path) -> None:
    """Also what a read-only folder does, for users who may write everywhere."""
    blocked = tmp_path / "cache"
    blocked.write_text("not a folder")
    multiply(blocked)
    assert blocked.read_text() == "not a folder"


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", "/somewhere")
    assert compiled.cache_folder() == Path("/somewhere")
    monkeypatch.delenv("PLAIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert compiled.cache_folder() == Path("/caches/plait")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiled.cache_folder() == Path.home() / ".cache" / "plait"


def test_the_name_of_a_kernel_follows_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    built: list[str] = []

    def build() -> Any:
        built.append("built")
        return cpu.kernel(32, 32, "plain")

    assert compiled.address_of("it", build)
    assert compiled.address_of("it", build)
    assert built == ["built"]
    monkeypatch.setattr(compiled, "_digest", lambda operations: "other sources")
    assert compiled.address_of("it", build)
    assert len(built) == 2
    assert len(kernels(tmp_path)) == 2


def test_a_stored_kernel_is_built_once_for_each_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    built: list[tuple[int, str]] = []

    def build(float_bits: int, mode: str) -> Any:
        built.append((float_bits, mode))
        return cpu.kernel(float_bits, 32, mode)

    address = compiled.stored("it", build)
    assert address(32, "plain") == address(32, "plain")
    assert address(32, "max") != address(32, "plain")
    assert compiled.stored("it", build)(32, "plain")  # from disk
    assert built == [(32, "plain"), (32, "max")]
    assert len(kernels(tmp_path)) == 2
