"""runtime/project: products of tall matrices under autograd, against torch's own."""

from __future__ import annotations

import pytest
import torch

from plait.runtime.buffers import Buffers
from plait.runtime.project import Projector


def _tensors(rows: int, inner: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + inner + width)
    shapes = [(rows, inner), (inner, width), (width,), (rows, width)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3, 2), (1, 1, 1), (7, 33, 5), (300, 5, 70), (700, 64, 64)])
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "wb", "xb", "xwb"])
def test_what_is_wanted_gets_the_gradient_that_torch_gives(
    shape: tuple[int, int, int], wanted: str, dtype: torch.dtype
) -> None:
    x, w, bias, grad = _tensors(*shape, dtype)
    answers = []
    for run in (Projector(Buffers()), lambda x, w, b: x @ w + b):
        leaves = [
            t.clone().requires_grad_(name in wanted) for name, t in zip("xwb", (x, w, bias), strict=True)
        ]
        out = run(*leaves)
        out.backward(grad)
        answers.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*answers, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_map_without_bias_and_a_gradient_of_stride_zero() -> None:
    x, w, _, _ = _tensors(50, 6, 4, torch.float32)
    ours, theirs = (w.clone().requires_grad_() for _ in range(2))
    Projector(Buffers())(x, ours).sum().backward()
    (x @ theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_bits_of_the_gradients_do_not_depend_on_the_threads() -> None:
    x, w, bias, grad = _tensors(5000, 64, 96, torch.float32)
    answers = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
        Projector(Buffers())(*leaves).backward(grad)
        answers.append([leaf.grad for leaf in leaves])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_a_weight_that_is_a_view_itself_gets_its_gradient() -> None:
    x, stored, _, _ = _tensors(50, 6, 6, torch.float32)
    stored.requires_grad_()
    view = stored.view_as(stored)
    out = Projector(Buffers())(x, view.t())
    (found,) = torch.autograd.grad(out.sum(), view)
    torch.testing.assert_close(found, x.sum(0).expand(6, 6))
