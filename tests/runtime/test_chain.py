"""runtime/chain.py: values that are transposed when somebody asks for them the other way round."""

from __future__ import annotations

import pytest
import torch

from plait.runtime.chain import Env, turned


def test_a_value_is_found_either_way_round() -> None:
    w = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(Env({"W": w})["Wᵀ"], w.t())
    assert torch.equal(Env({"Wᵀ": w})["W"], w.t())


def test_turning_twice_is_the_name_itself() -> None:
    assert turned("W") == "Wᵀ"
    assert turned(turned("W")) == "W"


def test_a_value_is_turned_once() -> None:
    env = Env({"W": torch.ones(2, 3)})
    assert env["Wᵀ"] is env["Wᵀ"]


@pytest.mark.parametrize("name", ["", "V", "Vᵀ"])
def test_what_is_there_neither_way_is_missing(name: str) -> None:
    with pytest.raises(KeyError):
        Env({"W": torch.ones(1, 1)})[name]
