"""kernels/multi against its reference: every aggregator, gradients, towers, odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.kernels import multi as k
from plait.kernels.multi import reference
from tests.kernels.test_gate import M, N, close, patterns

NAMES = [
    ("mean", "min", "max", "std"),
    ("sum",),
    ("max",),
    ("var", "sum"),
    ("std", "min"),
    ("mean", "sum", "var", "std", "max", "min"),
]


def columns(values: torch.Tensor, names: tuple[str, ...], width: int, name: str) -> np.ndarray:
    """One aggregator's columns, towers side by side."""
    by_tower = values.view(values.shape[0], -1, len(names), width)
    return by_tower[:, :, names.index(name)].reshape(values.shape[0], -1).numpy()


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("names", NAMES, ids=str)
@pytest.mark.parametrize(("width", "towers"), [(1, 1), (37, 1), (19, 3)])
def test_outputs_and_gradients_equal_the_reference(
    width: int, towers: int, names: tuple[str, ...], dtype: torch.dtype, graph: str
) -> None:
    forward, transpose = patterns(graph)
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(M, towers * width, generator=generator, dtype=torch.float64).to(dtype)
    # few distinct values in the first columns: ties between different sources
    x[:, : towers * width // 2] = x[:, : towers * width // 2].round()
    layout = k.Layout(names, width, towers)
    nothing = float("nan")
    out = torch.full((N, len(layout.kept) * x.shape[1]), nothing, dtype=dtype)
    ties = torch.full((N, 2 * x.shape[1]), nothing, dtype=dtype)
    k.aggregate(forward, x, layout, out, ties)
    again = k.aggregate(forward, x, layout, torch.full_like(out, nothing))
    assert torch.equal(out, again)
    expected = reference.aggregate(forward.indptr, forward.indices, x.double().numpy(), list(layout.kept))
    for name in layout.kept:
        mine = columns(out, layout.kept, width, name)
        if name == "std":  # a root of cancelled digits
            np.testing.assert_allclose(mine, expected[name], atol=2e-3 if dtype == torch.float32 else 1e-7)
        else:
            close(torch.from_numpy(mine), expected[name], name)
    grad = torch.randn(N, len(layout.kept) * x.shape[1], generator=generator, dtype=torch.float64).to(dtype)
    shares = torch.full((N, layout.sections * x.shape[1]), nothing, dtype=dtype)
    k.aggregate_shares(forward, layout, grad, out, ties, shares)
    to_x = k.aggregate_sources(transpose, x, layout, shares, torch.full_like(x, nothing))
    grads = {name: columns(grad, layout.kept, width, name) for name in layout.kept}
    slow = reference.aggregate_backward(forward.indptr, forward.indices, x.double().numpy(), grads)
    if dtype == torch.float64 or "std" not in names:
        np.testing.assert_allclose(to_x.numpy(), slow, atol=(2e-5 if dtype == torch.float32 else 1e-9) * 40)
