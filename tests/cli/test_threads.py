"""cli/threads: the number is set, and nonsense is refused."""

from __future__ import annotations

import pytest
import torch

from plait.cli.threads import use_threads
from plait.errors import InputError


def test_threads_are_set_and_none_leaves_them() -> None:
    before = torch.get_num_threads()
    try:
        use_threads(1)
        assert torch.get_num_threads() == 1
        use_threads(None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_no_threads_are_refused() -> None:
    with pytest.raises(InputError, match="--num-threads: 0"):
        use_threads(0)


def test_more_threads_than_a_system_gives_are_refused() -> None:
    with pytest.raises(InputError, match="--num-threads: 100000 is more than"):
        use_threads(100_000)
