"""The table of plait bench plans: what the planner chose, what was fastest, and the regret."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plait.measure import Record

__all__ = ["plans_text", "regret_line"]


def regret_line(record: Record) -> str:
    """One case on one line."""
    case: Any = record.case
    result: Any = record.result
    candidates = result["candidates"]
    chosen = candidates[0]
    best = min(candidates, key=lambda c: c["median_seconds"])
    return (
        f"{case['graph']} {_subject(case)} {case['mode']}: "
        f"regret {result['regret']:.3f} of {len(candidates)}; chosen {chosen['median_seconds'] * 1e3:.3g} ms "
        f"(predicted {chosen['predicted_seconds'] * 1e3:.3g}), best {best['median_seconds'] * 1e3:.3g} ms"
    )


def _subject(case: Any) -> str:
    """The whole model, or the layer and its widths."""
    if "model" in case:
        return f"{case['model']} model"
    return f"{case['layer']} {case['width_in']}->{case['width_out']}"


def plans_text(records: Sequence[Record]) -> str:
    """Geometric mean and worst regret, and how far predictions were off."""
    if not records:
        return "no case was measured"
    results: list[Any] = [record.result for record in records]
    regrets = [result["regret"] for result in results]
    errors = sorted(abs(result["prediction_error"]) for result in results)
    mean = math.exp(sum(map(math.log, regrets)) / len(regrets))
    worst = max(records, key=lambda record: record.result["regret"])  # type: ignore[arg-type, return-value]
    return "\n".join(
        [
            f"regret over {len(regrets)} cases: geometric mean {mean:.3f}, worst {max(regrets):.3f}",
            f"worst: {regret_line(worst)}",
            f"prediction of the chosen plan: median error {errors[len(errors) // 2]:.0%}",
        ]
    )
