"""The protocol of a suite: cases in, records out, each appended to a file from which a run is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from plait.measure.environment import environment
from plait.measure.record import Record, append, read

__all__ = ["Options", "Suite", "case_reader"]

C = TypeVar("C")
O_contra = TypeVar("O_contra", bound="Options", contravariant=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the options of every suite have: where graphs are and where records are appended.

    resume: whether cases that are in the output already are left out.
    """

    data_dir: str | None = None
    output: Path | None = None
    resume: bool = False
    environment: Mapping[str, object] = field(default_factory=environment)


@dataclass(frozen=True)
class Suite(Generic[C, O_contra]):
    """One kind of measurement: how its cases are read back from records, how records are taken of cases."""

    kind: str
    case_of: Callable[[Mapping[str, object]], C | None]
    take: Callable[[list[C], O_contra], Iterator[Record]]

    def run(self, grid: Sequence[C], options: O_contra, watch: Callable[[Record], None]) -> list[Record]:
        """A record per case, handed to `watch` as each is taken and appended to the output file."""
        done = self._finished(options)
        records = [done[case] for case in grid if case in done]
        for record in self.take(self.left(grid, options), options):
            if options.output is not None:
                append(options.output, record)
            records.append(record)
            watch(record)
        return records

    def left(self, grid: Sequence[C], options: O_contra) -> list[C]:
        """The cases still to be measured: all, less those a resumed run already has."""
        done = self._finished(options)
        return [case for case in grid if case not in done]

    def _finished(self, options: O_contra) -> dict[C, Record]:
        """The cases an interrupted run left in the output file."""
        if not options.resume or options.output is None or not options.output.exists():
            return {}
        found = ((self.case_of(r.case), r) for r in read(options.output) if r.kind == self.kind)
        return {case: record for case, record in found if case is not None}


def case_reader(kind: type[C]) -> Callable[[Mapping[str, object]], C | None]:
    """Reads a case of this dataclass from a record, whatever else is in it; None where a field is missing."""
    defaults = {one.name: one.default for one in fields(kind)}  # type: ignore[arg-type]

    def case_of(found: Mapping[str, object]) -> C | None:
        values: dict[str, Any] = {name: found.get(name, default) for name, default in defaults.items()}
        return None if MISSING in values.values() else kind(**values)

    return case_of
