"""The machine profile that plans are priced with: this machine's, a device's, or one lent for a while."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plait.cost.machine import MachineProfile, gpu_profile, gpu_profile_path, load_profile
from plait.kernels.compiled import cache_folder
from plait.runtime.probe import machine_for

__all__ = ["forget_machine", "is_lent", "machine_in_use", "using_machine"]

_borrowed: list[MachineProfile] = []


def machine_in_use(place: torch.device | None = None) -> MachineProfile:
    """The profile plans are priced with, on a device or on the CPU."""
    if _borrowed:
        return _borrowed[-1]
    return _own_machine() if place is None or place.type == "cpu" else _gpu(place.index or 0)


def is_lent() -> bool:
    """Whether plans are priced with a profile lent for a while, so perhaps of another machine."""
    return bool(_borrowed)


@functools.cache
def _gpu(index: int) -> MachineProfile:
    properties = torch.cuda.get_device_properties(index)
    path = gpu_profile_path(cache_folder(), properties.name)
    if path.exists():
        return load_profile(path)
    return gpu_profile(properties.name, (properties.major, properties.minor))


@functools.cache
def _own_machine() -> MachineProfile:
    return machine_for(cache_folder())


@contextmanager
def using_machine(machine: MachineProfile) -> Iterator[None]:
    """Plans made inside are priced with this profile."""
    _borrowed.append(machine)
    try:
        yield
    finally:
        _borrowed.pop()


def forget_machine() -> None:
    """Read the machine profile again at the next plan (after a calibration)."""
    _own_machine.cache_clear()
    _gpu.cache_clear()
