"""graph/compiled: functions are kept on disk where they can be, and run where they cannot."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from numba.core import caching

from plait.graph.compiled import compiled, inlined


def test_a_function_and_one_put_in_place_are_compiled_and_release_the_interpreter_lock() -> None:
    @inlined
    def twice(value: int) -> int:
        return 2 * value

    @compiled
    def outer(value: int) -> int:
        return twice(value) + 1

    assert outer(3) == 7
    for function in (outer, twice):
        made: Any = function
        assert made.targetoptions["nogil"]
    assert made.targetoptions["inline"] == "always"


def test_without_a_folder_that_takes_files_functions_are_compiled_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    @compiled
    def thrice(value: int) -> int:
        return 3 * value

    assert thrice(2) == 6


def test_a_full_disk_costs_a_compilation_not_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    @contextlib.contextmanager
    def full(self: object, path: str) -> Any:
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", full)

    @compiled
    def fourfold(value: int) -> int:
        return 4 * value

    assert fourfold(2) == 8
