"""What a captured step needs of its optimiser, and what it takes for constant; captures: tests/pyg."""

from __future__ import annotations

import pytest
import torch

from plait.errors import InputError
from plait.runtime.capture import body_of, make_capturable, settings


def test_steps_are_counted_where_the_parameters_are() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    make_capturable(optimizer)
    assert optimizer.param_groups[0]["capturable"]
    assert optimizer.state[weight]["step"].device == weight.device
    make_capturable(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    with pytest.raises(InputError, match="optimizer: Adagrad"):
        make_capturable(torch.optim.Adagrad([weight]))


def test_settings_change_with_the_rate_and_not_with_a_rate_on_the_device() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = settings(optimizer)
    assert settings(optimizer) == before
    assert settings(None) == ()
    optimizer.param_groups[0]["lr"] = 0.2
    assert settings(optimizer) != before
    rate = torch.tensor(0.1)
    optimizer.param_groups[0]["lr"] = rate
    before = settings(optimizer)
    rate.fill_(0.5)
    assert settings(optimizer) == before


def test_a_step_drops_old_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 7.0)
    body = body_of(lambda: weight.sum(), [weight], torch.optim.SGD([weight], lr=1.0))
    assert body().item() == 3.0
    assert weight.tolist() == [0.0] * 3
    with pytest.raises(InputError, match="loss: returned float"):
        body_of(lambda: 1.0, [weight], None)()
