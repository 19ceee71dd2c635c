"""bench/clocks.py: the steps of every listed layer have a time, and their sum stands beside the layer's."""

from __future__ import annotations

import pytest

from plait.bench.cases import layer_cases
from plait.bench.clocks import LAYERS, run
from plait.bench.plans import Options
from plait.errors import InputError
from plait.report.clocks import clocks_line


@pytest.mark.parametrize("layer", LAYERS)
def test_every_step_of_a_layer_has_a_time(layer: str) -> None:
    cases = layer_cases(["erdos:n=60,edges=240"], [layer], [(8, 8)], ["training"])
    (record,) = run(cases, Options(0.0), lambda record: None)
    assert record.result["without_a_time"] == []  # type: ignore[index]
    assert record.result["steps"] >= 2  # type: ignore[index]
    assert record.result["steps_seconds"] > 0.0  # type: ignore[index]
    assert record.result["calling_seconds"] > 0.0  # type: ignore[index]
    assert record.result["share_with_calling"] > record.result["share"]  # type: ignore[index]
    assert f"{layer} 8->8" in clocks_line(record)


def test_inference_is_refused() -> None:
    cases = layer_cases(["star:n=30"], ["gcn"], [(8, 8)], ["inference"])
    with pytest.raises(InputError, match="--modes: inference"):
        run(cases, Options(0.0), lambda record: None)
