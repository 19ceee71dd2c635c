"""errors.py: whoever catches PlaitError catches all that plait raises on purpose."""

from __future__ import annotations

import pytest

from plait import errors
from plait.errors import did_you_mean


@pytest.mark.parametrize(
    "name", [name for name in errors.__all__ if name[0].isupper() and name != "PlaitError"]
)
def test_every_error_is_plaits_and_a_value_error(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.PlaitError)
    others = {"ExchangeError": ConnectionError, "CheckpointError": OSError}
    assert issubclass(kind, others.get(name, ValueError))
    assert kind.__doc__


@pytest.mark.parametrize(
    ("name", "guess"), [("gnc", "gcn"), ("gcm", "gcn"), ("sag", "sage"), ("GCN2", "gcn")]
)
def test_the_guess_is_the_name_that_was_misspelt(name: str, guess: str) -> None:
    assert did_you_mean(name, ["sgc", "gcn", "gin", "sage-max", "sage"]) == f"did you mean {guess!r}? "


def test_there_is_no_guess_where_nothing_is_close() -> None:
    assert did_you_mean("zebra", ["gcn", "gin"]) == ""
