"""The named suites: which cases are run, and which of them side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.bench.ops.catalogue import OPERATIONS, make_case
from plait.bench.ops.runner import Group
from plait.errors import InputError

__all__ = ["BUDGETS", "SUITES", "VISITS", "groups_of"]

# Seconds of the clock per group, after warm-up, where --budget does not say.
BUDGETS = {"quick": 0.4, "paper": 1.5, "calibrate": 0.5, "full": 1.0}
# How often a group is visited: runs of this suite are compared with each other.
VISITS = {"quick": 2}
_DENSITIES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_VALUE_ZEROS = (0.0, 0.5, 0.9, 0.99)
_COLLISIONS = (1, 2, 4, 8)
_SCATTERS = ("scatter_add", "scatter_mean", "scatter_max", "scatter_min", "scatter_mul")


def groups_of(suite: str, device: str = "cpu") -> list[Group]:
    """The groups of a suite; an unknown one is refused with the known ones."""
    if suite not in SUITES:
        raise InputError(f"--suite: unknown suite {suite!r}; known are {', '.join(SUITES)}")
    return [tuple(replace(case, suite=suite) for case in group) for group in SUITES[suite](device)]


def _directions(op: str) -> tuple[str, ...]:
    return ("forward", "backward") if OPERATIONS[op].has_backward else ("forward",)


def _alone(op: str, device: str, **sizes: Any) -> Iterator[Group]:
    """Every direction of an operation at one size, each its own group."""
    for direction in _directions(op):
        yield (make_case(op, device=device, direction=direction, **sizes),)


def _grid(op: str, device: str, **axes: Sequence[Any]) -> Iterator[Group]:
    """One forward case for every combination of the values given for each size."""
    for values in itertools.product(*axes.values()):
        yield (make_case(op, device=device, **dict(zip(axes, values, strict=True))),)


def _together(op: str, device: str, name: str, values: Sequence[Any], **sizes: Any) -> Group:
    """One group over the values of a size: what differs is that size, not the minute it was measured in."""
    return tuple(make_case(op, device=device, **sizes, **{name: value}) for value in values)


def _scale(device: str) -> int:
    """A GPU needs more work than two cores before its launches stop mattering."""
    return 10 if device == "cuda" else 1


# Quick -------------------------------------------------------------------------------------------------


def _quick(device: str) -> Iterator[Group]:
    """Every operation at one size, both ways."""
    for op, operation in OPERATIONS.items():
        more = {"edges": 100_000 * _scale(device)} if operation.takes.get("edges") == 200_000 else {}
        yield from _alone(op, device, **more)


# Paper -------------------------------------------------------------------------------------------------


def _paper(device: str) -> Iterator[Group]:
    """The operations and sweeps of the 2022 study, and the ones it lacked."""
    yield from _value_zeros(device)
    yield from _contiguity(device)
    yield from _collisions(device)
    yield from _crossover(device)
    yield from _formats(device)
    yield from _gnn_sweeps(device)


def _value_zeros(device: str) -> Iterator[Group]:
    side = 4000 if device == "cuda" else 800
    square = {"edges": side, "nodes": side, "width": side}
    for op in ("index_select", "gather", "index_add", *_SCATTERS[:-1]):
        order = {} if op == "gather" else {"order": "random"}
        yield _together(op, device, "value_sparsity", _VALUE_ZEROS, **square, **order)
    for op in ("mm", "addmm"):
        yield _together(op, device, "value_sparsity", _VALUE_ZEROS, nodes=side, inner=side, width=side)
    yield _together("spmm", device, "value_sparsity", _VALUE_ZEROS, edges=100_000 * _scale(device))


def _contiguity(device: str) -> Iterator[Group]:
    side = 2000 * (4 if device == "cuda" else 1)
    for op in ("index_select", "gather", "index_add", "scatter_add"):
        order = {} if op == "gather" else {"order": "random"}
        yield _together(op, device, "axis", (0, 1), edges=side, nodes=side, width=side, **order)


def _collisions(device: str) -> Iterator[Group]:
    side = 1000 * (4 if device == "cuda" else 1)
    for op in _SCATTERS:
        sizes = {"edges": side, "nodes": side, "width": side, "order": "random"}
        yield _together(op, device, "reduction", _COLLISIONS, **sizes)
    yield _together("coalesce", device, "reduction", _COLLISIONS, edges=200_000 * _scale(device))


def _crossover(device: str) -> Iterator[Group]:
    nodes = 8192 if device == "cuda" else 2048
    for width, sparsity in itertools.product((16, 64, 256), _DENSITIES):
        yield (make_case("spmm", device=device, nodes=nodes, sparsity=sparsity, width=width),)


def _formats(device: str) -> Iterator[Group]:
    """Sparse formats against each other, and against dense, where the study compared PyG with torch."""
    nodes = 4096 if device == "cuda" else 1024
    for op, densities in (("spspmm", (0.9, 0.99, 0.999)), ("transpose", (0.5, 0.9, 0.99))):
        for sparsity in densities:
            yield (make_case(op, device=device, nodes=nodes, sparsity=sparsity),)
    yield from _grid("sort", device, edges=[n * _scale(device) for n in (10_000, 100_000, 1_000_000)])
    for op in ("spmm", "spmm_mean", "spmm_max", "gather_scatter", "sddmm", "edge_softmax", "segment_reduce"):
        yield from _alone(op, device, edges=300_000 * _scale(device))


def _gnn_sweeps(device: str) -> Iterator[Group]:
    scale = _scale(device)
    base = 200_000 * scale
    for op in ("spmm", "scatter_add", "index_select"):
        yield from _grid(op, device, edges=[n * scale for n in (1_000, 10_000, 100_000, 1_000_000)])
        yield from _grid(op, device, edges=[base], width=[1, 8, 32, 128, 512])
    for name, values in _SHAPES.items():
        yield from _grid("spmm", device, edges=[base], **{name: values})
        if name != "dtype":
            yield from _grid("scatter_add", device, edges=[base], **{name: values})


_SHAPES: Mapping[str, Sequence[Any]] = {
    "degree": (1, 4, 64, 500),
    "law": ("regular", "uniform", "powerlaw"),
    "order": ("sorted", "random", "clustered"),
    "index_dtype": ("int64", "int32"),
    "dtype": ("float32", "float64", "bfloat16"),
}


# Calibrate and full ------------------------------------------------------------------------------------


def _calibrate(device: str) -> Iterator[Group]:
    """What the cost model's constants rest on: sizes, widths, degrees and locality, apart from each other."""
    edges = [n * _scale(device) for n in (10_000, 100_000, 1_000_000)]
    yield from _grid("spmm", device, edges=edges, width=[8, 32, 128], degree=[4, 32])
    yield from _grid(
        "gather_scatter", device, edges=edges[:2], width=[16, 64, 256], order=["sorted", "clustered"]
    )
    yield from _grid("spmm_max", device, edges=edges[:2], width=[16, 64], law=["uniform", "powerlaw"])
    yield from _grid("sddmm", device, edges=edges[:2], width=[16, 64])
    yield from _grid("index_select", device, edges=edges, width=[8, 64])
    yield from _grid("scatter_add", device, edges=edges[:2], width=[8, 64])
    yield from _grid("edge_softmax", device, edges=edges[:2], heads=[1, 8])
    yield from _grid("mm", device, nodes=[20_000 * _scale(device)], inner=[16, 64, 256], width=[16, 64, 256])
    yield from _grid("addmm", device, nodes=[20_000 * _scale(device)], inner=[64], width=[16, 64])


def _full(device: str) -> Iterator[Group]:
    """Everything above, and every operation on graphs over four decades of edges, both ways."""
    yield from _quick(device)
    yield from _paper(device)
    yield from _calibrate(device)
    sizes = (1_000, 10_000, 100_000, 1_000_000, 10_000_000) + ((100_000_000,) if device == "cuda" else ())
    for op, operation in OPERATIONS.items():
        if "edges" in operation.takes:
            for edges, law in itertools.product(sizes, ("uniform", "powerlaw")):
                yield from _alone(
                    op, device, edges=edges, **({"law": law} if "law" in operation.takes else {})
                )
    if device == "cpu":
        for op in ("spmm", "scatter_add", "index_select"):
            yield from _grid(op, device, threads=[1])


SUITES: Mapping[str, Callable[[str], Iterator[Group]]] = {
    "quick": _quick,
    "paper": _paper,
    "calibrate": _calibrate,
    "full": _full,
}
