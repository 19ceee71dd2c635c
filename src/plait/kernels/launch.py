"""Runs a compiled kernel on torch's own threads: one pool for the whole process, nothing oversubscribed.

A kernel is a C function of one argument, the address of a block of int64 words (arguments.py); every thread
of the team calls it with the same block and they share out the work by counters. Which thread takes which
piece never changes a result: pieces write disjoint outputs.

torch, MKL and these kernels then use the same OpenMP workers. A second pool (numba's own threading
layer) would compete with the first for the cores: its workers spin while ours need to run. And a forked
DataLoader worker is as safe here as in torch: it runs with one thread, which never enters the pool.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["describe_pool", "launch", "num_threads", "thread_number"]

Team = Callable[[int, int, int], None]

_is_forked = False


def _after_fork() -> None:
    """The parent's OpenMP workers do not exist in the child; entering the pool there hangs."""
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):  # where nothing forks there is no such function
    os.register_at_fork(after_in_child=_after_fork)


def num_threads() -> int:
    """The number of threads a kernel may use: torch's setting, and one in a forked child."""
    return 1 if _is_forked else torch.get_num_threads()


def launch(address: int, block: ctypes.Array[ctypes.c_int64], threads: int) -> None:
    """Call the C function at `address` with `block` on `threads` threads and wait for all of them."""
    where = ctypes.addressof(block)
    if threads <= 1:
        _function(address)(where)
    else:
        _team()(address, where, threads)


@functools.cache
def thread_number() -> int:
    """The address of the C function that gives a thread's number in its team; 0 where there is none."""
    path = _openmp_path()
    return (
        0 if path is None else ctypes.cast(ctypes.CDLL(path).omp_get_thread_num, ctypes.c_void_p).value or 0
    )


def describe_pool() -> str:
    """Which thread pool kernels run on, for `plait doctor`."""
    name = _openmp_path()
    return f"torch's OpenMP ({Path(name).name})" if name else "Python threads (no OpenMP runtime found)"


@functools.cache
def _function(address: int) -> Callable[[int], None]:
    """A kernel as something to call with the address of its block."""
    function: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    return function


@functools.cache
def _team() -> Team:
    path = _openmp_path()
    if path is None:
        return _python_team
    fork = ctypes.CDLL(path).GOMP_parallel
    fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    fork.restype = None

    def run(address: int, where: int, threads: int) -> None:
        fork(address, where, threads, 0)

    return run


def _python_team(address: int, where: int, threads: int) -> None:
    """The fallback where torch brings no OpenMP with GOMP_parallel: ctypes releases the GIL."""
    others = [threading.Thread(target=_function(address), args=(where,)) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    _function(address)(where)
    for thread in others:
        thread.join()


@functools.cache
def _openmp_path() -> str | None:
    """The OpenMP runtime torch has loaded, if it offers GOMP_parallel (libgomp and LLVM's libomp do)."""
    for path in _loaded_libraries():
        name = Path(path).name
        if not name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        try:
            ctypes.CDLL(path).GOMP_parallel  # noqa: B018  the look-up itself is the test
        except (OSError, AttributeError):
            continue
        return path
    return None


def _loaded_libraries() -> list[str]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/" in line}
        # torch's own copy first: another package may have loaded a second runtime
        return sorted(paths, key=lambda path: ("torch" not in path, path))
    return sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"))
