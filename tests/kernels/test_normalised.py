"""Normalised edge weights and their gradient, against the reference as torch differentiates it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.kernels.listed import LOOPS, SCALES
from plait.kernels.normalised import Places, gradient, normalised
from plait.kernels.normalised.reference import reference

GRAPHS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "no edges": (3, []),
    "isolated nodes": (5, [(0, 1), (1, 0)]),
    "self loops": (3, [(0, 0), (1, 1), (1, 1), (0, 2)]),
    "repeated edges": (3, [(0, 1), (0, 1), (2, 1), (0, 1)]),
    "hub": (6, [(k, 0) for k in range(6)] + [(0, k) for k in range(6)]),
}


def places_of(nodes: int, edges: list[tuple[int, int]], are_loops_apart: bool) -> Places:
    """The edges from the last to the first, so that the order is not the list's."""
    kept = [e for e, (u, v) in enumerate(edges) if u != v or not are_loops_apart][::-1]
    loops = [e for e in range(len(edges)) if e not in kept]
    numbers = (
        kept,
        [edges[e][1] for e in kept],
        [edges[e][0] for e in kept],
        loops,
        [edges[e][0] for e in loops],
    )
    return Places(*(np.array(part, np.int32) for part in numbers), nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_gradients_are_the_references(
    name: str, loops: str, scale: str, dtype: torch.dtype
) -> None:
    nodes, edges = GRAPHS[name]
    places = places_of(nodes, edges, loops != "none")
    weight = (torch.rand(len(edges), dtype=dtype) + 0.1).requires_grad_()
    values, own = reference(places, weight, loops, 2.0, scale)
    made = normalised(places, weight.detach().numpy(), loops, 2.0, scale)
    entries = values if own is None else torch.cat([values, own])
    torch.testing.assert_close(torch.from_numpy(made.entries), entries.detach())
    by = torch.randn(len(entries), dtype=dtype)
    loss = (entries * by).sum()
    (expected,) = torch.autograd.grad(loss, weight, allow_unused=True, materialize_grads=True)
    found = gradient(places, made, by.numpy(), loops, scale)
    torch.testing.assert_close(torch.from_numpy(found), expected)


def test_rows_that_sum_to_zero_have_the_gradient_torch_gives_them() -> None:
    places = places_of(2, [(0, 1), (1, 0)], False)
    weight = torch.tensor([0.0, 1.0], requires_grad=True)
    values, _ = reference(places, weight, "none", 1.0, "symmetric")
    (expected,) = torch.autograd.grad(values.sum(), weight)
    made = normalised(places, weight.detach().numpy(), "none", 1.0, "symmetric")
    found = gradient(places, made, np.ones(2, np.float32), "none", "symmetric")
    torch.testing.assert_close(torch.from_numpy(found), expected, equal_nan=True)
