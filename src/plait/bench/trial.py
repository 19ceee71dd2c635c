"""A call tried in a separate process: what kills that process is recorded, and the run continues."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["fate", "first_line", "in_short"]

_SECONDS = 120.0  # a call that takes longer is let go: it was not killed


def fate(call: Callable[[], object], seconds: float = _SECONDS) -> str | None:
    """What kills a process that makes this call, None where nothing does.

    A segmentation fault or an illegal instruction in another library ends the process, and no
    `except` sees it. So the call is made in a forked child first, off the clock and on one thread (the
    parent's OpenMP workers do not exist there); its errors are the business of the call that follows here.
    Nothing is tried where processes do not fork, nor once CUDA is in use, which does not outlive a fork.
    """
    if not hasattr(os, "fork") or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    child = os.fork()
    if child == 0:
        _child(call)
    status = _wait(child, seconds)
    if status is None or not os.WIFSIGNALED(status):
        return None
    number = os.WTERMSIG(status)
    return f"its process dies with {signal.Signals(number).name}; it is not run on this machine"


def _child(call: Callable[[], Any]) -> None:
    """Makes the call and leaves without cleaning up what belongs to the parent."""
    try:
        faulthandler.disable()  # the parent tells what happened
        _without_core_files()
        torch.set_num_threads(1)
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            call()
    except BaseException:
        pass  # whether it crashes is all that is asked; what it raises, the real run will tell
    finally:
        os._exit(0)


def _without_core_files() -> None:
    import resource  # here: where nothing forks there is no such module

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _wait(child: int, seconds: float) -> int | None:
    """How the child ended; None where it had to be ended."""
    until, pause = time.monotonic() + seconds, 1e-3
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def first_line(error: BaseException) -> str:
    """The first line of what an error says; those of compilers run over pages."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def in_short(error: BaseException) -> str:
    """The error's type and its first line."""
    return f"{type(error).__name__}: {first_line(error)}"
