"""cost/machine.py: profiles are whole or refused, and say where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.cost.machine import (
    MachineProfile,
    Rates,
    check_place,
    default_profile,
    load_profile,
    profile_in_use,
    profile_path,
)
from plait.errors import InputError, PlaitError, ProfileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = profile_path(tmp_path)
    replace(default_profile(), name="bench box", is_default=False, measured={"by": "a test"}).save(found)
    return found


def changed(path: Path, **fields: Any) -> Path:
    data = json.loads(path.read_text())
    data.update(fields)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not Ellipsis}))
    return path


def test_a_saved_profile_is_read_back_equal(path: Path) -> None:
    expected = replace(default_profile(), name="bench box", is_default=False, measured={"by": "a test"})
    assert load_profile(path) == expected
    assert profile_in_use(path.parent) == expected


def test_saving_leaves_nothing_beside_the_profile(path: Path) -> None:
    default_profile().save(path)
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]


def test_without_a_profile_the_default_is_used_and_says_so(tmp_path: Path) -> None:
    assert profile_in_use(tmp_path).is_default
    assert profile_in_use(tmp_path / "absent") == default_profile()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(ProfileError, match=r"machine\.json.*plait calibrate"):
        profile_in_use(path.parent)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00bytes", b"[1, 2]", b"null", b"{}"])
def test_a_file_that_is_no_profile_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ProfileError, match="plait calibrate"):
        load_profile(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "plait-machine-0"},
        {"format": ...},
        {"stream_bytes_per_s": ...},
        {"stream_bytes_per_s": -1.0},
        {"stream_bytes_per_s": float("nan")},
        {"stream_bytes_per_s": 0.0},
        {"stream_bytes_per_s": "fast"},
        {"threads": 0},
        {"edge_seconds": None},
        {"gemm": {}},
        {"gemm": 3},
        {"gemm": {"plait": {"inner": [1], "width": [1], "gflops": [[1.0, 2.0]]}}},
        {"gemm": {"plait": {"inner": [], "width": [], "gflops": []}}},
        {"gemm": {"plait": {"inner": [1], "width": [1], "gflops": [["x"]]}}},
        {"gemm_transposed": {"plait": {"inner": [1], "width": [1]}}},
    ],
    ids=str,
)
def test_a_profile_of_another_version_or_with_odd_fields_is_refused(
    path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(ProfileError, match=r"machine\.json.*plait calibrate"):
        load_profile(changed(path, **fields))


def test_a_missing_file_is_a_plait_error(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match="cannot be read"):
        load_profile(tmp_path / "none.json")


def test_an_unknown_field_is_ignored(path: Path) -> None:
    assert isinstance(load_profile(changed(path, note="from a later version")), MachineProfile)


RATES = Rates((4, 16, 64), (8, 32), ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)))


def test_rates_are_exact_on_the_grid() -> None:
    for i, inner in enumerate(RATES.inner):
        for j, width in enumerate(RATES.width):
            assert RATES.at(inner, width) == pytest.approx(RATES.gflops[i][j])


def test_rates_are_interpolated_on_logarithmic_axes() -> None:
    assert RATES.at(8, 8) == pytest.approx(2.0)
    assert RATES.at(16, 16) == pytest.approx(3.5)
    assert RATES.at(8, 16) == pytest.approx(2.5)


def test_rates_are_clamped_outside_the_grid() -> None:
    assert RATES.at(1, 1) == RATES.at(0, 0) == 1.0
    assert RATES.at(10**6, 10**6) == 6.0


def test_a_folder_that_takes_no_profile_is_named(path: Path) -> None:
    check_place(path)
    assert [kept.name for kept in path.parent.iterdir()] == [path.name]
    for refused in (check_place, default_profile().save):
        with pytest.raises(InputError, match=r"PLAIT_CACHE: cannot write .*; name another place"):
            refused(path / "profile.json")
