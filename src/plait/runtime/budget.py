"""How many bytes a compiled model may keep besides its parameters, and how many something holds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from plait.errors import InputError
from plait.graph import Graph
from plait.runtime.identity import storage_bytes

__all__ = ["bytes_in", "cache_limit"]

VARIABLE = "PLAIT_CACHE_BYTES"
_SHARE = 8  # of the machine's memory
_FLOOR = 256 << 20


def cache_limit(asked: int | None = None) -> int:
    """Bytes of graphs, constants, hoisted values and views: as asked for, by the variable, or an eighth."""
    if asked is not None:
        return asked
    text = os.environ.get(VARIABLE)
    if not text:
        return max(_FLOOR, _memory_bytes() // _SHARE)
    try:
        limit = int(text)
    except ValueError:
        limit = -1
    if limit < 0:
        raise InputError(
            f"{VARIABLE}: {text!r} is not a number of bytes; set it to one, 0 or more, or unset it"
        )
    return limit


def _memory_bytes() -> int:
    """The machine's memory; 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def bytes_in(*roots: Any, place: str = "") -> int:
    """Bytes of all tensors and arrays that some of plait's objects hold, each storage once; on one device."""
    found = _arrays(roots)
    return storage_bytes(array for array in found if not place or _place(array) == place)


def _place(array: Any) -> str:
    return str(array.device.type) if isinstance(array, Tensor) else "cpu"


def _arrays(roots: Iterable[Any]) -> Iterator[Any]:
    left, seen = [*roots], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor | np.ndarray):
            yield value
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list | tuple | set):
            left.extend(value)
        elif isinstance(value, Graph) or _is_kept(value):
            left.extend(_attributes(value))


def _is_kept(value: Any) -> bool:
    """One of the runtime's own objects; a plan holds no arrays, a pool of buffers counts its own."""
    kind = type(value)
    return kind.__module__.startswith(("plait.runtime.", "plait.kernels.")) and kind.__name__ != "Buffers"


def _attributes(value: Any) -> Iterator[Any]:
    own = getattr(value, "__dict__", None)
    if own is not None:
        yield from list(own.values())
    for name in getattr(type(value), "__slots__", ()):
        yield getattr(value, name, None)
