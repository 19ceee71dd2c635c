"""errors.py: whoever catches PlaitError catches all that plait raises on purpose."""

from __future__ import annotations

import pytest

from plait import errors


@pytest.mark.parametrize(
    "name", [name for name in errors.__all__ if name[0].isupper() and name != "PlaitError"]
)
def test_every_error_is_plaits_and_a_value_error(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.PlaitError)
    others = {"ExchangeError": ConnectionError, "CheckpointError": OSError}
    assert issubclass(kind, others.get(name, ValueError))
    assert kind.__doc__
