"""Arrays that all processes of a machine see: a file in memory, found by name, gone with its last user.

Every user holds a shared lock on the file for as long as it lives, which the kernel drops when a process
dies, however it dies. The last user to close removes the file; what a killed last user left
behind is treated as stale and made again by the next.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError

__all__ = ["Segment", "segment_path"]

Array = NDArray[Any]

_ALIGN = 64
_HEADER = 64  # a digest of what the segment is for, and whether a process is inside
_INSIDE = 32


class Segment:
    """The `arrays` of the first process to ask for `name`, mapped by all; `with segment:` is exclusive.

    `signature` says what the arrays are; a later process must mean the same. `mend` is called inside when the
    last to be inside did not come out: it died or raised, and the arrays may be in any state.
    """

    def __init__(self, name: str, signature: str, arrays: Sequence[Array], mend: Callable[[], None]) -> None:
        self._path = segment_path(name)
        self._lock = _FileLock(self._path.with_name(self._path.name + ".lock"))
        self._threads = threading.Lock()
        self._mend = mend
        layout = signature + ";".join(f"{a.shape}{a.dtype.str}" for a in arrays)
        digest = hashlib.sha256(layout.encode()).digest()
        with self._lock:
            self._fd, is_new = _opened(self._path)
            try:
                self.arrays = self._mapped(digest, signature, arrays, is_new)
            except BaseException:
                _left(self._fd, self._path, self._lock.path)
                raise
        # also at exit and when dropped: the last user leaves nothing behind
        self._finalizer = weakref.finalize(self, _close, self._fd, self._path, self._lock, os.getpid())

    def _mapped(self, digest: bytes, signature: str, arrays: Sequence[Array], is_new: bool) -> list[Array]:
        offsets = np.cumsum([_HEADER, *(_padded(a.nbytes) for a in arrays)]).tolist()
        if is_new:
            _reserve(self._fd, offsets[-1], self._path)
        elif os.fstat(self._fd).st_size != offsets[-1] or os.pread(self._fd, 32, 0) != digest:
            raise InputError(
                f"shared: {self._path.name} is in use for something other than {signature}; give the same "
                "arguments in every process, or another name"
            )
        self._memory = memory = mmap.mmap(self._fd, offsets[-1])
        views = [
            np.frombuffer(memory, a.dtype, a.size, offset).reshape(a.shape)
            for a, offset in zip(arrays, offsets, strict=False)
        ]
        if is_new:
            for view, array in zip(views, arrays, strict=True):
                view[...] = array
            memory[:32] = digest  # last: a segment without it was never finished
        return views

    def __enter__(self) -> Segment:
        self._threads.acquire()
        self._lock.__enter__()
        was_inside, self._memory[_INSIDE] = self._memory[_INSIDE], 1
        if was_inside:
            self._mend()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._memory[_INSIDE] = int(kind is not None)
        self._lock.__exit__()
        self._threads.release()

    def close(self) -> None:
        """Leaves the segment, which goes with its last user; the arrays stay readable here."""
        self._finalizer()


class _FileLock:
    """An exclusive lock on a file, which is made when it is missing; the owner of the lock may remove it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd, self._pid = -1, -1

    def __enter__(self) -> _FileLock:
        import fcntl

        while True:
            if self._pid != os.getpid():  # a forked child would share the parent's lock, not compete for it
                self._fd, self._pid = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), os.getpid()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if _is_at(self._fd, self.path):
                return self
            self.drop()

    def __exit__(self, *_: object) -> None:
        import fcntl

        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def drop(self) -> None:
        """Closes the file, and the lock with it."""
        if self._pid == os.getpid():
            os.close(self._fd)
        self._pid = -1


def segment_path(name: str) -> Path:
    """Where the segment of that name lies: in memory where the system has a place for that."""
    try:
        import fcntl  # noqa: F401 - whether there is one
    except ImportError:
        raise InputError("shared: this system has no file locks; leave it out") from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(f"shared={name!r}: name it with up to 64 letters, digits, dots and dashes")
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"plait-{os.getuid()}-{name}"


def _opened(path: Path) -> tuple[int, bool]:
    """The file with a shared lock on it, and whether it was made again."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    is_alone = _locked_alone(fd)
    if is_alone:  # not in use: new, or left by a process that was killed
        os.ftruncate(fd, 0)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd, is_alone


def _locked_alone(fd: int) -> bool:
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _reserve(fd: int, size: int, path: Path) -> None:
    """Takes the memory now: a page that cannot be had later kills the process that touches it."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except OSError as error:
        raise InputError(
            f"shared: {path.parent} has no room for {size:,} bytes ({error}); lower capacity"
        ) from error


def _close(fd: int, path: Path, lock: _FileLock, pid: int) -> None:
    if pid != os.getpid():  # a forked child's copy: the parent closes
        return
    with lock:
        _left(fd, path, lock.path)
    lock.drop()


def _left(fd: int, path: Path, lock: Path) -> None:
    """Gives up the file; the last to do so removes it. The caller holds the lock."""
    is_last = _locked_alone(fd) and _is_at(fd, path)
    os.close(fd)
    if is_last:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has its name."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
