"""kernels/trusted.py: code is loaded only where nobody else can have put it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from plait.kernels import compiled, trusted
from plait.kernels.spmm import cpu

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners here")


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "_warned", set())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    file = folder / "code"
    file.write_bytes(b"code")
    file.chmod(0o600)
    return file


def test_own_files_are_read_in_silence(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trusted.read_trusted(path) == b"code"
        path.chmod(0o644)  # others may read
        path.parent.chmod(0o755)
        assert trusted.read_trusted(path) == b"code"
    assert trusted.distrust(path.parent) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_read(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"code may be written by other users.*chmod go-w"):
        assert trusted.read_trusted(path) == b""


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_nothing_is_read_from_a_folder_that_others_may_write(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    with pytest.warns(RuntimeWarning, match="kernels may be written by other users"):
        assert trusted.read_trusted(path) == b""
    assert "chmod go-w" in str(trusted.distrust(path.parent))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert trusted.read_trusted(path) == b""


def test_files_of_another_user_are_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted.os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user.*PLAIT_CACHE"):
        assert trusted.read_trusted(path) == b""


def test_links_and_pipes_are_not_followed(path: Path) -> None:
    link, pipe = path.parent / "link", path.parent / "pipe"
    link.symlink_to(path)
    with pytest.raises(OSError, match="link"):
        trusted.read_trusted(link)
    os.mkfifo(pipe, 0o600)
    with pytest.warns(RuntimeWarning, match="neither a file nor a folder"):
        assert trusted.read_trusted(pipe) == b""


def test_a_platform_without_owners_reads_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o666)
    monkeypatch.delattr(trusted.os, "getuid")
    assert trusted.read_trusted(path) == b"code"
    assert trusted.distrust(path.parent) is None


def counted(built: list[str]) -> Any:
    def build() -> Any:
        built.append("built")
        return cpu.kernel(32, 32, "plain")

    build.__module__ = cpu.__name__
    return build


def test_kernels_are_kept_for_this_user_alone_and_compiled_in_memory_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    built: list[str] = []
    before = os.umask(0)
    try:
        assert compiled.address_of("it", counted(built))
    finally:
        os.umask(before)
    folder = compiled.kernel_folder()
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert compiled.address_of("it", counted(built))
    assert len(built) == 1
    # a file others may write is compiled again, and replaced
    file.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="compiled in memory"):
        assert compiled.address_of("it", counted(built))
    assert (len(built), file.stat().st_mode & 0o777) == (2, 0o600)
    # a folder others may write is left alone
    folder.chmod(0o777)
    written = file.stat().st_mtime_ns
    trusted._warned.clear()
    with pytest.warns(RuntimeWarning, match="compiled in memory"):
        assert compiled.address_of("it", counted(built))
    assert (len(built), file.stat().st_mtime_ns) == (3, written)


def test_the_doctor_tells_of_a_folder_that_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from plait.cli import doctor

    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "_kernels", lambda: "not run here")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    assert main(["doctor"]) == 1
    assert "may be written by other users" in capsys.readouterr().out
