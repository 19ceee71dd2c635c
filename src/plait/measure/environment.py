"""Says where a number was taken: versions, processor, threads, memory; never a host name or a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

__all__ = ["BusyElsewhere", "available_bytes", "environment", "version_of"]

_PACKAGES = ("torch", "torch_geometric", "numpy", "numba", "dgl")


def environment() -> dict[str, object]:
    """What a reader needs to judge a measurement, as plain values ready for JSON.

    Threads are torch's, and only when torch is already loaded: asking for them is no reason to load it.
    """
    return {
        "plait": version_of("plait"),
        "commit": _commit(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in _PACKAGES},
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "threads": _torch_threads(),
        "gpu": _gpu(),
        "memory_bytes": _memory("MemTotal"),
    }


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it; None when it is not there."""
    for name in (package, package.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def available_bytes() -> int | None:
    """Memory that can be taken now without swapping; None where the system does not say."""
    return _memory("MemAvailable")


class BusyElsewhere:
    """Watches how much of the processor others use while we measure: `with BusyElsewhere() as busy: ...`.

    `busy.share` is the part of all cores' time taken by other processes (the host's own included), 0 to 1,
    None where the system does not say. Above a tenth or so, thread pools wait for each other and medians
    of short calls mean little.
    """

    share: float | None = None

    def __enter__(self) -> BusyElsewhere:
        self._before = _processor_seconds()
        return self

    def __exit__(self, *exception: object) -> None:
        after = _processor_seconds()
        if self._before is None or after is None:
            return
        busy, own, total = (now - then for now, then in zip(after, self._before, strict=True))
        self.share = min(1.0, max(0.0, busy - own) / total) if total > 0.0 else None


def _processor_seconds() -> tuple[float, float, float] | None:
    """(busy, of it ours, busy and idle) seconds of all cores since they started."""
    table = Path("/proc/stat")
    if not table.exists():
        return None
    ticks = [int(word) for word in table.read_text().splitlines()[0].split()[1:9]]
    second = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    times = os.times()
    return (sum(ticks) - idle) / second, times.user + times.system, sum(ticks) / second


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _usable_cores() -> int | None:
    # a container often sees more cores than it may use
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _torch_threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _gpu() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def _memory(field: str) -> int | None:
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    if field == "MemTotal" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _commit() -> str | None:
    """The checked-out commit when plait runs from its own repository, marked when files were changed."""
    here = Path(__file__).resolve().parent
    root = here.parents[2]
    if not (root / ".git").exists() or not (root / "src" / "plait").is_dir():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
