"""runtime/nearest against sorting all distances."""

from __future__ import annotations

import torch

from plait.runtime import nearest as module
from plait.runtime.nearest import nearest


def test_the_nearest_rows_in_every_batch_and_block(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "_BLOCK", 50)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, generator=generator), torch.randn(20, 3, generator=generator)
    batch_x, batch_y = (
        torch.tensor([0] * 12 + [1] * 2 + [3] * 16),
        torch.tensor([0] * 5 + [1] * 5 + [2] * 4 + [3] * 6),
    )
    sources, targets = nearest(x, y, 4, batch_x, batch_y)
    found = {(int(j), int(i)) for j, i in zip(sources, targets, strict=True)}
    expected = set()
    for i in range(20):
        inside = [j for j in range(30) if batch_x[j] == batch_y[i]]
        inside.sort(key=lambda j: float((x[j] - y[i]).square().sum()))
        expected |= {(j, i) for j in inside[:4]}
    assert found == expected
    assert len(sources) == len(expected)


def test_a_row_is_its_own_nearest() -> None:
    x = 1e3 + torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    sources, targets = nearest(x, x, 1)
    assert torch.equal(sources, targets)
    assert len(nearest(x[:0], x[:0], 3)[0]) == 0
