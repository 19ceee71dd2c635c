"""One case: an operation, the sizes it is run at and what it is run on; sizes that do not apply are None."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from plait.errors import InputError

__all__ = ["CHOICES", "DIRECTIONS", "DTYPE_BYTES", "Case", "case_of", "group_key", "with_graph_sizes"]

DIRECTIONS = ("forward", "backward", "step")
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "direction": DIRECTIONS,
    "device": ("cpu", "cuda"),
    "law": ("regular", "uniform", "powerlaw"),
    "order": ("sorted", "random", "clustered"),
    "index_dtype": ("int64", "int32"),
    "dtype": ("float32", "float64", "float16", "bfloat16"),
}


@dataclass(frozen=True)
class Case:
    """What is run. A graph has `edges` edges on `nodes` nodes; `sparsity` makes it a square matrix instead.

    law: how targets (and, for powerlaw, sources) are drawn. order: of the edges, "sorted" by target,
    "random", or "clustered": sorted, and sources near their targets. reduction: targets are folded onto
    nodes / reduction rows, so more of them collide. axis: the indexed one; 1 walks memory in strides.
    value_sparsity: the share of zeros among the values, which stay stored. inner: the summed width of a
    dense product. suite says why the case was run and takes no part in what it is.
    """

    op: str
    direction: str = "forward"
    device: str = "cpu"
    edges: int | None = None
    nodes: int | None = None
    degree: float | None = None
    width: int | None = None
    inner: int | None = None
    heads: int | None = None
    batch: int | None = None
    fanout: str | None = None
    law: str | None = None
    exponent: float | None = None
    order: str | None = None
    sparsity: float | None = None
    value_sparsity: float | None = None
    reduction: int | None = None
    axis: int | None = None
    index_dtype: str | None = None
    dtype: str | None = None
    graph: str | None = None
    threads: int | None = None
    suite: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The sizes that apply, as plain values for a record."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def size(self, name: str) -> int:
        """A size the operation has: an error here is one in its definition."""
        value = getattr(self, name)
        if value is None:
            raise InputError(f"{self.op}: the case has no {name}; give --{name.replace('_', '-')}")
        return int(value)

    @property
    def float_bytes(self) -> int:
        """Bytes of one value."""
        return DTYPE_BYTES[self.dtype or "float32"]

    @property
    def index_bytes(self) -> int:
        """Bytes of one index."""
        return DTYPE_BYTES[self.index_dtype or "int64"]

    @property
    def rows_out(self) -> int:
        """Rows targets point into: the nodes, folded by `reduction`."""
        return max(1, self.size("nodes") // (self.reduction or 1))


def group_key(cases: Sequence[Case]) -> str:
    """A short name for cases timed together, the same in every run."""
    named = [{name: value for name, value in case.to_dict().items() if name != "suite"} for case in cases]
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:12]


def case_of(op: str, takes: Mapping[str, Any], given: Mapping[str, Any]) -> Case:
    """The case of an operation: what was given, defaults (`takes`) elsewhere; sizes made to agree."""
    common = {"direction", "device", "threads", "suite"}
    for name, value in given.items():
        if value is not None and name not in takes and name not in common:
            sizes = ", ".join(f"--{size.replace('_', '-')}" for size in takes)
            raise InputError(f"--{name.replace('_', '-')}: {op} has no such size; it takes {sizes}")
    chosen = {name: value for name, value in given.items() if value is not None}
    _check_values(chosen)
    filled = {name: value for name, value in takes.items() if value is not None} | chosen
    return _agreed(Case(op=op, **filled), chosen)


def with_graph_sizes(case: Case, nodes: int, edges: int) -> Case:
    """The case of a real graph, its sizes written down."""
    degree = edges / nodes if nodes else 0.0
    return replace(case, nodes=nodes, edges=edges, degree=round(degree, 3), law=None, exponent=None)


def _agreed(case: Case, chosen: Mapping[str, Any]) -> Case:
    if case.graph is not None:
        return replace(case, edges=None, nodes=None, degree=None, law=None, exponent=None, sparsity=None)
    if case.sparsity is not None:
        nodes = case.size("nodes")
        edges = max(1, round(nodes * nodes * (1.0 - case.sparsity)))
        same = {"degree": round(edges / nodes, 3), "law": None, "exponent": None, "order": "sorted"}
        return replace(case, edges=edges, **same)  # type: ignore[arg-type]
    if case.edges is not None and case.degree is not None:
        if "nodes" in chosen:
            return replace(case, degree=round(case.edges / case.size("nodes"), 3))
        case = replace(case, nodes=max(1, round(case.edges / case.degree)))
    if case.law != "powerlaw":
        case = replace(case, exponent=None)
    return case


def _check_values(chosen: Mapping[str, Any]) -> None:
    for name, value in chosen.items():
        flag = f"--{name.replace('_', '-')}"
        if name in CHOICES and value not in CHOICES[name]:
            raise InputError(f"{flag}: unknown name {value!r}; known are {', '.join(CHOICES[name])}")
        if name in ("sparsity", "value_sparsity") and not 0.0 <= value < 1.0:
            raise InputError(f"{flag}: {value} is not a share; give 0 or more and less than 1")
        if name == "exponent" and not value > 2.0:
            raise InputError(f"{flag}: {value}; below 2 a power law has no mean degree, give more than 2")
        if name == "axis" and value not in (0, 1):
            raise InputError(f"{flag}: {value}; rows are 0, columns 1")
        counts = ("edges", "nodes", "width", "inner", "heads", "batch", "reduction", "threads")
        if name in counts and value < 1:
            raise InputError(f"{flag}: {value}; give 1 or more")
        if name == "degree" and not value > 0.0:
            raise InputError(f"{flag}: {value}; a mean degree is positive")
