"""The table of parts: every figure of a small division by hand."""

from __future__ import annotations

from plait.report.parts import parts_text

PART = {"nodes": 30, "edges": 100, "cut_edges": 10, "halo": 7, "train": 3, "remote_rows": 50.0}
STATISTICS = {
    "fanout": [10, 25],
    "batch_size": 1000,
    "row_bytes": 1000,
    "parts": [PART, {**PART, "nodes": 10}],
}


def test_cut_balance_and_bytes_are_summed() -> None:
    text = parts_text(STATISTICS, 200)
    assert "edge cut: 20 of 200 edges (10.0%)" in text
    assert "nodes 1.500, in-edges 1.000, training nodes 1.000" in text
    assert "100 rows per epoch, 0.10 MB over the network" in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_without_features_or_edges_nothing_is_divided_by() -> None:
    empty = {name: 0 for name in PART}
    text = parts_text({**STATISTICS, "row_bytes": 0, "parts": [empty]}, 0)
    assert "edge cut: 0 of 0 edges (0.0%)" in text
    assert "no features stored" in text
