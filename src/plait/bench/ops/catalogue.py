"""Every operation by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.bench.ops import dense, gather, layer, ordering, sampling, scatter, sparse
from plait.bench.ops.case import Case, case_of
from plait.bench.ops.operation import Operation
from plait.errors import InputError, did_you_mean

__all__ = ["OPERATIONS", "find", "make_case"]

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for room in (gather, scatter, ordering, sparse, dense, sampling, layer)
    for operation in room.OPERATIONS
}


def find(name: str) -> Operation:
    """The operation of that name; an unknown one is refused with the known ones."""
    if name not in OPERATIONS:
        raise InputError(
            f"--op: unknown operation {name!r}; {did_you_mean(name, OPERATIONS)}"
            f"known are {', '.join(OPERATIONS)}"
        )
    return OPERATIONS[name]


def make_case(op: str, **given: Any) -> Case:
    """A case of an operation: its default sizes where none is given."""
    operation = find(op)
    if given.get("direction") not in (None, "forward") and not operation.has_backward:
        raise InputError(f"--direction: {op} has no gradient; measure it forward")
    return case_of(op, operation.takes, given)
