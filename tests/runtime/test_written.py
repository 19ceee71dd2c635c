"""runtime/written.py: a dictionary that anyone wrote to is never taken for one that nobody wrote to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from plait.runtime import written
from plait.runtime.written import Unwritten, has_tags

needs_tags = pytest.mark.skipif(not has_tags(), reason="this interpreter has no tags of dictionaries")

CHANGES: dict[str, Callable[[Any], object]] = {
    "another value": lambda d: d.__setitem__("a", 2),
    "one more": lambda d: d.__setitem__("c", 2),
    "an equal value that is another object": lambda d: d.__setitem__("b", [0]),
    "one fewer": lambda d: d.pop("a"),
    "none left": lambda d: d.clear(),
    "many at once": lambda d: d.update(a=3, b=4),
    "there and back": lambda d: (d.__setitem__("a", 7), d.__setitem__("a", 1)),
}


@needs_tags
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_every_way_to_write_shows_and_reading_does_not(kind: Any, change: Callable[[Any], object]) -> None:
    own = kind(a=1, b=[0])
    look = Unwritten([{}, own, {"other": 1}])
    assert own.get("a") == 1
    assert [*own.values()]
    assert look
    change(own)
    assert not look
    assert Unwritten([own])


@needs_tags
def test_writes_to_an_object_are_writes_to_its_dictionary() -> None:
    class Plain:
        pass

    one = Plain()
    one.value = 1  # type: ignore[attr-defined]
    for write in (
        lambda: setattr(one, "value", 2),
        lambda: setattr(one, "more", 1),
        lambda: delattr(one, "more"),
    ):
        look = Unwritten([vars(one)])
        assert look
        write()
        assert not look


def test_without_tags_somebody_may_always_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "_has_tags", False)
    assert not Unwritten([{}])


@pytest.mark.parametrize("version", [(3, 6, 9), (3, 13, 0), (3, 14, 1)])
def test_tags_are_not_looked_for_where_there_are_none(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written.sys, "version_info", version)  # type: ignore[attr-defined]
    assert not has_tags()
