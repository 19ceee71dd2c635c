"""bench/batches/leak: epochs and breaks are counted by what they leave."""

from __future__ import annotations

import pytest

from plait.bench.batches import Options
from plait.bench.batches.leak import leaks


@pytest.mark.slow
def test_every_loader_a_compiled_model_and_breaks_are_measured() -> None:
    cells = list(leaks(Options(is_small=True, epochs=4, breaks=5, environment={})))
    assert [case["loader"] for case, _, _ in cells] == [
        "plain", "prefetch", "cache", "prefetch", "prefetch", "cache",
    ]  # fmt: skip
    for case, result, _ in cells:
        if "breaks" in case:
            assert result["threads"] == result["segments"] == result["files"] == 0
        else:
            assert len(result["resident_bytes"]) == 4
