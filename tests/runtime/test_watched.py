"""runtime/watched.py: constant is what comes back as it was; what keeps changing needs to more often."""

from __future__ import annotations

import torch

from plait.runtime.watched import Inputs, Numbers


def test_an_input_is_constant_at_its_second_sight_or_when_it_was_given() -> None:
    inputs, x = Inputs(), torch.rand(20, 3)
    assert inputs.look(x, is_given=False) is None
    assert inputs.look(x, is_given=False) is not None
    assert Inputs().look(x, is_given=True) is not None


def test_one_that_keeps_changing_is_not_constant() -> None:
    inputs, x = Inputs(), torch.rand(20, 3)
    constant = []
    for _ in range(30):
        constant.append(inputs.look(x, is_given=True) is not None)
        x.mul_(0.5)
    assert constant[:2] == [True, True]
    assert not any(constant[2:])
    for _ in range(5000):
        found = inputs.look(x, is_given=True)
    assert found is not None


def test_tensors_made_under_inference_mode_are_never_constant() -> None:
    with torch.inference_mode():
        inputs, x = Inputs(), torch.rand(20, 3)
        assert [inputs.look(x, is_given=True) for _ in range(3)] == [None] * 3


def test_inputs_that_are_gone_are_forgotten() -> None:
    inputs = Inputs()
    for _ in range(10):
        inputs.look(torch.rand(20, 3), is_given=False)
    assert len(inputs) == 1
    assert len(inputs.stale) == 4  # for those that came once later on nothing was kept


def test_after_many_that_came_once_an_input_is_constant_at_its_third_sight() -> None:
    inputs = Inputs()
    for _ in range(10):
        inputs.look(torch.rand(20, 3), is_given=False)
    x = torch.rand(20, 3)
    assert [inputs.look(x, is_given=False) is None for _ in range(3)] == [True, True, False]
    another = torch.rand(20, 3)  # one has come back: the next is looked at right away
    assert [inputs.look(another, is_given=False) is None for _ in range(2)] == [True, False]


def test_one_that_was_only_glimpsed_is_compared_as_it_came_back() -> None:
    inputs = Inputs()
    for _ in range(10):
        inputs.look(torch.rand(20, 3), is_given=False)
    x = torch.rand(20, 3)
    assert inputs.look(x, is_given=False) is None
    x.numpy()[:] = 1.0  # a write that nobody counts
    assert inputs.look(x, is_given=False) is None
    x.mul_(2.0)
    assert inputs.look(x, is_given=False) is None
    found = inputs.look(x, is_given=False)
    assert found is not None
    assert found.changes == 1


def test_numbers_are_steady_until_they_have_changed_twice() -> None:
    numbers = Numbers()
    assert [numbers.steady("layer", (k / 10,)) for k in (1, 1, 2, 2, 3, 3)] == [True] * 4 + [False] * 2
    assert numbers.steady("another", (0.5,))
