"""measure/progress: a bar on a terminal, few plain lines elsewhere, items untouched."""

from __future__ import annotations

import io

import pytest

from plait.measure.progress import Meter, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_items_pass_through_in_order() -> None:
    assert list(progress(["a", "b"], "letters", file=io.StringIO())) == ["a", "b"]
    assert list(progress(3, "steps", file=io.StringIO())) == [0, 1, 2]


def test_elsewhere_a_short_run_is_one_plain_line() -> None:
    out = io.StringIO()
    list(progress(range(5), "steps", file=out))
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().startswith("steps: 5/5")
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    out = Terminal()
    list(progress(range(4), "steps", file=out))
    last = out.getvalue().rsplit("\r", 1)[1]
    assert "[########################] 4/4" in last
    assert last.endswith("\n")


def test_without_a_total_only_the_count_is_shown() -> None:
    out = io.StringIO()
    list(progress(iter("abc"), "letters", file=out))
    assert out.getvalue().startswith("letters: 3 done")


def test_an_error_inside_the_loop_still_ends_the_line() -> None:
    out = Terminal()
    loop = progress(range(4), "steps", file=out)
    next(loop)
    with pytest.raises(RuntimeError):
        loop.throw(RuntimeError())
    assert out.getvalue().endswith("\n")


def test_notes_stay_above_the_bar() -> None:
    out = Terminal()
    meter = Meter("cells", 2, out)
    meter.note("first cell done")
    meter.advance()
    meter.close()
    assert "first cell done\n" in out.getvalue()
    assert "1/2" in out.getvalue()
