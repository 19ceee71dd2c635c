"""runtime/folded: a folded matrix is the whole one to every function, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool

from plait.errors import InputError
from plait.graph import generate
from plait.graph.twins import closed_twins
from plait.runtime.deferred import Deferred
from plait.runtime.folded import Classes, Folded, unfolded


def classes() -> Classes:
    twins = closed_twins(generate.cliques(3, 4))
    assert twins is not None
    return Classes(twins)


BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2])
W = torch.arange(15.0).reshape(3, 5) / 7
WIDE = torch.arange(60.0).reshape(12, 5)
OFFSETS = torch.tensor([0, 4, 7, 12])

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether the rows kept are enough
    "relu": (lambda h: h.relu(), True),
    "F.relu": (functional.relu, True),
    "leaky_relu": (lambda h: functional.leaky_relu(h, 0.2), True),
    "linear": (lambda h: functional.linear(h, W, torch.ones(3)), True),
    "times a number": (lambda h: 2 * h + 1, True),
    "plus a row": (lambda h: h + torch.arange(5.0), True),
    "plus itself": (lambda h: h + h.relu(), True),
    "softmax": (lambda h: h.softmax(1), True),
    "log_softmax": (lambda h: functional.log_softmax(h, dim=-1), True),
    "layer_norm": (lambda h: functional.layer_norm(h, (5,)), True),
    "cat": (lambda h: torch.cat([h, h.relu()], dim=-1), True),
    "no dropout": (lambda h: functional.dropout(h, 0.0), True),
    "mean over graphs": (lambda h: global_mean_pool(h, BATCH), True),
    "sum over graphs": (lambda h: global_add_pool(h, BATCH), True),
    "segment mean": (lambda h: torch.segment_reduce(h, "mean", offsets=OFFSETS, axis=0), True),
    "segment sum": (lambda h: torch.segment_reduce(h, "sum", lengths=OFFSETS.diff(), axis=0), True),
    "max over graphs": (lambda h: global_max_pool(h, BATCH), False),
    "plus a matrix": (lambda h: h + WIDE, False),
    "softmax over nodes": (lambda h: h.softmax(0), False),
    "sum": (lambda h: h.sum(), False),
    "rows": (lambda h: h[torch.tensor([1, 5, -5])], True),
    "masked rows": (lambda h: h[BATCH == 1], True),
    "keyword": (lambda h: functional.linear(input=h, weight=W), True),
    "normalize": (lambda h: functional.normalize(h, dim=-1), True),
    "batch_norm": (lambda h: functional.batch_norm(h, None, None, training=True), False),
    "transpose": (lambda h: h.t() @ WIDE, False),
    "cat of rows": (lambda h: torch.cat([h, h]), False),
    "dropout that is off": (lambda h: functional.dropout(h, 0.5, training=False), True),
    "another type": (lambda h: h.double().float(), False),
}


def matrix(rows: Tensor, kept: Classes | None = None, heard: list[str] | None = None) -> Any:
    return Deferred.of(Folded(rows, kept or classes(), None if heard is None else heard.append))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_folded_matrix_are_those_of_the_whole(name: str) -> None:
    function, is_enough = FUNCTIONS[name]
    kept = classes()
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    plain, folded = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    heard: list[str] = []
    expected = function(plain[kept.place])
    found = function(matrix(folded * 1, kept, heard))
    assert bool(heard) is not is_enough
    assert type(unfolded(found)) is Tensor
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(folded.grad, plain.grad)


def test_it_has_the_whole_matrix_s_shape_and_asks_for_nothing() -> None:
    heard: list[str] = []
    folded = matrix(torch.zeros(3, 5), heard=heard)
    assert folded.shape == (12, 5)
    assert folded.size(0) == len(folded) == 12
    assert folded.numel() == 60
    assert folded.stride() == (5, 1)
    assert folded.dtype == torch.float32
    assert not folded.requires_grad
    assert folded.new_zeros(2).shape == (2,)
    assert heard == []
    assert repr(folded).startswith("tensor([[0.")


def test_in_place_functions_of_rows_keep_it_folded() -> None:
    heard: list[str] = []
    folded = matrix(-torch.ones(3, 5), heard=heard)
    assert functional.relu(folded, inplace=True) is folded
    folded += 1
    assert heard == []
    assert bool((folded == 1).all())


def test_gradients_of_rows_that_were_never_told_apart_are_refused() -> None:
    leaf = torch.ones(3, 5, requires_grad=True)
    folded = matrix(leaf * 1)
    loss = folded.relu()[torch.tensor([1, 2])].sum()
    for ask in (
        lambda: folded.register_hook(print),
        folded.retain_grad,
        lambda: torch.autograd.grad(loss, folded),
        lambda: loss.backward(inputs=[folded]),
    ):
        with pytest.raises(InputError, match="retain_grad"):
            ask()


def test_second_derivatives() -> None:
    leaf = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    kept = classes()
    weights = torch.rand(12, 5, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda a: matrix(a * a, kept).square() * weights, leaf)


@pytest.mark.parametrize("pool", [global_add_pool, global_mean_pool])
def test_second_derivatives_of_sums_over_graphs(pool: Callable[..., Tensor]) -> None:
    leaf = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    kept, weights = classes(), torch.rand(3, 5, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda a: pool(matrix(a * a, kept), BATCH).square() * weights, leaf)


def test_groups_may_cut_through_classes_and_change() -> None:
    kept = classes()
    batch = torch.tensor([0, 1] * 6)
    rows = torch.randn(3, 5)
    whole = rows[kept.place]
    torch.testing.assert_close(global_mean_pool(matrix(rows, kept), batch), global_mean_pool(whole, batch))
    batch.data[0] = 1  # not counted as a change by torch
    torch.testing.assert_close(global_mean_pool(matrix(rows, kept), batch), global_mean_pool(whole, batch))
    with torch.inference_mode():
        batch = batch.flip(0)
        torch.testing.assert_close(
            global_mean_pool(matrix(rows, kept), batch), global_mean_pool(whole, batch)
        )


def test_unfolded_completes_what_containers_hold() -> None:
    folded = matrix(torch.ones(3, 5))
    held = {"a": (folded, [folded, 3])}
    assert unfolded(held) is held
    assert type(folded) is Tensor
    assert folded.shape == (12, 5)


def test_several_directions_at_once() -> None:
    held = torch.randn(3, 5, requires_grad=True)
    found = []
    for whole in (Folded(held, classes()).whole(), held[classes().place]):
        directions = torch.stack([torch.ones_like(whole), whole.detach()])
        found.append(torch.autograd.grad(whole, held, directions, is_grads_batched=True)[0])
    torch.testing.assert_close(*found)
