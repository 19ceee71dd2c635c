"""Keeps measurements as JSON lines: one record per line, with the environment it was taken in."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plait.errors import InputError

__all__ = ["SCHEMA", "Record", "append", "read"]

# The version of the line format; a reader skips lines of another one.
SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One measured thing: what kind, which case, what came out, and where."""

    kind: str
    case: Mapping[str, object]
    result: Mapping[str, object]
    environment: Mapping[str, object] = field(default_factory=dict)
    taken_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    schema: int = SCHEMA

    def to_json(self) -> str:
        """One line without its newline; NaN and infinity become null, which every JSON reader takes."""
        return json.dumps(_finite(vars(self)), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record of a line; InputError if it is not one."""
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"line is not JSON ({error.msg}); was the file cut short?") from None
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            raise InputError(f"line is not a record of schema {SCHEMA}; measure it again with this version")
        try:
            record = cls(**fields)
        except TypeError:
            raise InputError("line has other fields than a record; measure it again") from None
        parts = (record.case, record.result, record.environment)
        if not isinstance(record.kind, str) or not all(isinstance(part, dict) for part in parts):
            raise InputError("line has fields of other types than a record; measure it again")
        return record


def append(path: str | os.PathLike[str], record: Record) -> None:
    """Add one record to the end of the file, in one write: earlier ones stay whole whatever happens.

    A line an interrupted run left unfinished is closed first: it costs that line, not the new one.
    """
    try:
        _append(Path(path), record.to_json().encode())
    except OSError as error:
        raise InputError(f"{path}: cannot be written to ({error.strerror}); name another place") from None


def _append(target: Path, line: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "a+b") as file:
        file.seek(0, os.SEEK_END)
        start = b""
        if file.tell():
            file.seek(-1, os.SEEK_END)
            start = b"" if file.read(1) == b"\n" else b"\n"
        file.write(start + line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> list[Record]:
    """All records of the file; other lines are skipped with one warning that counts them."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    records, skipped = [], 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            records.append(Record.from_json(line))
        except InputError:
            skipped += 1
    if skipped:
        warnings.warn(f"{path}: skipped {skipped} damaged or foreign lines", stacklevel=2)
    return records


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
