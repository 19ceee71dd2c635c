"""The built-in profile scaled to a machine it was not measured on, by a probe of 0.3 seconds.

A probe measures how fast this machine copies, gathers, multiplies and calls relative to the machine of the
profile, and each kind of rate is scaled by its own ratio. Products are timed on both backends and at several
widths, because processors differ in how much of a vector they compute at once: a Zen 5 multiplies rows of 64
columns 2.2 times as fast as a Zen 4, rows of 8 columns 1.4 times, with MKL's kernels 1.05 times. What torch
does outside layers is measured outright. It is coarse (`plait calibrate` measures layers, kernels and
caches), done once, and kept next to the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from plait.cost.family import processor
from plait.cost.machine import MachineProfile, Rates, default_profile, load_profile, profile_path
from plait.errors import InputError, ProfileError
from plait.kernels import gemm as dense

__all__ = ["OUTSIDE", "machine_for", "outside", "probe", "scaled"]

_ROWS, _WIDTH, _INNER = 1 << 18, 32, 256
_DENSE_ROWS, _DENSE_INNER = 2048, 64  # of plait's own products: their rows stay in the second-level cache
_DENSE_WIDTHS = (8, 16, 32, 64)
_LOSS_ROWS, _NARROW, _WIDE = 2048, 8, 64
# Every call takes its turn in each of some rounds: neighbours of a virtual machine come and go within tenths
# of a second, and one that slowed all turns of one call and of no other would change their ratio.
_ROUNDS, _TURN_SECONDS = 4, 0.003
_LEAST, _MOST = 0.05, 50.0  # a ratio outside is an error of the probe, not a real machine
_RATIOS = ("copy", "gather", "product", "call", *(f"dense {width}" for width in _DENSE_WIDTHS))
OUTSIDE = ("loss_row_seconds", "loss_number_seconds", "passed_byte_seconds", "returned_byte_seconds")
"""Fields of a profile that say how long torch takes outside layers."""
_zeros = functools.partial(torch.zeros, dtype=torch.float32)


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
    if kept is not None and kept.measured.get("cpu") == name and _is_complete(kept):
        return kept
    made = scaled(built_in, probe(), name, family)
    # where the folder cannot be written to, the next process probes again
    with contextlib.suppress(InputError):
        made.save(path)
    return made


def _is_complete(kept: MachineProfile) -> bool:
    """Whether a profile was scaled by all of today's ratios."""
    found = kept.measured.get("ratios")
    return isinstance(found, Mapping) and set(_RATIOS) <= set(found)


def _apart(measure: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """In a thread of its own: no mode of the caller (no_grad, autocast, a default device) reaches it."""

    @functools.wraps(measure)
    def measured() -> dict[str, Any]:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(measure).result()

    return measured


@_apart
def probe() -> dict[str, float]:
    """Bytes per second copied and gathered, flops per second, calls per second, all of one thread.

    "product" is torch's, "dense WIDTH" plait's own; and the seconds that torch takes outside layers. Kernels
    that are not on disk yet are compiled first, which takes seconds once: they are those that models run.
    """
    a = _zeros(_ROWS, _WIDTH)
    b = torch.empty_like(a)
    order = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(0))
    weight = _zeros(_INNER, _INNER)
    left, out = _zeros(512, _INNER), _zeros(512, _INNER)
    small = _zeros(4)
    size = a.numel() * a.element_size()
    with _one_thread():
        seconds = _fastest({
            "copy": lambda: b.copy_(a),
            "gather": lambda: torch.index_select(a, 0, order, out=b),
            "product": lambda: torch.mm(left, weight, out=out),
            "call": lambda: small.add_(1.0),
            **{f"dense {width}": _product(width) for width in _DENSE_WIDTHS},
        })  # fmt: skip
    flops = {f"dense {width}": 2.0 * _DENSE_ROWS * _DENSE_INNER * width for width in _DENSE_WIDTHS}
    work = {"copy": 2.0 * size, "gather": size, "product": 2.0 * 512 * _INNER**2, "call": 1.0, **flops}
    return {name: amount / seconds[name] for name, amount in work.items()} | outside()


