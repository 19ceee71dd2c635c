"""Shows the progress of a long run: a bar on a terminal, an occasional plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TextIO, TypeVar

__all__ = ["Meter", "progress"]

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
    meter = Meter(label, count, stream)
    try:
        for done, item in enumerate(sequence):
            meter.show()
            yield item
            meter.done = done + 1
    finally:
        meter.close()


class Meter:
    """The line under one running label: `advance` moves it, `note` prints a line above it."""

    def __init__(self, label: str, total: int | None, stream: TextIO) -> None:
        self.label, self.total, self.stream = label, total, stream
        self.is_terminal = bool(getattr(stream, "isatty", lambda: False)())
        self.started = time.perf_counter()
        self.shown: float | None = None
        self.done = 0
        self.logged = -1

    def advance(self, steps: int = 1) -> None:
        """Count steps as done and redraw when it is time."""
        self.done += steps
        self.show()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._put(text, stays=True)
        if self.is_terminal:
            self.shown = None
            self.show()

    def show(self) -> None:
        """Redraw, unless that was done a moment ago."""
        now = time.perf_counter() - self.started
        pause = _DRAW_SECONDS if self.is_terminal else _LINE_SECONDS
        if self.shown is None and not self.is_terminal:
            self.shown = now  # a run shorter than one pause leaves a single line, its last
        elif self.shown is None or now - self.shown >= pause:
            self.shown, self.logged = now, self.done
            self._put(self._text(now), stays=not self.is_terminal)

    def close(self) -> None:
        """The last state, which stays."""
        if self.is_terminal or self.logged != self.done:
            self._put(self._text(time.perf_counter() - self.started), stays=True)

    def _put(self, text: str, stays: bool) -> None:
        start = "\r\x1b[2K" if self.is_terminal else ""
        self.stream.write(f"{start}{text}" + ("\n" if stays else ""))
        self.stream.flush()

    def _text(self, seconds: float) -> str:
        done = self.done
        if not self.total:
            return f"{self.label}: {done} done, {_clock(seconds)}"
        filled = _BAR * done // self.total
        left = seconds / done * (self.total - done) if done else None
        rest = "" if left is None or done >= self.total else f", about {_clock(left)} left"
        bar = f" [{'#' * filled}{'.' * (_BAR - filled)}]" if self.is_terminal else ""
        return f"{self.label}:{bar} {done}/{self.total}, {_clock(seconds)}{rest}"


def _clock(seconds: float) -> str:
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
