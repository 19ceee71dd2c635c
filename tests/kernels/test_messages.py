"""kernels/messages on the CPU: against the reference, and its gradients against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from plait.errors import InputError
from plait.kernels import messages as k
from plait.kernels.messages import reference
from tests.kernels.test_gate import M, N, patterns

T, EPS = 0.7, 0.1
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


def in_torch(form: str, near: Tensor, far: Tensor, edge: Tensor | None, width: int) -> Tensor:
    """The messages of edges from the rows of their ends, recorded by torch."""
    n, f = near.split(width, 1), far.split(width, 1)
    e = [torch.zeros_like(f[0])] * 2 if edge is None else edge.split(width, 1)
    if form == "film":
        return (n[1] * f[0] + n[0]).relu()
    if form == "crystal":
        return (n[0] + f[0] + e[0]).sigmoid() * softplus(n[1] + f[1] + e[1])
    if form == "gated":
        return (n[0] + f[0] + e[0]).sigmoid() * (f[1] + e[1])
    m = (f[0] + e[0]).relu() + EPS
    power = (T * m - n[0]).exp()
    return torch.cat([power, power * m], 1)


@pytest.mark.parametrize("graph", ["random", "empty", "hub", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 37, 112])
@pytest.mark.parametrize("has_edges", [False, True])
@pytest.mark.parametrize("form", k.FORMS)
def test_outputs_and_gradients_equal_the_reference(
    form: str, has_edges: bool, width: int, dtype: torch.dtype, graph: str
) -> None:
    parts_near, parts_far, parts_edge, parts_out = k.FORMS[form]
    if has_edges and not parts_edge:
        return
    forward, transpose = patterns(graph)
    generator = torch.Generator().manual_seed(width)

    def drawn(rows: int, parts: int) -> Tensor:
        return torch.randn(rows, parts * width, generator=generator, dtype=dtype).requires_grad_()

    near, far, grad = drawn(N, parts_near), drawn(M, parts_far), drawn(N, parts_out).detach()
    edge = drawn(forward.num_edges, parts_edge) if has_edges else None
    given = [None if v is None else v.detach() for v in (near, far, edge)]
    numbers, nothing = torch.tensor([T, EPS], dtype=dtype), float("nan")
    out = k.sums(forward, form, *given, numbers, torch.full_like(grad, nothing))  # type: ignore[arg-type]
    arrays = [None if v is None else v.numpy() for v in given]
    slow = reference.sums(form, forward.indptr, forward.indices, *arrays, T, EPS)  # type: ignore[arg-type]
    scale = TOLERANCE[dtype] * max(1.0, float(np.abs(slow).max(initial=0)))
    np.testing.assert_allclose(out, slow, atol=scale, rtol=0)

    targets = torch.from_numpy(np.repeat(np.arange(N), np.diff(forward.indptr)))
    sources = torch.from_numpy(forward.indices.astype(np.int64))
    made = in_torch(form, near[targets], far[sources], edge, width)
    total = torch.zeros_like(grad).index_add(0, targets, made)
    leaves = [v for v in (near, far, edge) if v is not None]
    wanted = torch.autograd.grad(total, leaves, grad, materialize_grads=True, allow_unused=True)
    to_near, to_far, to_edge = (None if v is None else torch.full_like(v, nothing) for v in given)
    k.sums_targets(forward, form, *given, numbers, grad, to_near, to_edge)  # type: ignore[arg-type]
    order = np.argsort(forward.indices, kind="stable").astype(forward.indices.dtype)
    k.sums_sources(transpose, order, form, *given, numbers, grad, to_far)  # type: ignore[arg-type]
    found = [to_near, to_far, to_edge] if has_edges else [to_near, to_far]
    if form == "softmax":  # its targets' rows have no gradient
        found, wanted = found[1:], wanted[1:]
    for mine, other in zip(found, wanted, strict=True):
        assert mine is not None
        bound = TOLERANCE[dtype] * max(1.0, float(other.abs().max()) if other.numel() else 1.0)
        torch.testing.assert_close(mine, other, atol=bound, rtol=0)


@pytest.mark.parametrize("z", [-800.0, -90.0, -1e-3, 0.0, 30.0, 800.0, float("nan")])
def test_softplus_and_gates_far_from_zero(z: float) -> None:
    forward, _ = patterns("random")
    near, far = torch.zeros(N, 2), torch.full((M, 2), z)
    out = k.sums(forward, "crystal", near, far, None, torch.ones(2), torch.empty(N, 1))
    one = torch.tensor(z).sigmoid() * softplus(torch.tensor(z))
    expected = torch.from_numpy(np.diff(forward.indptr)).float()[:, None] * one
    expected[np.diff(forward.indptr) == 0] = 0
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_rows_of_edges_are_refused_where_messages_read_none() -> None:
    forward, _ = patterns("random")
    edge = torch.zeros(forward.num_edges, 3)
    with pytest.raises(InputError, match="edge: messages of the form 'film'"):
        k.sums(forward, "film", torch.zeros(N, 6), torch.zeros(M, 3), edge, torch.ones(2), torch.empty(N, 3))
