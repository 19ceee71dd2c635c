"""bench/ops/findings: the answers follow from the figures, and each names the records behind it."""

from __future__ import annotations

from typing import Any

from plait.bench.ops.findings import findings
from plait.measure import Record


def timed(op: str, seconds: float, variant: str = "torch", group: str = "g", **case: Any) -> Record:
    sizes = {"op": op, "variant": variant, "direction": "forward", "device": "cpu", **case}
    result = {"status": "ok", "seconds": {"median_seconds": seconds}, "group": group}
    return Record("op", sizes, result)


def by_name(records: list[Record]) -> dict[str, Any]:
    return {finding.name: finding for finding in findings(records)}


def test_nothing_is_said_without_records() -> None:
    assert findings([]) == []


def test_value_zeros_are_judged_at_three_percent() -> None:
    quiet = [timed("mm", 1.0 + 0.02 * zeros, value_sparsity=zeros) for zeros in (0.0, 0.5, 0.99)]
    finding = by_name(quiet)["value_zeros"]
    assert finding.answer.startswith("No: 1 of 1")
    assert finding.groups == ("g",)
    loud = [timed("mm", 1.0 + zeros, value_sparsity=zeros) for zeros in (0.0, 0.5, 0.99)]
    assert by_name(loud)["value_zeros"].answer.startswith("Not in most: 0 of 1")


def test_the_crossover_is_where_the_lines_meet() -> None:
    records = []
    for sparsity in (0.5, 0.9, 0.99, 0.999):
        sizes = {"width": 64, "sparsity": sparsity, "nodes": 100}
        records.append(timed("spmm", 1.0, "dense", **sizes))
        # as long as dense where a twentieth of the matrix is filled
        records.append(timed("spmm", 20.0 * (1.0 - sparsity), "torch-csr", **sizes))
        records.append(timed("spmm", 0.5, "plait", **sizes))
    row = by_name(records)["crossover"].figures[0]
    assert row["width"] == 64
    assert row["torch"] == "5.0%"
    assert row["plait"] == "50% at least"


def test_contiguity_names_the_fast_axis() -> None:
    records = [timed("index_select", 1.0, axis=0), timed("index_select", 5.0, axis=1)]
    finding = by_name(records)["contiguity"]
    assert finding.answer.startswith("Yes: over 2x in 1 of 1")
    assert finding.figures[0]["fast axis"] == 0


def test_collisions_and_reductions_are_ratios() -> None:
    records = [
        timed(op, seconds * fold, reduction=fold)
        for op, seconds in (("scatter_add", 1.0), ("scatter_max", 3.0), ("scatter_mean", 2.0))
        for fold in (1, 8)
    ]
    found = by_name(records)
    assert all(row["ratio"] == 8.0 for row in found["collisions"].figures)
    assert "3.00x (scatter_max) a sum" in found["reductions"].answer


def test_pyg_is_held_against_the_best_of_torch() -> None:
    records = [
        timed("scatter_add", 2.0, "pyg"),
        timed("scatter_add", 4.0),
        timed("scatter_add", 1.0, "index_add"),
    ]
    assert by_name(records)["pyg_against_native"].figures[0]["ratio"] == 2.0


def test_the_backward_penalty_is_backward_over_forward() -> None:
    records = [
        timed("spmm", seconds, variant, direction=direction, edges=10)
        for variant, direction, seconds in (
            ("torch-csr", "forward", 1.0),
            ("torch-csr", "backward", 9.0),
            ("plait", "forward", 1.0),
            ("plait", "backward", 1.1),
        )
    ]
    answer = by_name(records)["backward_penalty"].answer
    assert "9.0x its forward time" in answer
    assert "1.1x" in answer


def test_operations_without_a_sparse_path_are_listed() -> None:
    finding = by_name([timed("scatter_add", 1.0), timed("spmm", 1.0)])["no_sparse_path"]
    assert "scatter_add" in finding.answer
    assert "spmm" not in finding.answer
