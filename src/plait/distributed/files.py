"""A folder of parts on disk: `.npy` arrays that memory-map and a JSON manifest with their checksums.

Nothing is pickled or unpickled. A file is written under another name, flushed to disk and renamed, and the
manifest names it only then; so what the manifest names is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import PartsError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "StoredArray",
    "checksum",
    "mapped",
    "read_manifest",
    "write_array",
]

Array = NDArray[Any]

FORMAT = "plait-parts-1"
MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class StoredArray:
    """What the manifest says of one file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    blake2b: str


@dataclass
class Manifest:
    """What a folder of parts holds; `inputs` is a digest of what it was made from and how."""

    inputs: str
    parts: int
    method: str
    seed: int
    num_nodes: int
    num_edges: int
    name: str = ""
    bounds: list[int] = field(default_factory=list)
    files: dict[str, StoredArray] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False

    def write(self, folder: Path) -> None:
        """Replaces the manifest in one step."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        with _renamed(folder / MANIFEST) as file:
            file.write(text.encode())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PartsError(f"{path} is not readable JSON ({error}); partition the graph again") from error
    try:
        if content.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        files = {str(name): _stored(entry) for name, entry in content.pop("files").items()}
        manifest = Manifest(**content, files=files)
        _check(manifest)
        return manifest
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PartsError(f"{path} is not a manifest of parts ({error}); partition the graph again") from error


def _stored(entry: Any) -> StoredArray:
    shape = tuple(int(size) for size in entry["shape"])
    return StoredArray(str(entry["dtype"]), shape, int(entry["bytes"]), str(entry["blake2b"]))


def _check(manifest: Manifest) -> None:
    counts = (manifest.parts, manifest.num_nodes, manifest.num_edges, manifest.seed)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError("a count is not a whole number")
    bounds = manifest.bounds
    if bounds and (
        not all(isinstance(b, int) for b in bounds)
        or len(bounds) != manifest.parts + 1
        or bounds != sorted(bounds)
        or (bounds[0], bounds[-1]) != (0, manifest.num_nodes)
    ):
        raise ValueError("bounds do not divide the nodes into the parts")


def write_array(path: Path, dtype: Any, shape: tuple[int, ...], blocks: Iterable[Array]) -> StoredArray:
    """Writes the blocks one after the other as one .npy array, and returns what the manifest says of it."""
    kind = np.dtype(dtype)
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(kind)
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    digest, written = hashlib.blake2b(digest_size=16), 0
    with _renamed(path) as file:
        for piece in _pieces(header.getvalue(), kind, blocks):
            file.write(piece)
            digest.update(piece)
            written += len(piece)
    expected = len(header.getvalue()) + kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if written != expected:
        path.unlink(missing_ok=True)
        raise PartsError(f"{path}: {written} bytes were written of {expected}; please report this")
    return StoredArray(kind.str, shape, written, digest.hexdigest())


def _pieces(header: bytes, kind: np.dtype[Any], blocks: Iterable[Array]) -> Iterator[Any]:
    yield header
    for block in blocks:
        if block.size:
            yield np.ascontiguousarray(block, kind).reshape(-1).view(np.uint8).data


def checksum(path: Path) -> str:
    """The digest of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def mapped(path: Path, stored: StoredArray, verify: bool = False) -> Array:
    """The array of a file, mapped; PartsError names the file when it is not what the manifest says.

    Length, type and shape are always compared, the content with `verify`. The mapping is copy-on-write, which
    is how one compiled kernel serves arrays from files and from memory; nothing is ever written to the file.
    """
    try:
        size = path.stat().st_size
        if size != stored.bytes:
            raise PartsError(f"{path} has {size} bytes, its manifest says {stored.bytes}: {_AGAIN}")
        if verify and checksum(path) != stored.blake2b:
            raise PartsError(f"{path} does not have the checksum its manifest says: {_AGAIN}")
        if 0 in stored.shape:
            return np.empty(stored.shape, np.dtype(stored.dtype))  # an empty file part cannot be mapped
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, PartsError):
            raise
        raise PartsError(f"{path} is not readable ({error}): {_AGAIN}") from error
    if array.shape != stored.shape or array.dtype.str != stored.dtype:
        raise PartsError(
            f"{path} holds {array.dtype} {array.shape}, its manifest says {stored.dtype} {stored.shape}: "
            f"{_AGAIN}"
        )
    return np.asarray(array)


_AGAIN = (
    "it was damaged or cut short; run plait partition again with the same arguments, it replaces bad files"
)


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Any]:
    """A file that gets its name when all of it is on disk, and leaves nothing behind otherwise."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise PartsError(f"cannot write {path} ({error}); make room or choose another folder") from error
    finally:
        partial.unlink(missing_ok=True)
