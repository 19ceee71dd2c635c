"""bench/ops/runner: checked before timed, recorded, resumed, refused when too large."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.bench.ops import runner
from plait.bench.ops.catalogue import OPERATIONS, make_case
from plait.bench.ops.inputs import Inputs
from plait.bench.ops.operation import Operation, Variant
from plait.bench.ops.runner import Options, left, measure, run
from plait.errors import InputError
from plait.measure import Record, read

CASE = make_case("mm", nodes=20, inner=4, width=3, threads=1)


def quick(**more: Any) -> Options:
    settings = {"repeats": 2, "warmup": 1, "environment": {}, "stream": {"cpu 1": 1e9}, "memory": False}
    return Options(**{**settings, **more})


def with_variants(monkeypatch: pytest.MonkeyPatch, *variants: Variant) -> None:
    changed: Operation = replace(OPERATIONS["mm"], variants=variants)
    monkeypatch.setattr(runner, "find", lambda name: changed)


def by_variant(records: list[Record]) -> dict[str, Any]:
    return {str(record.case["variant"]): record.result for record in records}


def right(inputs: Inputs) -> Any:
    return lambda: inputs["x"] @ inputs["w"]


def test_a_record_holds_the_case_the_time_and_the_rates() -> None:
    record = measure((CASE,), quick(memory=True))[0]
    result: Any = record.result
    assert record.kind == "op"
    assert record.case == {**CASE.to_dict(), "variant": "torch"}
    assert result["status"] == "ok"
    assert result["seconds"]["repeats"] == 2
    assert result["error"] < 1e-6
    assert result["flops"] == 2 * 20 * 4 * 3
    assert result["bytes_least"] == 4 * (80 + 12 + 60)
    rate = result["bytes_least"] / result["seconds"]["median_seconds"]
    assert result["gbytes_per_s"] == pytest.approx(rate / 1e9)
    assert result["bandwidth_share"] == pytest.approx(rate / 1e9)
    assert result["peak_bytes"] == 4 * 60
    assert result["clock"] == "wall"


def test_a_wrong_variant_is_reported_and_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def wrong(inputs: Inputs) -> Any:
        def call() -> torch.Tensor:
            calls.append(1)
            return 1.001 * (inputs["x"] @ inputs["w"])

        return call

    with_variants(monkeypatch, Variant("right", right), Variant("wrong", wrong))
    found = by_variant(measure((CASE,), quick()))
    assert found["right"]["status"] == "ok"
    assert found["wrong"]["status"] == "wrong"
    assert "seconds" not in found["wrong"]
    assert found["wrong"]["error"] == pytest.approx(0.001, rel=0.1)
    assert len(calls) == 1


def test_nan_and_other_shapes_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = Variant("nan", lambda inputs: lambda: (inputs["x"] @ inputs["w"]) * float("nan"))
    thin = Variant("thin", lambda inputs: lambda: inputs["x"][:, :1])
    with_variants(monkeypatch, nan, thin)
    assert {line["status"] for line in by_variant(measure((CASE,), quick())).values()} == {"wrong"}


def test_missing_and_broken_variants_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: Inputs) -> Any:
        raise RuntimeError("out of order\nsecond line")

    with_variants(
        monkeypatch,
        Variant("right", right),
        Variant("gone", right, needs="no_such_package"),
        Variant("elsewhere", right, devices=("cuda",)),
        Variant("broken", broken),
    )
    found = by_variant(measure((CASE,), quick()))
    assert found["gone"]["status"] == "absent"
    assert "no_such_package" in found["gone"]["reason"]
    assert found["elsewhere"]["status"] == "unsupported"
    assert found["broken"]["reason"] == "RuntimeError: out of order"
    assert found["right"]["status"] == "ok"


def test_groups_that_no_chosen_variant_is_in_are_left_out() -> None:
    groups = [(CASE,), (make_case("spmm", edges=10, width=2),)]
    assert [group[0].op for group in left(groups, quick(variants=["torch-csr"]))] == ["spmm"]


def test_cases_of_a_bout_share_a_group_and_their_variants_can_be_chosen() -> None:
    group = tuple(replace(CASE, value_sparsity=zeros) for zeros in (0.0, 0.9))
    records = measure(group, quick(variants=["torch"]))
    assert [record.case["value_sparsity"] for record in records] == [0.0, 0.9]
    assert len({record.result["group"] for record in records}) == 1


def test_a_resumed_run_measures_only_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    groups = [(CASE,), (replace(CASE, width=2),)]
    run(groups[:1], quick(output=path))
    options = quick(output=path, resume=True)
    assert left(groups, options) == groups[1:]
    seen: list[list[Record]] = []
    records = run(groups, options, seen.append)
    assert len(seen) == 1
    assert records == read(path)
    assert left([groups[0], groups[0]], quick()) == groups[:1]


def test_an_interrupted_run_keeps_what_is_done(tmp_path: Path) -> None:
    def stop(records: list[Record]) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "run.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run([(CASE,), (replace(CASE, width=2),)], quick(output=path), stop)
    assert {record.case["width"] for record in read(path)} == {3}


def test_sizes_beyond_memory_are_refused_with_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "free_bytes", lambda device: 100_000_000)
    case = make_case("spmm", edges=10_000_000)
    with pytest.raises(InputError, match=r"needs about \d+\.\d GB, 0\.1 GB are free; the largest .* edges"):
        runner.require_memory(case)
    name, most = runner._largest(case, 80_000_000.0)
    fitting = make_case("spmm", edges=most)
    assert name == "edges"
    runner.require_memory(fitting)
    assert measure((case,), quick())[0].result["status"] == "unsupported"


def test_threads_are_set_for_the_case_and_put_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    record = measure((replace(CASE, threads=1),), quick())[0]
    seen.append(torch.get_num_threads())
    assert record.case["threads"] == 1
    assert seen == [before]


def test_the_processor_clock_and_cold_caches_are_recorded() -> None:
    result = measure((CASE,), quick(has_processor_clock=True, is_cold=True))[0].result
    assert (result["clock"], result["is_cold"]) == ("processor", True)
    seconds: Any = result["seconds"]
    assert seconds["calls_per_sample"] == 1


@pytest.mark.gpu
def test_operations_run_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    for op in ("spmm", "scatter_add", "mm", "sort", "edge_softmax"):
        for record in measure(
            (make_case(op, device="cuda"),), quick(stream={"cuda None": 1e12}, memory=True)
        ):
            assert record.result["status"] != "wrong"
            if record.result["status"] == "ok":
                assert record.result["clock"] == "events"


def test_visits_are_spread_and_their_samples_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_case("mm", nodes=24, inner=4, width=3, threads=1)
    drawn: list[int] = []
    entries = runner._entries

    def noted(case: Any, options: Options) -> Any:
        drawn.append(case.nodes)
        return entries(case, options)

    monkeypatch.setattr(runner, "_entries", noted)
    records = run([(CASE,), (other,)], quick(visits=2))
    assert drawn == [20, 24, 20, 24]
    assert {record.case["nodes"] for record in records} == {20, 24}
    for record in records:
        seconds: Any = record.result["seconds"]
        assert seconds["visit_repeats"] == [2, 2]
        assert seconds["repeats"] == len(seconds["samples_seconds"]) == 4


def test_cases_that_differ_in_their_zeros_are_timed_on_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zeros = (0.0, 0.5, 0.99)
    group = tuple(
        make_case("index_select", edges=40, nodes=30, width=8, value_sparsity=z, threads=1) for z in zeros
    )
    seen: list[list[Any]] = []
    monkeypatch.setattr(runner, "_time", lambda entries, case, options: seen.append(list(entries)) or {})
    measure(group, quick())
    entries = [entry for entry in seen[0] if entry.variant == "torch"]
    assert len({id(entry.call) for entry in entries}) == 1
    answers = []
    for entry in entries:
        entry.load()
        assert entry.checker.error(entry.call) <= entry.checker.tolerance
        answers.append(float((entry.call() == 0).float().mean()))
    assert answers[0] < 0.2 < answers[1] < 0.8 < answers[2]


def killed(inputs: Inputs) -> Any:
    return lambda: os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_variant_that_kills_its_process_is_a_line_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_variants(monkeypatch, Variant("crashing", killed), Variant("torch", right))
    found = by_variant(measure((CASE,), quick()))
    assert found["crashing"]["status"] == "unsupported"
    assert "SIGSEGV" in found["crashing"]["reason"]
    assert found["torch"]["status"] == "ok"
