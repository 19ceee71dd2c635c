"""Shows how far a long run is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TextIO, TypeVar

__all__ = ["progress"]

T = TypeVar("T")

_BAR = 24
# A log file gets a line at most this often; a terminal line is redrawn ten times a second.
_LINE_SECONDS = 10.0
_DRAW_SECONDS = 0.1


def progress(
    items: Iterable[T] | int, label: str, *, total: int | None = None, file: TextIO | None = None
) -> Iterator[T]:
    """The items one by one, while the share done is drawn on `file` (standard error when not given).

    An int counts that many steps: `for step in progress(200, "epochs")`.
    """
    stream = sys.stderr if file is None else file
    sequence: Iterable[T] = range(items) if isinstance(items, int) else items  # type: ignore[assignment]
    count = len(sequence) if total is None and isinstance(sequence, Sized) else total
    meter = _Meter(label, count, stream)
    try:
        for done, item in enumerate(sequence):
            meter.show(done)
            yield item
            meter.done = done + 1
    finally:
        meter.close()


class _Meter:
    """The line under one running label."""

    def __init__(self, label: str, total: int | None, stream: TextIO) -> None:
        self.label, self.total, self.stream = label, total, stream
        self.is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self.started = time.perf_counter()
        self.shown = -1.0
        self.done = 0

    def show(self, done: int, last: bool = False) -> None:
        now = time.perf_counter() - self.started
        pause = _DRAW_SECONDS if self.is_terminal else _LINE_SECONDS
        if not last and self.shown >= 0.0 and now - self.shown < pause:
            return
        if not last and not self.is_terminal and self.shown < 0.0:
            self.shown = now  # a run shorter than one pause leaves a single line, its last
            return
        self.shown = now
        text = self._text(done, now)
        if self.is_terminal:
            self.stream.write(f"\r\x1b[2K{text}" + ("\n" if last else ""))
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        self.show(self.done, last=True)

    def _text(self, done: int, seconds: float) -> str:
        if not self.total:
            return f"{self.label}: {done} done, {_clock(seconds)}"
        filled = _BAR * done // self.total
        left = seconds / done * (self.total - done) if done else None
        rest = "" if left is None or done == self.total else f", about {_clock(left)} left"
        bar = f" [{'#' * filled}{'.' * (_BAR - filled)}]" if self.is_terminal else ""
        return f"{self.label}:{bar} {done}/{self.total}, {_clock(seconds)}{rest}"


def _clock(seconds: float) -> str:
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
