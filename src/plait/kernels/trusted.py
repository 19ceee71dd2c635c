"""Files that nobody else can have written: what is loaded from them is run.

A file is trusted where it and its folder belong to this user and nobody else may write to them. Anything else
is left alone, with one warning per folder.
"""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

__all__ = ["distrust", "read_trusted"]

_warned: set[Path] = set()  # folders whose distrust was reported


def read_trusted(path: Path) -> bytes:
    """The bytes of a file that nobody else can have written, none of another; OSError where it is absent.

    Folder and file are opened once and asked by their descriptors: what is read is what was checked, whatever
    happens to the names meanwhile.
    """
    if not hasattr(os, "getuid"):  # no owners to ask for: the system guards the user's folders its own way
        return path.read_bytes()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _is_trusted(folder, path.parent):
            return b""
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:
            return opened.read() if _is_trusted(file, path) else b""
    finally:
        os.close(folder)


def _is_trusted(descriptor: int, path: Path) -> bool:
    """Whether nobody but this user can have written there; warns once per folder where others can."""
    found = os.fstat(descriptor)
    trouble = _trouble(found, path)
    folder = path if stat.S_ISDIR(found.st_mode) else path.parent
    if trouble is not None and folder not in _warned:
        _warned.add(folder)
        warnings.warn(f"{trouble}; kernels are compiled in memory instead", RuntimeWarning, stacklevel=2)
    return trouble is None


def _trouble(found: os.stat_result, path: Path) -> str | None:
    """Who else may have written what `found` describes, with the next step; None where nobody may."""
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return f"{path} is neither a file nor a folder: remove it"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to another user: set PLAIT_CACHE to a folder of your own"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} may be written by other users: run chmod go-w on it, or set PLAIT_CACHE"
    return None


def distrust(folder: Path) -> str | None:
    """Why nothing is loaded from this folder, with the next step; None where there is no reason."""
    if not hasattr(os, "getuid"):
        return None
    try:
        return _trouble(os.stat(folder), folder)
    except OSError:
        return None
