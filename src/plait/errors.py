"""What went wrong and the next step: every error plait raises on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError", "ExchangeError", "GraphError", "InputError", "PartsError", "PlaitError", "PlanError",
    "ProfileError", "did_you_mean", "unknown",
]  # fmt: skip


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "did you mean 'gcn'? " where one of the names is close to the one given, else nothing."""
    near = difflib.get_close_matches(name.lower(), list(names), n=3, cutoff=0.6)
    return f"did you mean {max(near, key=lambda n: _likeness(name.lower(), n))!r}? " if near else ""


def _likeness(name: str, known: str) -> tuple[float, bool, int]:
    """How similar two names are; of equally close ones, "gnc" and "gcm" mean gcn rather than sgc."""
    ratio = difflib.SequenceMatcher(None, name, known).ratio()
    shared = next((k for k, (a, b) in enumerate(zip(name, known, strict=False)) if a != b), len(known))
    return ratio, sorted(name) == sorted(known), shared


def unknown(flag: str, name: str, names: Iterable[str]) -> str:
    """The message for an unknown name."""
    known = list(names)
    return f"{flag}: unknown name {name!r}; {did_you_mean(name, known)}known are {', '.join(known)}"


class PlaitError(Exception):
    """The root of plait's errors; the message names the argument, the fault and the next step."""


class GraphError(PlaitError, ValueError):
    """A graph, or a file that should hold one, is not what it claims to be."""


class InputError(PlaitError, ValueError):
    """An argument does not fit the graph or the model it was handed with."""


class TypesError(InputError):
    """Operands of several types, which a kernel does not take; torch promotes some and refuses others."""


class PartsError(PlaitError, ValueError):
    """A folder of parts is missing, incomplete or damaged."""


class ExchangeError(PlaitError, ConnectionError):
    """Another process did not answer, or ended."""


class CheckpointError(PlaitError, OSError):
    """A checkpoint could not be written or read; those written before are as they were."""


class PlanError(PlaitError, ValueError):
    """A layer cannot be planned, or no plan fits the limits that were set."""


class ProfileError(PlaitError, ValueError):
    """A machine profile is missing, damaged or of another version."""
