"""plait doctor: what is installed, what plait uses, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator

from plait.errors import PlaitError
from plait.measure.environment import available_bytes, environment, version_of
from plait.report.table import Table, bytes_text

__all__ = ["add_arguments", "run"]

# package -> (what it is for, how to get it)
OPTIONAL = {
    "dgl": ("a peer in plait bench", "pip install dgl==1.1.3"),
    "scipy": ("sparse matrices as input", "pip install scipy"),
    "pymetis": ("METIS partitions", "pip install pymetis"),
    "torch_sparse": ("SparseTensor as input", "pip install torch-sparse (compiles for minutes)"),
    "triton": ("kernels on a GPU", "comes with a CUDA build of torch"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when something plait needs is missing or broken."""
    import torch  # noqa: F401  the environment reports torch's threads only once torch is loaded

    facts = environment()
    table = Table(["what", "found"], title="environment", align="ll")
    for name in ("plait", "commit", "python", "torch", "torch_geometric", "numpy", "numba"):
        table.add(name, facts[name] or "-")
    for name in ("os", "cpu", "cores", "threads", "gpu"):
        table.add(name, "-" if facts[name] is None else facts[name])
    table.add("memory", _memory(facts["memory_bytes"]))
    print(table)
    troubles = []
    used = Table(["part", "in use"], title="\nplait", align="ll")
    for part, text, is_fine in _parts():
        used.add(part, text)
        if not is_fine:
            troubles.append(f"{part}: {text}")
    print(used)
    print(_optional_table())
    print(
        "\n"
        + ("everything plait needs is installed" if not troubles else "needs care\n" + "\n".join(troubles))
    )
    return 1 if troubles else 0


def _memory(total: object) -> str:
    free = available_bytes()
    known = [bytes_text(float(str(total)))] if total else ["-"]
    return ", ".join(known + ([f"{bytes_text(free)} available"] if free else []))


def _parts() -> Iterator[tuple[str, str, bool]]:
    """(part, what was found, whether that is fine)."""
    finders = (_pool, _kernels, _kept_kernels, _profile)
    for part, find in zip(
        ("thread pool", "kernels", "kept kernels", "machine profile"), finders, strict=True
    ):
        try:
            yield part, find(), True
        except PlaitError as error:
            yield part, str(error), False
        except Exception as error:  # the doctor must finish whatever it finds
            yield part, f"fails: {type(error).__name__}: {error}", False
    yield "sparse products", "plait (numba), torch CSR" + (" (MKL)" if _has_mkl() else ""), True


def _pool() -> str:
    from plait.kernels.launch import describe_pool

    return describe_pool()


def _kernels() -> str:
    """Runs one tiny sparse product: it shows that kernels compile, load and give the right answer."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv

    import plait

    started = time.perf_counter()
    data = Data(x=torch.ones(3, 4), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]))
    layer = GCNConv(4, 2)
    with torch.no_grad():
        planned = plait.compile(layer, data, mode="inference")(data.x, data.edge_index)
        error = (planned - layer(data.x, data.edge_index)).abs().max()
    if not float(error) < 1e-4:
        raise RuntimeError(f"a three-node GCN differs from PyG by {float(error):.1e}; please report this")
    return f"work (three-node GCN equals PyG; {time.perf_counter() - started:.1f} s, compiled code is kept)"


def _kept_kernels() -> str:
    """Where compiled code is kept; an error where it is not loaded because others may write there."""
    from plait.kernels.compiled import kernel_folder
    from plait.kernels.trusted import distrust

    trouble = distrust(kernel_folder())
    if trouble is not None:
        raise PlaitError(f"compiled again by every process: {trouble}")
    return str(kernel_folder())


def _profile() -> str:
    from plait.cost.machine import profile_path
    from plait.kernels.compiled import cache_folder
    from plait.runtime.probe import machine_for

    profile = machine_for(cache_folder())
    if profile.is_default or not profile_path(cache_folder()).exists():
        return f"built-in (`plait calibrate` measures this one): {profile.name}"
    if profile.disturbance:
        return f"to calibrate again: {profile.disturbance}"
    return f"calibrated: {profile.name}"


def _has_mkl() -> bool:
    import torch

    return bool(torch._C.has_mkl)


def _optional_table() -> Table:
    table = Table(["optional", "version", "for", "how to get it"], title="\nextras", align="llll")
    for package, (purpose, command) in OPTIONAL.items():
        found = version_of(package) if importlib.util.find_spec(package) else None
        table.add(package, found or "missing", purpose, "" if found else command)
    return table
