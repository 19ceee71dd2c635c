"""An opened folder of parts: the graph, its labels and every part's feature rows, all mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.distributed.files import MANIFEST, Manifest, mapped, read_manifest
from plait.errors import InputError, PartsError
from plait.graph import Graph

__all__ = ["Parts", "feature_file", "halo_file"]

Array = NDArray[Any]

MASKS = ("train", "val", "test")


def feature_file(part: int) -> str:
    """The name of a part's feature rows."""
    return f"part-{part}.x.npy"


def halo_file(part: int) -> str:
    """The name of a part's halo."""
    return f"part-{part}.halo.npy"


class Parts:
    """What `plait partition` wrote to `folder`; arrays are mapped at first use, nothing is read here.

    Nodes have the numbers of the parts: part p owns bounds[p] .. bounds[p + 1] - 1. `verify` compares every
    file with its checksum now, otherwise lengths, types and shapes are compared as files are opened.
    """

    def __init__(self, folder: str | os.PathLike[str], verify: bool = False) -> None:
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise PartsError(
                f"{self.folder} has no {MANIFEST}; make the parts with plait partition -o {folder}"
            )
        if not manifest.is_complete:
            raise PartsError(
                f"{self.folder}: partitioning was not finished; run plait partition again with the same "
                "arguments, it goes on where it stopped"
            )
        self.manifest: Manifest = manifest
        self.bounds = np.asarray(manifest.bounds, np.int64)
        if verify:
            for name in manifest.files:
                self._array(name, verify=True)

    def __repr__(self) -> str:
        return f"Parts({str(self.folder)!r}, {self.num_parts} parts, {self.num_nodes:,} nodes)"

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return self.manifest.parts

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.manifest.num_nodes

    def graph(self) -> Graph:
        """The whole graph, mapped: pages are read as they are sampled, processes of a machine share them."""
        return Graph(self._array("indptr.npy"), self._array("indices.npy"), self.num_nodes)

    def edges(self, begin: int, end: int) -> tuple[Array, Array]:
        """Row pointers and sources of the nodes begin .. end - 1, mapped: no other rows are read."""
        indptr = self._array("indptr.npy")[begin : end + 1]
        return indptr, self._array("indices.npy")[int(indptr[0]) : int(indptr[-1])]

    @property
    def topology_bytes(self) -> int:
        """Bytes of the whole graph's row pointers and sources."""
        return sum(self.manifest.files[name].bytes for name in ("indptr.npy", "indices.npy"))

    def nodes(self) -> Array:
        """The caller's number of every node."""
        return self._array("nodes.npy")

    def x(self, part: int) -> Array:
        """The feature rows of a part."""
        if feature_file(part) not in self.manifest.files:
            raise InputError(
                f"{self.folder} holds no features for part {part}; partition a file with x, or bring rows of "
                "your own with features="
            )
        return self._array(feature_file(part))

    @property
    def has_features(self) -> bool:
        """Whether feature rows were stored."""
        return feature_file(0) in self.manifest.files

    def y(self) -> Array | None:
        """The labels of all nodes; None when there are none."""
        return self._array("y.npy") if "y.npy" in self.manifest.files else None

    def halo(self, part: int) -> Array:
        """The nodes of other parts that have an edge into this one, ascending."""
        return self._array(halo_file(part))

    def split(self, name: str) -> Array:
        """The nodes of "train", "val" or "test", ascending."""
        file = f"{name}_mask.npy"
        if file not in self.manifest.files:
            have = [mask for mask in MASKS if f"{mask}_mask.npy" in self.manifest.files]
            raise InputError(
                f"no {name} mask in {self.folder}; it has {', '.join(have) or 'no masks at all'}"
            )
        return np.flatnonzero(self._array(file))

    def owners(self, ids: Array) -> Array:
        """The part of every node in `ids`."""
        return np.searchsorted(self.bounds, ids, side="right") - 1

    def _array(self, name: str, verify: bool = False) -> Array:
        stored = self.manifest.files.get(name)
        if stored is None or os.sep in name or name.startswith("."):
            raise PartsError(f"{self.folder / MANIFEST} does not list {name}; partition the graph again")
        return mapped(self.folder / name, stored, verify)


def shares(num_parts: int, size: int) -> Sequence[range]:
    """The parts of every rank: neighbouring ones, equally many, because losses are means over ranks."""
    if num_parts % size:
        raise InputError(
            f"{size} processes for {num_parts} parts: every process owns as many parts as the others; "
            f"partition with --parts {size * max(1, round(num_parts / size))}, or start more or fewer "
            "processes"
        )
    each = num_parts // size
    return [range(rank * each, (rank + 1) * each) for rank in range(size)]
