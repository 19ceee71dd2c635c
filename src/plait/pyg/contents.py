"""The contents of options that may be edited in place: lists, sets, dictionaries of plain values."""

from __future__ import annotations

from typing import Any

__all__ = ["EDITABLE", "contents"]

EDITABLE = (list, set, bytearray)
"""Types of options that `contents` compares; a module's dictionaries hold hooks and parts."""


def contents(value: Any) -> Any:
    """A value that is equal as long as a container holds the same: plain values, or the very objects."""
    if isinstance(value, list | tuple):
        return (type(value), *map(contents, value))
    if isinstance(value, dict):
        return (dict, *((key, contents(part)) for key, part in value.items()))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(value))
    if isinstance(value, bytearray):
        return bytes(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), value
    return id(value)
