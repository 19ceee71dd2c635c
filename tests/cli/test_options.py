"""cli/options: lists of numbers are read, folders and threads checked, and nonsense is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from plait.cli.options import check_output, refuse_ignored, use_threads, whole_numbers
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


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_output("--html", tmp_path / "page.html")
    check_output("--output", tmp_path / "new" / "folder" / "records.jsonl", makes_folder=True)
    check_output("--output", Path("/dev/null"))
    (tmp_path / "file").write_text("")
    for place, fault in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "absent" / "page.html", "absent does not exist; make it first"),
        (tmp_path / "file" / "page.html", "file is a file; name another place"),
    ):
        with pytest.raises(InputError, match=f"--html: .*{fault}"):
            check_output("--html", place)
    with pytest.raises(InputError, match="file is a file"):
        check_output("--html", tmp_path / "file" / "new" / "page.html", makes_folder=True)


def test_a_place_without_the_right_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"--html: .* cannot be written to"):
        check_output("--html", tmp_path / "page.html")


def test_options_that_would_not_be_read_are_refused() -> None:
    given = argparse.Namespace(max_depth=10, keep=3)
    refuse_ignored(given, {"max_depth": 10}, "is for --data; leave it out")
    with pytest.raises(InputError, match="--keep: needs --checkpoint"):
        refuse_ignored(given, {"max_depth": 10, "keep": 2}, "needs --checkpoint")
