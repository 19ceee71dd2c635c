"""report/page/sweeps: which curves there are and where they cross."""

from __future__ import annotations

import numpy as np
import pytest

from plait.measure import Record
from plait.report.page import Report, Run
from plait.report.page.samples import samples_of
from plait.report.page.sweeps import Sweep, crossings, sweep_figure, sweeps_of
from tests.report.page import made


def _sweeps(records: list[Record]) -> list[Sweep]:
    return sweeps_of(samples_of(Run((tuple(records),), {}, ()))[0])


def test_only_one_size_varies_in_a_sweep(report: Report) -> None:
    found = sweeps_of(report.samples)
    assert {sweep.axis for sweep in found} == {"density", "width", "edges", "inner"}
    widths = [sweep for sweep in found if sweep.axis == "width"]
    assert len(widths) == 2 * 4
    assert all(
        [size for size, _ in line] == [1, 16, 64, 256] for sweep in widths for line in sweep.lines.values()
    )


def test_the_crossing_is_where_the_times_are_equal(report: Report) -> None:
    found = [sweep for sweep in sweeps_of(report.samples) if sweep.axis == "density"]
    assert [sweep.detail for sweep in found] == [f"2k nodes, width {w}" for w in (8, 64, 256)]
    for sweep in found:
        (crossing,) = crossings(sweep)
        # 2 n n w / 90e9 = 2 d n n w / 12e9, less the fixed cost of a call
        assert crossing.at == pytest.approx(12 / 90, rel=0.15)
        assert (crossing.below, crossing.above) == ("plait", "dense")


def test_curves_that_never_meet_have_no_crossing() -> None:
    rng = np.random.default_rng(0)
    sizes = [(s, v) for s in (0.5, 0.9, 0.99) for v in ("dense", "plait")]
    records = [
        made.op_record("spmm", v, 1e-3 if v == "plait" else 9.0, rng, 1.0, 1.0, nodes=10, sparsity=s)
        for s, v in sizes
    ]
    (sweep,) = _sweeps(records)
    assert crossings(sweep) == []


def test_zeros_among_the_values_need_one_variant_and_start_at_zero() -> None:
    rng = np.random.default_rng(0)
    zeros = (0.0, 0.5, 0.99)
    (sweep,) = _sweeps([made.op_record("mm", "torch", 1e-3, rng, 1.0, 1.0, value_sparsity=z) for z in zeros])
    assert sweep.axis == "value_sparsity"
    assert [size for size, _ in sweep.lines["torch"]] == list(zeros)
    assert "<svg" in sweep_figure(sweep, 0).draw(0)


def test_two_sizes_are_no_curve() -> None:
    rng = np.random.default_rng(0)
    records = [
        made.op_record("mm", v, 1e-3, rng, 1.0, 1.0, width=w) for v in ("plait", "torch") for w in (1, 2)
    ]
    assert _sweeps(records) == []


def test_of_many_variants_the_fastest_are_drawn_and_the_title_says_so() -> None:
    rng = np.random.default_rng(0)
    times = {"plait": 9.0, "dense": 8.0} | {f"way{k}": 1.0 + k for k in range(7)}
    records = [
        made.op_record("spmm", variant, seconds, rng, 1.0, 1.0, width=width)
        for variant, seconds in times.items()
        for width in (1, 2, 4)
    ]
    (sweep,) = _sweeps(records)
    drawn = sweep_figure(sweep, 0).draw(0)
    assert sweep.title == "spmm, 3 slower left out"
    assert all(f">{name}<" in drawn for name in ("plait", "dense", "way0", "way3"))
    assert ">way4<" not in drawn
