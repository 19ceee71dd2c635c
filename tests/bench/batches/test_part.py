"""bench/batches/part: bars say whether they hold, records carry them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plait.bench.batches.part import KIND, Bar, Measured, Options, edge_list, load, recorded


def test_a_bar_is_a_least_or_a_most() -> None:
    assert Bar("speed", 2.0, 2.0).holds
    assert not Bar("speed", 1.9, 2.0).holds
    assert Bar("time", 1.9, 2.0, is_least=False).holds
    assert not Bar("time", 2.1, 2.0, is_least=False).holds
    assert not Bar("time", float("nan"), 2.0).holds


def test_records_carry_case_result_bars_and_environment() -> None:
    def part(options: Options) -> Iterator[Measured]:
        yield {"graph": "a"}, {"seconds": 1.0}, (Bar("speed", 3.0, 2.0),)

    (record,) = recorded("drawing", part, Options(environment={"machine": "this one"}))
    assert record.kind == KIND
    assert record.case == {"part": "drawing", "graph": "a"}
    assert record.result["seconds"] == 1.0
    assert record.result["bars"] == [
        {"name": "speed", "value": 3.0, "limit": 2.0, "is_least": True, "holds": True}
    ]
    assert record.environment == {"machine": "this one"}


def test_the_edge_list_has_all_edges_in_another_order() -> None:
    graph = load("rmat:scale=6,edges=300", None)
    source, target = edge_list(graph)
    order = np.lexsort((source, target))
    np.testing.assert_array_equal(source[order], graph.indices)
    np.testing.assert_array_equal(target[order], graph.edge_rows())
