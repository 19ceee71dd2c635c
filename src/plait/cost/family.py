"""The family of this processor, which decides whether the built-in profile applies to this machine."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path

__all__ = ["family_of", "processor"]

# AMD's processors of family 25 that are Zen 4; the other models of that family are Zen 3
_ZEN_4 = (range(0x10, 0x20), range(0x60, 0x80), range(0xA0, 0xB0))


@functools.cache
def processor() -> tuple[str, str]:
    """(name, family) of the processor this runs on."""
    facts = _cpuinfo()
    name = facts.get("model name") or platform.processor() or platform.machine() or "unknown processor"
    return name, family_of(facts, platform.machine())


def family_of(facts: Mapping[str, str], machine: str) -> str:
    """The family by what /proc/cpuinfo says: "AMD Zen 4", "Intel with AMX", ..., or "unknown"."""
    flags = set(facts.get("flags", "").split())
    vendor = facts.get("vendor_id", "")
    if vendor == "AuthenticAMD":
        return _amd(_number(facts, "cpu family"), _number(facts, "model"))
    if vendor == "GenuineIntel":
        if "amx_tile" in flags:
            return "Intel with AMX"
        return "Intel with AVX-512" if "avx512f" in flags else "Intel without AVX-512"
    if machine.lower() in ("aarch64", "arm64"):
        return "Arm"
    return "unknown"


def _amd(family: int, model: int) -> str:
    if family == 25:
        return "AMD Zen 4" if any(model in models for models in _ZEN_4) else "AMD Zen 3"
    return {23: "AMD Zen 2 or older", 26: "AMD Zen 5"}.get(family, "AMD")


def _number(facts: Mapping[str, str], key: str) -> int:
    text = facts.get(key, "")
    return int(text) if text.isdigit() else -1


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    lines = text.partition("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
