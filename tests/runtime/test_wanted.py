"""runtime/wanted: which rows are enough, and what a function of them remembers for the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import InputError
from plait.runtime.wanted import WantedRows
from tests.runtime.matrices import ROWS, gradients, pair

W = nn.Parameter(torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5))

BY_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "linear": lambda h: functional.linear(h, W, torch.ones(3).double()),
    "log_softmax": lambda h: h.log_softmax(-1),
    "layer_norm": lambda h: functional.layer_norm(h, (5,)),
    "a row": lambda h: (2 * h - torch.arange(5.0)) / 3,
    "itself": lambda h: h * h.sigmoid(),
    "beside itself": lambda h: torch.cat([h, h.tanh()], dim=1),
    "in place": lambda h: functional.elu(h.sub_(0.5), inplace=True),
    "no dropout": lambda h: functional.dropout(h, training=False),
    "another type": lambda h: h.float().double(),
}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", BY_ROWS)
def test_functions_of_rows_compute_the_rows_and_then_the_others(name: str, is_whole: bool) -> None:
    both = pair("rows")
    out, expected = BY_ROWS[name](both.deferred), BY_ROWS[name](both.plain)
    rows = out[ROWS.mask]
    assert both.heard == []
    torch.testing.assert_close(rows, expected[ROWS.mask])
    ours, theirs = (out, expected) if is_whole else (rows, expected[ROWS.mask])
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(gradients(ours, both.leaves), gradients(theirs, both.plain_leaves), strict=True):
        torch.testing.assert_close(mine, other)


def test_weights_are_remembered_as_they_were() -> None:
    both = pair("rows")
    weight = W.detach().clone().requires_grad_()
    out, expected = functional.linear(both.deferred, weight), functional.linear(both.plain, weight)
    expected = expected.detach().clone()
    with torch.no_grad():
        weight.zero_()
        both.leaves[1].zero_()
    torch.testing.assert_close(out, expected, check_dtype=True)


def test_what_was_written_to_a_matrix_after_its_use_is_not_in_the_result() -> None:
    for write in (lambda h: h.zero_(), lambda h: h.data.zero_(), lambda h: h.detach().numpy().fill(0)):
        both = pair("rows")
        out = both.deferred.tanh()
        with torch.no_grad():
            write(both.deferred)
        torch.testing.assert_close(out, both.plain.tanh())


def test_large_inputs_changed_since_are_an_error() -> None:
    both = pair("rows", with_grad=False)
    both.leaves[0].add_(1)
    with pytest.raises(InputError, match="changed in place"):
        both.deferred.sum()


def test_index_of_all_rows() -> None:
    rows = WantedRows(torch.tensor([1, 3]), 5)
    assert rows.is_all_of(torch.tensor([False, True, False, True, False]))
    assert rows.is_all_of(torch.tensor([1, 3]))
    assert not rows.is_all_of(torch.tensor([3, 1]))
    assert not rows.is_all_of(torch.tensor([1, 3, 3]))
