"""Rounds alone: what is said of a failure. Ranks that exchange are in test_neighbor and test_frontier."""

from __future__ import annotations

import pytest

from plait.distributed.rounds import Pending, cause, naming
from plait.errors import ExchangeError


def test_a_cause_is_one_sentence() -> None:
    said = "[/some/where/pair.cc:553] Connection closed by peer [127.0.0.1]:29. This is typically caused by"
    assert cause(RuntimeError(said)) == "Connection closed by peer [127.0.0.1]:29"
    assert cause(ValueError()) == "ValueError"


def test_an_error_of_torch_names_the_rank() -> None:
    with (
        pytest.raises(ExchangeError, match=r"rank 3: all-reduce failed \(Connection reset\)"),
        naming(3, "all-reduce"),
    ):
        raise RuntimeError("[pair.cc:1] Connection reset. Try again")


def test_nothing_asked_for_is_there_at_once() -> None:
    Pending(0).arrive(0.0)
    with pytest.raises(ExchangeError, match="no answer for 2 numbers"):
        Pending(2).arrive(0.0)
