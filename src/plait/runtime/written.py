"""Whether anyone wrote to some dictionaries, told by one look at the tags CPython keeps of their contents.

CPython up to 3.12 gives a dictionary a new tag with every change (PEP 509), and no tag to two dictionaries.
Comparing the tags of the dozen that a layer consists of takes far less than comparing what they hold. Where
there are no such tags, or not where they are looked for, every look says that somebody may have written.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.graph.compiled import compiled
from plait.runtime.identity import word_at

__all__ = ["Unwritten", "has_tags"]

_PLACE = 24  # of the tag in a dictionary: behind the object's count and type and the number of entries
_TAGGED = ((3, 7), (3, 13))


class Unwritten:
    """The tags of some dictionaries; the object keeps these alive, so that their addresses stay theirs."""

    __slots__ = ("_noted", "_place", "dicts")

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self.dicts = dicts
        self._noted = np.empty((len(dicts) if _has_tags else 0, 2), np.int64)
        if _has_tags:
            self._noted[:, 0] = [id(one) + _PLACE for one in dicts]
            self._noted[:, 1] = [_tag(one) for one in dicts]
        self._place: int = self._noted.ctypes.data

    def __bool__(self) -> bool:
        """Whether nobody wrote to any of them since; False where that cannot be told."""
        return _has_tags and _are_noted(self._place, len(self.dicts))


@compiled
def _are_noted(place: int, count: int) -> bool:
    for k in range(count):  # noqa: SIM110  numba
        if word_at(word_at(place + 16 * k)) != word_at(place + 16 * k + 8):
            return False
    return True


def _tag(one: dict[Any, Any]) -> int:
    return ctypes.c_int64.from_address(id(one) + _PLACE).value


def has_tags() -> bool:
    """Whether this interpreter tags dictionaries as expected, tried on one."""
    if platform.python_implementation() != "CPython" or not _TAGGED[0] <= sys.version_info[:2] < _TAGGED[1]:
        return False
    probe: dict[str, Any] = {"changed": 0}
    seen = [_tag(probe)]
    for change in (lambda: probe.update(changed=1), lambda: probe.update(more=1), probe.popitem, probe.clear):
        change()
        seen.append(_tag(probe))
    other = {"changed": 0}
    is_still = probe.get("changed") is None and _tag(probe) == seen[-1]
    return is_still and len({*seen, _tag(other)}) == len(seen) + 1


_has_tags = has_tags()
