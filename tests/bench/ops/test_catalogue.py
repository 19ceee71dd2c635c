"""bench/ops/catalogue: every variant of every operation gives the float64 answer, on awkward graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.bench.ops.case import case_of
from plait.bench.ops.catalogue import OPERATIONS, find, make_case
from plait.bench.ops.runner import Options, measure

SMALL: dict[str, Any] = {"edges": 300, "nodes": 40, "width": 5, "batch": 8}
QUICK = Options(repeats=1, warmup=0, budget_seconds=0.0, memory=False, environment={}, stream={"cpu 1": 1e9})
# what only some variants know how to do, by design
MAY_LACK = ("absent", "unsupported")


def statuses(op: str, **sizes: Any) -> dict[str, str]:
    takes = OPERATIONS[op].takes
    fitting = {name: value for name, value in {**SMALL, **sizes}.items() if name in takes}
    if "graph" in fitting:
        fitting = {name: value for name, value in fitting.items() if name not in ("edges", "nodes")}
    direction = sizes.get("direction", "forward")
    records = measure((make_case(op, threads=1, direction=direction, **fitting),), QUICK)
    return {str(record.case["variant"]): str(record.result["status"]) for record in records}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
def test_every_variant_is_right(op: str, direction: str) -> None:
    if direction != "forward" and not find(op).has_backward:
        pytest.skip("has no gradient")
    found = statuses(op, direction=direction)
    assert "wrong" not in found.values()
    assert "ok" in found.values()


@pytest.mark.parametrize("op", [op for op, entry in OPERATIONS.items() if "graph" in entry.takes])
@pytest.mark.parametrize("graph", ["star:n=30", "erdos:n=50,edges=20", "cliques:count=3,size=4"])
def test_hubs_and_isolated_nodes_are_no_trouble(op: str, graph: str) -> None:
    assert "wrong" not in statuses(op, graph=graph, width=1).values()


@pytest.mark.parametrize("op", ["index_select", "gather", "index_add", "scatter_add", "scatter_max"])
def test_columns_can_be_indexed_instead_of_rows(op: str) -> None:
    found = statuses(op, axis=1)
    assert found["torch"] == "ok"
    assert set(found.values()) <= {"ok", *MAY_LACK}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes_are_right_or_unsupported(dtype: str) -> None:
    for op in ("spmm", "scatter_add", "mm", "index_select"):
        assert set(statuses(op, dtype=dtype).values()) <= {"ok", *MAY_LACK}


def test_int32_indices_are_right_or_unsupported() -> None:
    for op in ("spmm", "scatter_add", "index_add", "index_select", "gather"):
        assert set(statuses(op, index_dtype="int32").values()) <= {"ok", *MAY_LACK}


def test_what_is_not_there_is_a_line() -> None:
    found = statuses("scatter_add")
    with pytest.raises(ImportError):
        __import__("torch_scatter")
    assert found["torch_scatter"] == "absent"


def test_work_grows_with_size_and_least_is_at_most_most() -> None:
    for op, operation in OPERATIONS.items():
        small, large = (
            operation.work(
                case_of(
                    op,
                    operation.takes,
                    {n: k * v for n, v in {"edges": 100, "nodes": 50}.items() if n in operation.takes},
                )
            )
            for k in (1, 10)
        )
        assert small.bytes_least <= small.bytes_most
        # those two grow with the batch
        if op not in ("neighbour_sampling", "feature_gather"):
            assert large.bytes_least > small.bytes_least


def test_gradients_of_plait_are_those_of_torch() -> None:
    from plait.bench.ops import own
    from plait.bench.ops.inputs import Draw, Inputs

    for op, reduce in (("spmm", "sum"), ("spmm_mean", "mean"), ("spmm_max", "max")):
        case = make_case(op, edges=200, nodes=30, width=3, direction="backward", dtype="float64")
        inputs = Inputs(case, OPERATIONS[op].draw(case, Draw(case)), ("x",))
        call = own.product(inputs, reduce, is_weighted=op == "spmm")
        reference = OPERATIONS[op].reference
        assert reference is not None
        for out, want in ((call(), reference(inputs)),):
            cotangent = torch.randn(out.shape, dtype=out.dtype)
            have = torch.autograd.grad(out, inputs["x"], cotangent)[0]
            torch.testing.assert_close(have, torch.autograd.grad(want, inputs["x"], cotangent)[0])