def _product(width: int) -> Callable[[], object]:
    """A product of rows in cache on plait's own kernel."""
    left, weight = _zeros(_DENSE_ROWS, _DENSE_INNER), _zeros(_DENSE_INNER, width)
    out = _zeros(_DENSE_ROWS, width)
    return lambda: dense.gemm(left, weight, out)


@_apart
def outside() -> dict[str, Any]:
    """The fields `OUTSIDE` of this machine's profile: torch's seconds on one core outside layers."""
    given = _zeros(_ROWS // 2, _WIDTH)  # 16 MB: from memory, and below what glibc maps afresh
    made, size = torch.empty_like(given), given.numel() * given.element_size()
    labels = torch.zeros(_LOSS_ROWS, dtype=torch.int64)
    losses = {width: _zeros(_LOSS_ROWS, width, requires_grad=True) for width in (_NARROW, _WIDE)}

    def loss(width: int) -> object:
        return torch.autograd.grad(functional.cross_entropy(losses[width], labels), losses[width])

    def returned() -> object:
        with torch.no_grad():
            return torch.ops.aten.threshold_backward(made, given, 0)

    with _one_thread():
        seconds = _fastest({
            "loss_row_seconds": lambda: loss(_NARROW),
            "loss_number_seconds": lambda: loss(_WIDE),
            "passed_byte_seconds": lambda: torch.clamp_min(given, 0.0, out=made),
            "returned_byte_seconds": returned,
        })  # fmt: skip
    work = (_LOSS_ROWS, _LOSS_ROWS * _WIDE, 2 * size, 3 * size)
    return {name: seconds[name] / amount for name, amount in zip(OUTSIDE, work, strict=True)}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fastest(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Processor seconds of each call's fastest run: of one thread, so waiting for others does not count."""
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            ends = time.thread_time() + _TURN_SECONDS
            is_first = True
            while is_first or time.thread_time() < ends:
                started, is_first = time.thread_time(), False
                call()
                best[name] = min(best[name], time.thread_time() - started)
    return best


def scaled(profile: MachineProfile, found: Mapping[str, float], cpu: str, family: str) -> MachineProfile:
    """The profile with every rate multiplied by how much faster than its own machine this one is."""
    own = {**profile.measured["probe"], **_own_products(profile)}
    ratio = {k: min(_MOST, max(_LEAST, found[k] / own[k])) for k in _RATIOS}
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
        **{name: found.get(name, getattr(profile, name)) for name in OUTSIDE},
        gemm={name: _faster(name, table, ratio, False) for name, table in profile.gemm.items()},
        gemm_transposed={
            name: _faster(name, table, ratio, True) for name, table in profile.gemm_transposed.items()
        },
        name=f"{cpu} ({family}), scaled from {profile.name}",
        measured={**profile.measured, "by": "a probe", "cpu": cpu, "scaled_to": family, "ratios": ratio},
    )


def _own_products(profile: MachineProfile) -> dict[str, float]:
    """What the probe's own products would find on the profile's machine, by the profile: of one thread."""
    table = profile.gemm["plait"]
    return {
        f"dense {width}": table.at(_DENSE_INNER, width) * 1e9 / profile.threads for width in _DENSE_WIDTHS
    }


def _faster(name: str, table: Rates, ratio: Mapping[str, float], is_transposed: bool) -> Rates:
    """The table with torch's rates times the ratio of its products, plait's times those of their widths.

    A weight's gradient goes by its narrower side: of 64 by 8 a Zen 5 is no faster than a Zen 4.
    """

    def times(inner: int, width: int) -> float:
        if name != "plait":
            return ratio["product"]
        columns = min(inner, width) if is_transposed else width
        known = max((w for w in _DENSE_WIDTHS if w <= columns), default=_DENSE_WIDTHS[0])
        return ratio[f"dense {known}"]

    pairs = zip(table.inner, table.gflops, strict=True)
    return replace(
        table,
        gflops=tuple(
            tuple(rate * times(inner, width) for width, rate in zip(table.width, row, strict=True))
            for inner, row in pairs
        ),
    )
