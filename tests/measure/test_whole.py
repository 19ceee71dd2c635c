"""measure/whole.py: a file is there as a whole, or as it was before."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from plait.errors import InputError
from plait.measure.whole import write_whole


def test_text_and_bytes_are_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "größer", "-o")
    write_whole(tmp_path / "a", b"\x00\x01", "-o")
    assert (tmp_path / "a").read_bytes() == b"\x00\x01"
    write_whole(tmp_path / "b", "größer", "-o")
    assert (tmp_path / "b").read_text(encoding="utf-8") == "größer"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_disk_that_is_full_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")

    def half(self: Path, data: bytes) -> Any:
        with open(self, "wb") as file:
            file.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(InputError, match=r"^--html: cannot write .*page.html \(No space left on device\); "):
        write_whole(path, "afterwards", "--html")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("name", [".", "nowhere/at/all"])
def test_a_place_that_takes_no_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"^--plot: cannot write "):
        write_whole(tmp_path / name, "text", "--plot")
    assert os.listdir(tmp_path) == []


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", "after", "-o")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "through", "-o")
    reader.join(10)
    assert read == ["through"]


def test_the_root_folder_is_no_file() -> None:
    with pytest.raises(InputError, match=r"^--plot: cannot write / "):
        write_whole(Path("/"), "text", "--plot")
