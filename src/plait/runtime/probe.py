"""The built-in profile scaled to a machine it was not measured on, by a probe of under a second.

A probe measures how fast this machine copies, gathers, multiplies and calls relative to the machine of the
profile, and each kind of rate is scaled by its own ratio. It is coarse (`plait calibrate` measures layers,
kernels and caches), done once, and kept next to the kernels.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from plait.cost.family import processor
from plait.cost.machine import MachineProfile, Rates, default_profile, load_profile, profile_path
from plait.errors import ProfileError

__all__ = ["machine_for", "probe", "scaled"]

_ROWS, _WIDTH, _INNER = 1 << 18, 32, 256
_SECONDS = 0.15  # of each of the four
_LEAST, _MOST = 0.05, 50.0  # a ratio outside is an error of the probe, not a real machine


def machine_for(cache_folder: Path) -> MachineProfile:
    """The calibrated profile, or the built-in one, scaled where it was measured on another kind of machine.

    PLAIT_PROBE=0 uses the built-in profile unscaled.
    """
    if profile_path(cache_folder).exists():
        return load_profile(profile_path(cache_folder))
    built_in, (name, family) = default_profile(), processor()
    if family == built_in.measured.get("family") or os.environ.get("PLAIT_PROBE") == "0":
        return built_in
    path = cache_folder / "scaled.json"
    try:
        kept = load_profile(path)
    except ProfileError:
        kept = None
    if kept is not None and kept.measured.get("cpu") == name:
        return kept
    made = scaled(built_in, probe(), name, family)
    with contextlib.suppress(OSError):  # where the folder cannot be written to, the next process probes again
        made.save(path)
    return made


def probe() -> dict[str, float]:
    """Bytes per second copied and gathered, flops per second, calls per second, all of one thread."""
    a = torch.zeros(_ROWS, _WIDTH)
    b = torch.empty_like(a)
    order = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(_INNER, _INNER)
    left, out = torch.zeros(512, _INNER), torch.empty(512, _INNER)
    small = torch.zeros(4)
    size, threads = a.numel() * a.element_size(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return {
                "copy": 2 * size / _best(lambda: b.copy_(a)),
                "gather": size / _best(lambda: torch.index_select(a, 0, order, out=b)),
                "product": 2 * 512 * _INNER * _INNER / _best(lambda: torch.mm(left, weight, out=out)),
                "call": 1.0 / _best(lambda: small.add_(1.0)),
            }
    finally:
        torch.set_num_threads(threads)


def _best(call: Callable[[], object]) -> float:
    """Processor seconds of the fastest call: of one thread, so that waiting for others is not counted."""
    call()
    best, ends = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < ends:
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
    return best


def scaled(profile: MachineProfile, found: dict[str, float], cpu: str, family: str) -> MachineProfile:
    """The profile with every rate multiplied by how much faster than its own machine this one is."""
    own = profile.measured["probe"]
    ratio = {k: min(_MOST, max(_LEAST, found[k] / own[k])) for k in ("copy", "gather", "product", "call")}
    seconds = {
        name: getattr(profile, name) / ratio["gather"]
        for name in (
            "edge_seconds", "row_seconds", "tile_seconds", "edge_weight_seconds", "source_scale_seconds",
            "l3_row_seconds", "memory_row_seconds",
        )
    }  # fmt: skip
    rates = {
        "stream_bytes_per_s": profile.stream_bytes_per_s * ratio["copy"],
        "write_bytes_per_s": profile.write_bytes_per_s * ratio["copy"],
        "gather_l2_bytes_per_s": profile.gather_l2_bytes_per_s * ratio["product"],
        "gather_l3_bytes_per_s": profile.gather_l3_bytes_per_s * ratio["gather"],
        "gather_memory_bytes_per_s": profile.gather_memory_bytes_per_s * ratio["gather"],
        "call_seconds": profile.call_seconds / ratio["call"],
        "view_seconds": profile.view_seconds / ratio["call"],
        "turned_byte_seconds": profile.turned_byte_seconds / ratio["copy"],
    }
    return replace(
        profile,
        **seconds,
        **rates,
        gemm={name: _faster(table, ratio["product"]) for name, table in profile.gemm.items()},
        gemm_transposed={
            name: _faster(table, ratio["product"]) for name, table in profile.gemm_transposed.items()
        },
        name=f"{cpu} ({family}), scaled from {profile.name}",
        measured={**profile.measured, "by": "a probe", "cpu": cpu, "scaled_to": family, "ratios": ratio},
    )


def _faster(table: Rates, ratio: float) -> Rates:
    return replace(table, gflops=tuple(tuple(rate * ratio for rate in row) for row in table.gflops))
