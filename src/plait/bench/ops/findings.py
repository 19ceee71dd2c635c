"""Reads the records of the paper suite and answers the study's questions for this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.measure import Record

__all__ = ["Finding", "findings"]


@dataclass(frozen=True)
class Finding:
    """A question, its answer in words, the figures it rests on and the groups of records behind them."""

    name: str
    question: str
    answer: str
    figures: tuple[Mapping[str, Any], ...]
    groups: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values for a file."""
        return asdict(self)


def findings(records: Sequence[Record]) -> list[Finding]:
    """Every question the records can answer; those without records are left out."""
    return []
