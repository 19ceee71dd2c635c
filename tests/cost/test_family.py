"""cost/family.py: processors by what /proc/cpuinfo says of them."""

from __future__ import annotations

import pytest

from plait.cost.family import family_of, processor


@pytest.mark.parametrize(
    ("facts", "machine", "family"),
    [
        ({"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17"}, "x86_64", "AMD Zen 4"),
        ({"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "1"}, "x86_64", "AMD Zen 3"),
        ({"vendor_id": "AuthenticAMD", "cpu family": "23", "model": "49"}, "x86_64", "AMD Zen 2 or older"),
        ({"vendor_id": "AuthenticAMD", "cpu family": "26", "model": "2"}, "x86_64", "AMD Zen 5"),
        ({"vendor_id": "GenuineIntel", "flags": "avx2 avx512f amx_tile"}, "x86_64", "Intel with AMX"),
        ({"vendor_id": "GenuineIntel", "flags": "avx2 avx512f"}, "x86_64", "Intel with AVX-512"),
        ({"vendor_id": "GenuineIntel", "flags": "avx2"}, "x86_64", "Intel without AVX-512"),
        ({}, "aarch64", "Arm"),
        ({}, "arm64", "Arm"),
        ({}, "riscv64", "unknown"),
        ({"vendor_id": "AuthenticAMD", "cpu family": "?"}, "x86_64", "AMD"),
    ],
)
def test_families(facts: dict[str, str], machine: str, family: str) -> None:
    assert family_of(facts, machine) == family


def test_this_processor_has_a_name() -> None:
    name, family = processor()
    assert name
    assert family
