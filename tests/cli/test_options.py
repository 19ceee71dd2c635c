"""cli/options: lists of numbers are read, folders and threads checked, and nonsense is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.cli.options import check_folder, use_threads, whole_numbers
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


def test_numbers_are_read_from_commas_and_arrows() -> None:
    assert whole_numbers("--widths", "128->64, 16", "1,2") == (128, 64, 16)
    assert whole_numbers("--fanout", "10,-1", "1,2", least=-1) == (10, -1)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1.5", "3,0", "-1"])
def test_what_is_no_list_of_numbers_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"--widths: .* is not a list of .*; write for example 128,64"):
        whole_numbers("--widths", text, "128,64")


def test_a_file_needs_its_folder(tmp_path: Path) -> None:
    check_folder("--html", tmp_path / "page.html")
    with pytest.raises(InputError, match=r"--html: folder .*absent does not exist"):
        check_folder("--html", tmp_path / "absent" / "page.html")
