"""What went wrong and the next step: every error plait raises on purpose."""

from __future__ import annotations

__all__ = [
    "ExchangeError",
    "GraphError",
    "InputError",
    "PartsError",
    "PlaitError",
    "PlanError",
    "ProfileError",
]


class PlaitError(Exception):
    """The root of plait's errors; the message names the argument, the fault and the next step."""


class GraphError(PlaitError, ValueError):
    """A graph, or a file that should hold one, is not what it claims to be."""


class InputError(PlaitError, ValueError):
    """An argument does not fit the graph or the model it was handed with."""


class PartsError(PlaitError, ValueError):
    """A folder of parts is missing, incomplete or damaged."""


class ExchangeError(PlaitError, ConnectionError):
    """Another process did not answer, or ended."""


class PlanError(PlaitError, ValueError):
    """A layer cannot be planned, or no plan fits the limits that were set."""


class ProfileError(PlaitError, ValueError):
    """A machine profile is missing, damaged or of another version."""
