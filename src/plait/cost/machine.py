"""The machine as numbers: measured rates and cache sizes, who measured them and when.

A profile is data, never code: `plait calibrate` writes one under the user's cache folder; until then the
built-in default is used and every plan says so.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from plait.errors import ProfileError
from plait.measure.whole import write_whole

__all__ = [
    "FORMAT", "NUM_FEATURES", "MachineProfile", "Rates", "check_place", "default_profile", "gpu_profile",
    "gpu_profile_path", "load_profile", "profile_in_use", "profile_path",
]  # fmt: skip

FORMAT = "plait-machine-1"
_OPTIONAL = {
    "measured", "is_default", "correction", "l3_row_seconds", "memory_row_seconds", "view_seconds",
    "turned_byte_seconds", "pass_seconds", "head_share", "loss_row_seconds", "loss_number_seconds",
    "passed_byte_seconds", "returned_byte_seconds",
}  # fmt: skip
NUM_FEATURES = 3  # of a step, for its correction (cost/price.py)
# a copy in cache against one in memory; beyond the fitted range a line may lead anywhere
_MOST_CORRECTED = math.log(6.0)


@dataclass(frozen=True)
class Rates:
    """GFLOP/s of a dense product over its inner width and output width, on a grid of powers of two."""

    inner: tuple[int, ...]
    width: tuple[int, ...]
    gflops: tuple[tuple[float, ...], ...]  # [inner][width]

    def at(self, inner: int, width: int) -> float:
        """Interpolated between grid points on logarithmic axes; clamped outside."""
        i, u = _between(self.inner, max(1, inner))
        j, v = _between(self.width, max(1, width))
        g = self.gflops
        low = g[i][j] * (1 - v) + g[i][min(j + 1, len(self.width) - 1)] * v
        i2 = min(i + 1, len(self.inner) - 1)
        high = g[i2][j] * (1 - v) + g[i2][min(j + 1, len(self.width) - 1)] * v
        return low * (1 - u) + high * u


def _between(grid: tuple[int, ...], value: int) -> tuple[int, float]:
    if value <= grid[0]:
        return 0, 0.0
    if value >= grid[-1]:
        return len(grid) - 1, 0.0
    i = bisect_left(grid, value) - 1
    return i, (math.log2(value) - math.log2(grid[i])) / (math.log2(grid[i + 1]) - math.log2(grid[i]))


@dataclass(frozen=True)
class MachineProfile:
    """Rates of one machine and its number of threads: bandwidths in bytes per second, times in seconds."""

    name: str
    threads: int
    l2_bytes: int  # of one core
    l3_bytes: int  # the part gathers can use: page tables and neighbours take the rest
    stream_bytes_per_s: float  # reads plus writes of a copy larger than every cache
    gather_l2_bytes_per_s: float  # gathered rows that hit the second-level cache
    gather_l3_bytes_per_s: float
    gather_memory_bytes_per_s: float
    write_bytes_per_s: float  # output rows of a sparse product
    edge_seconds: float  # per edge and pass over the row pointers' edges
    row_seconds: float  # per output row and pass
    tile_seconds: float  # per edge and column tile beyond the first
    edge_weight_seconds: float  # more per edge: a streamed weight
    source_scale_seconds: float  # more per edge: a gathered scaling
    extremum_factor: float  # max or min against sum
    call_seconds: float  # of one kernel call from Python, threads woken
    gemm: Mapping[str, Rates]  # by backend: plait, torch
    gemm_transposed: Mapping[str, Rates]
    torch_spmm_factor: float  # torch CSR (MKL) against plait's sparse product
    measured: Mapping[str, Any] = field(default_factory=dict)  # who, when, versions
    is_default: bool = False
    # by kind of step: logarithm of seen over modelled seconds, linear in the step's features (cost/price.py)
    correction: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # per gathered row in the third-level cache or in memory: the least time, however short the row is
    l3_row_seconds: float = 0.0
    memory_row_seconds: float = 0.0
    view_seconds: float = 0.0  # of a step that moves no data; 0 means a fifth of a call
    pass_seconds: float = 0.0  # of a pass over the edges, however few: on a GPU one long row keeps it waiting
    head_share: float = 0.35  # of attention: a further head on a row that is gathered, against gathering it
    turned_byte_seconds: float = 0.0  # per byte read or written when a weight is transposed; 0: as in a copy
    # torch outside layers, on one core; measured on a Zen 4 with torch 2.13, the default elsewhere
    loss_row_seconds: float = 200e-9  # softmax and cross-entropy, both ways, of a row narrower than a vector
    loss_number_seconds: float = 2.0e-9  # ... of one number of a wider row
    passed_byte_seconds: float = 0.055e-9  # per byte an activation reads or writes: relu of 0.5 to 20 MB
    returned_byte_seconds: float = 0.1e-9  # ... its gradient

    @property
    def disturbance(self) -> str | None:
        """Why this calibration should not be trusted, if something disturbed it."""
        found = self.measured.get("disturbed")
        return str(found) if found else None

    def without_overheads(self) -> MachineProfile:
        """The same machine if calls, edges and rows cost nothing besides arithmetic and memory traffic."""
        nothing = dict.fromkeys(
            ("edge_seconds", "row_seconds", "tile_seconds", "edge_weight_seconds", "source_scale_seconds"),
            0.0,
        )
        return replace(self, **nothing, call_seconds=0.0, view_seconds=0.0, correction={})  # type: ignore[arg-type]

    def pass_factor(self, kind: str) -> float:
        """Seen over predicted seconds of a pass of attention, where this machine's were measured; else 1."""
        found = self.measured.get("attention")
        value = found.get(kind, 1.0) if isinstance(found, Mapping) else 1.0
        is_number = isinstance(value, int | float) and math.isfinite(value) and value > 0
        return float(value) if is_number else 1.0

    def correction_of(self, kind: str, features: tuple[float, ...]) -> float:
        """The factor for a modelled time; 1 for a kind of step without a correction."""
        found = self.correction.get(kind)
        if found is None:
            return 1.0
        exponent = sum(c * f for c, f in zip(found, features, strict=True))
        return math.exp(min(_MOST_CORRECTED, max(-_MOST_CORRECTED, exponent)))

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> MachineProfile:
        """The profile in `data`; ProfileError, naming `where`, if it is damaged."""
        if data.get("format") != FORMAT:
            raise ProfileError(
                f"profile {where}: format {data.get('format')!r} is not {FORMAT!r}; run `plait calibrate`"
            )
        known = {f.name for f in fields(cls)}
        missing = known - set(data) - _OPTIONAL
        if missing:
            raise ProfileError(
                f"profile {where}: {', '.join(sorted(missing))} missing; run `plait calibrate`"
            )
        values = {key: value for key, value in data.items() if key in known}
        try:
            for key in ("gemm", "gemm_transposed"):
                values[key] = {name: _rates(table) for name, table in values[key].items()}
                if not values[key]:
                    raise TypeError(f"{key} is empty")
            values["correction"] = {
                str(kind): tuple(map(float, line)) for kind, line in values.get("correction", {}).items()
            }
            if any(len(line) != NUM_FEATURES for line in values["correction"].values()):
                raise TypeError("a correction has another number of coefficients")
            _check_numbers(values, where)
        except (TypeError, ValueError, KeyError, AttributeError) as fault:
            if isinstance(fault, ProfileError):
                raise
            raise ProfileError(f"profile {where}: damaged ({fault}); run `plait calibrate`") from fault
        return cls(**values)

    def save(self, path: Path) -> None:
        """Write it as a whole or not at all; InputError where the folder does not take it."""
        write_whole(path, json.dumps(self.to_dict(), indent=1), "PLAIT_CACHE", makes_folder=True)


