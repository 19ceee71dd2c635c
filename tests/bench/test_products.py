"""bench/products: every side is checked before it is timed; the gain is over the faster CSR."""

from __future__ import annotations

import pytest
import torch

from plait.bench import products
from plait.errors import InputError
from plait.graph import generate
from plait.graph.hag import search, tile_schedule
from plait.measure import Record


def test_both_ways_of_every_width_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SECONDS", 0.01)
    graph = generate.cliques(4, 8)
    schedule = tile_schedule(search(graph, min_count=2))
    taken = list(products.run(graph, schedule, schedule, (3, 16), "cpu", {"graph": "cliques"}))
    assert [(r.case["width"], r.case["way"]) for r in taken] == [
        (3, "forward"), (3, "backward"), (16, "forward"), (16, "backward"),
    ]  # fmt: skip
    assert all(products.gain(record) > 0 for record in taken)


def test_the_gain_is_over_the_faster_csr() -> None:
    sides = {name: {"median_seconds": s} for name, s in (("torch-csr", 3.0), ("csr", 2.0), ("hag", 1.0))}
    assert products.gain(Record(products.KIND, {}, {"sides": sides})) == 2.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_said() -> None:
    graph = generate.cliques(2, 3)
    schedule = tile_schedule(search(graph))
    with pytest.raises(InputError, match="no GPU"):
        next(products.run(graph, schedule, schedule, (4,), "cuda", {}))
