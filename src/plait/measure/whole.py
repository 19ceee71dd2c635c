"""Files that are there as a whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from pathlib import Path

from plait.errors import InputError

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes, flag: str, makes_folder: bool = False) -> None:
    """Write `content` to `path`, or leave what is there; InputError names the argument `flag`."""
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()  # a link stays one
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        if target.exists() and not target.is_file():  # a pipe or a terminal: nothing to keep
            target.write_bytes(data)
            return
        if makes_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(data)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{flag}: cannot write {path} ({error.strerror}); name another place") from None
