"""kernels/edgewise against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.kernels import edgewise as k
from plait.kernels.edgewise import reference
from tests.kernels.test_gate import M, N, patterns


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 32, 85])
@pytest.mark.parametrize(("first", "last"), [(0, N), (3, 11)])
def test_pairs_and_scattered_sums_equal_the_reference(
    width: int, dtype: torch.dtype, graph: str, first: int, last: int
) -> None:
    forward, _ = patterns(graph)
    generator = torch.Generator().manual_seed(width)
    near, far = (torch.randn(rows, width, generator=generator, dtype=dtype) for rows in (N, M))
    start, end = int(forward.indptr[first]), int(forward.indptr[last])
    out = torch.full((end - start, width), float("nan"), dtype=dtype)
    k.pair(forward, first, last, near, far, out)
    expected = reference.pair(forward.indptr, forward.indices, near.numpy(), far.numpy(), first, last)
    np.testing.assert_array_equal(out.numpy(), expected)
    sources = forward.indices[start:end]
    total = torch.randn(M, width, generator=generator, dtype=dtype)
    slow = reference.scatter(sources, out.double().numpy(), total.double().numpy())
    k.scatter(k.Groups.of(sources), out, total)
    np.testing.assert_allclose(total.numpy(), slow, atol=1e-4 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 16, 37])
def test_marks_remember_who_equals_the_best(width: int, dtype: torch.dtype) -> None:
    forward, _ = patterns("random")
    edges = forward.num_edges
    generator = torch.Generator().manual_seed(width)
    values = torch.randint(0, 3, (edges, width), generator=generator).to(dtype)
    best = torch.randint(0, 3, (N, width), generator=generator).to(dtype)
    share = torch.randn(N, width, generator=generator, dtype=dtype)
    marks = torch.full((edges, k.mark_bytes(width)), 255, dtype=torch.uint8)
    k.mark(forward, best, values, marks)
    out = k.unmark(forward, share, marks, torch.full_like(values, float("nan")))
    rows = np.repeat(np.arange(N), np.diff(forward.indptr))
    expected = reference.marked(rows, best.numpy(), values.numpy(), share.numpy())
    np.testing.assert_array_equal(out.numpy(), expected)