def check_place(path: Path) -> None:
    """InputError where no profile can be kept: said before the minute that measuring takes."""
    trial = path.with_suffix(".trial")
    write_whole(trial, "", "PLAIT_CACHE", makes_folder=True)
    trial.unlink()


def _rates(table: Mapping[str, Any]) -> Rates:
    rates = Rates(
        tuple(map(int, table["inner"])),
        tuple(map(int, table["width"])),
        tuple(tuple(map(float, row)) for row in table["gflops"]),
    )
    if len(rates.gflops) != len(rates.inner) or any(len(row) != len(rates.width) for row in rates.gflops):
        raise TypeError("a table of rates is not rectangular")
    numbers = (*rates.inner, *rates.width, *(rate for row in rates.gflops for rate in row))
    if not numbers or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise TypeError("a table of rates is empty or holds a rate that is not positive")
    return rates


def _check_numbers(values: Mapping[str, Any], where: str) -> None:
    """Check that every field is a number, and that divisors (rates, sizes, threads) are not zero."""
    for known in fields(MachineProfile):
        if known.type not in ("int", "float"):
            continue
        if known.name in _OPTIONAL and known.name not in values:
            continue
        value = values[known.name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least = 0 if known.name.endswith("_seconds") else 1e-9
        if not is_number or not math.isfinite(value) or value < least:
            raise ProfileError(f"profile {where}: {known.name} is {value!r}; run `plait calibrate`")


def profile_path(cache_folder: Path) -> Path:
    """The file of this machine's calibration."""
    return cache_folder / "machine.json"


def gpu_profile_path(cache_folder: Path, name: str) -> Path:
    """The file of a GPU's calibration, named after the driver's name for the card."""
    word = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return cache_folder / f"machine-{word}.json"


def load_profile(path: Path) -> MachineProfile:
    """The profile in a file; ProfileError where it is damaged or of another version."""
    try:
        data = json.loads(path.read_text())
    except OSError as fault:
        raise ProfileError(
            f"profile {path.name}: cannot be read ({fault.strerror}); run `plait calibrate`"
        ) from fault
    except ValueError as fault:
        raise ProfileError(f"profile {path.name}: not JSON (truncated?); run `plait calibrate`") from fault
    if not isinstance(data, dict):
        raise ProfileError(f"profile {path.name}: not a profile; run `plait calibrate`")
    return MachineProfile.from_dict(data, path.name)


def default_profile() -> MachineProfile:
    """The built-in profile."""
    text = resources.files("plait.cost").joinpath("profiles/default.json").read_text()
    return MachineProfile.from_dict(json.loads(text), "default.json")


def profile_in_use(cache_folder: Path) -> MachineProfile:
    """The calibrated profile if there is one, the default otherwise; a damaged file is an error."""
    path = profile_path(cache_folder)
    return load_profile(path) if path.exists() else default_profile()


def gpu_profile(name: str, capability: tuple[int, int]) -> MachineProfile:
    """The built-in profile of a GPU's generation; its `measured` field says where the numbers come from."""
    known = {(9, 0): "hopper", (8, 0): "ampere", (8, 9): "ada"}
    generation = known.get(capability, "hopper" if capability[0] >= 9 else "ampere")
    text = resources.files("plait.cost").joinpath("profiles", f"{generation}.json").read_text()
    return replace(MachineProfile.from_dict(json.loads(text), generation), name=name, is_default=True)
