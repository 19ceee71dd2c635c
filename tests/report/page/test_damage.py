"""The page of damaged records: whatever a field holds, what is left is drawn."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.measure import Record
from plait.report.page import Run, report_of
from plait.report.page.draw import NARROW
from plait.report.page.samples import is_whole
from tests.report.page import made

_DAMAGE = (None, "", "x", -1, 0, 5, True, 1e300, 1e-300, [], {}, [1], ["a", None], {"a": 1})


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _damaged(whole: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    value = copy.deepcopy(whole)
    *parents, last = rng.choice([path for path in _paths(value) if path[0] not in ("kind", "schema")])
    holder: Any = value
    for key in parents:
        holder = holder[key]
    holder[last] = rng.choice(_DAMAGE)
    return value


def _lines() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    records = [
        r
        for kind in (made.ops, made.layers, made.models, made.plans, made.predicted)
        for r in list(kind(rng))[::9]
    ]
    return [json.loads(record.to_json()) for record in records]


@pytest.mark.parametrize("seed", range(25))
def test_damage_to_any_field_is_survived(seed: int) -> None:
    rng = random.Random(seed)
    lines = _lines()
    records = []
    for _ in range(30):
        try:
            records.append(Record.from_json(json.dumps(_damaged(rng.choice(lines), rng))))
        except InputError:
            continue
    plans = [_damaged(json.loads(json.dumps(made.plan())), rng) for _ in range(3)]
    kept = {str(k): plan for k, plan in enumerate(plans) if is_whole(plan)}
    report = report_of(Run((tuple(records),), kept, ()))
    assert report.html()
    assert all(figure.draw(NARROW) for figure in report.figures)
