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
        close(torch.from_numpy(mine), expected[name], name)
    grad = torch.randn(N, len(layout.kept) * x.shape[1], generator=generator, dtype=torch.float64).to(dtype)
    shares = torch.full((N, layout.sections * x.shape[1]), nothing, dtype=dtype)
    k.aggregate_shares(forward, layout, grad, out, ties, shares)
    to_x = k.aggregate_sources(transpose, x, layout, shares, torch.full_like(x, nothing))
    grads = {name: columns(grad, layout.kept, width, name) for name in layout.kept}
    slow = reference.aggregate_backward(forward.indptr, forward.indices, x.double().numpy(), grads)
    np.testing.assert_allclose(to_x.numpy(), slow, atol=(2e-5 if dtype == torch.float32 else 1e-9) * 40)


@pytest.mark.parametrize("offset", [1.0, 100.0])
def test_variances_keep_their_digits_where_the_rows_are_large_beside_them(offset: float) -> None:
    forward, _ = patterns("random")
    generator = torch.Generator().manual_seed(3)
    x = offset + 0.01 * torch.randn(M, 37, generator=generator)
    layout = k.Layout(("mean", "var", "std"), 37)
    out = k.aggregate(forward, x, layout, torch.full((N, 3 * 37), float("nan")))
    expected = reference.aggregate(forward.indptr, forward.indices, x.double().numpy(), ["var"])["var"]
    var = columns(out, layout.names, 37, "var")
    np.testing.assert_allclose(var, expected, rtol=3e-6, atol=1e-12)
