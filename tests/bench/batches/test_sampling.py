"""bench/batches/sampling: peers are timed on batches that were checked first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.bench.batches import Options
from plait.bench.batches.part import load
from plait.bench.batches.sampling import Drawn, _fault, _samplers, loading, sampling

SMALL = Options(is_small=True, budget_seconds=0.05, environment={})


@pytest.mark.parametrize(("part", "width"), [(sampling, 0), (loading, 128)])
def test_a_cell_has_rates_of_all_that_ran_and_reasons_for_the_others(part, width) -> None:
    before = torch.get_num_threads()
    cells = part(SMALL)
    case, result, _ = next(cells)
    cells.close()
    assert case["width"] == width
    assert result["peers"]["plait"]["edges_per_second"] > 0
    assert all("reason" in line for line in result["peers"].values() if line["status"] != "timed")
    assert torch.get_num_threads() == before


def test_a_batch_with_foreign_edges_or_too_few_is_not_timed() -> None:
    graph = load("rmat:scale=8,edges=3e3", None)
    ends = np.stack((graph.indices, graph.edge_rows())).astype(np.int64)
    ways, _ = _samplers(graph, ends, (3, 2), 2)
    drawn = ways["plait"].one()
    assert _fault(graph, (3, 2), drawn) == ""
    missing = Drawn(drawn.source, drawn.target, drawn.num_first - 1)
    assert "edges into the seeds" in _fault(graph, (3, 2), missing)
    absent = int(np.setdiff1d(np.arange(graph.num_nodes), graph.indices[: graph.indptr[1]])[0])
    foreign = Drawn(np.array([absent]), np.array([0]), drawn.num_first)
    assert "none of the graph's" in _fault(graph, (3, 2), foreign)
