"""Mini-batches of whole clusters (Cluster-GCN): PyG's ClusterData and ClusterLoader on pymetis."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import ClusterData as PyGClusterData
from torch_geometric.loader import ClusterLoader as PyGClusterLoader
from torch_geometric.utils import narrow

from plait.errors import InputError
from plait.graph import Graph
from plait.graph.compiled import compiled
from plait.graph.io import replacing
from plait.graph.partition import metis
from plait.loader.adapter import picked_seed
from plait.loader.assemble import take_rows
from plait.loader.epochs import Epochs, Job, shuffled

__all__ = ["ClusterData", "ClusterLoader"]


class ClusterData(PyGClusterData):  # type: ignore[misc]  # torch_geometric ships no types
    """PyG's ClusterData: nodes and edges put in the order of `num_parts` METIS clusters.

    With `save_dir` the cluster of every node is kept there as a plain .npy file, and read instead of computed
    when it fits the graph.
    """

    def __init__(
        self,
        data: Any,
        num_parts: int,
        recursive: bool = False,
        save_dir: str | None = None,
        filename: str | None = None,
        log: bool = True,
        keep_inter_cluster_edges: bool = False,
        sparse_format: str = "csr",
    ) -> None:
        if not isinstance(data, Data) or not isinstance(data.edge_index, Tensor):
            raise InputError(
                f"data: {type(data).__name__} has no edge_index tensor; pass a Data that has one"
            )
        if sparse_format not in ("csr", "csc"):
            raise InputError(f"sparse_format={sparse_format!r} is unknown; choose csr or csc")
        self._saved: Path | None = None
        if save_dir is not None:
            folder = f"part_{num_parts}" + ("_recursive" if recursive else "")
            self._saved = Path(save_dir) / folder / (filename or "metis.npy")
        super().__init__(
            data,
            num_parts,
            recursive,
            log=log,
            keep_inter_cluster_edges=keep_inter_cluster_edges,
            sparse_format=sparse_format,
        )

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        """The cluster of every node, from the file where there is one."""
        if self._saved is not None and self._saved.exists():
            return torch.from_numpy(_read(self._saved, num_nodes, self.num_parts)).to(edge_index.device)
        part = metis(Graph.from_any(edge_index, num_nodes), self.num_parts, recursive=self.recursive)
        if self._saved is not None:
            _write(self._saved, part)
        return torch.from_numpy(part).to(edge_index.device)


class ClusterLoader(Epochs, PyGClusterLoader):  # type: ignore[misc]  # torch_geometric ships no types
    """PyG's ClusterLoader: the clusters of a batch as one graph, with the edges between them.

    `prefetch`, `budget_bytes`, `seed` and `device` are those of NeighborLoader.
    """

    def __init__(
        self,
        cluster_data: Any,
        *,
        prefetch: int = 0,
        budget_bytes: int | None = None,
        seed: int | None = None,
        device: Any = None,
        **kwargs: Any,
    ) -> None:
        seed = picked_seed(seed)
        self._set_out(seed, prefetch, budget_bytes, device=device)
        self.filter_per_worker = True
        super().__init__(cluster_data, **shuffled(len(cluster_data), seed, kwargs))
        self._check_workers()
        starts = cluster_data.partition.partptr.numpy()
        self._cluster_of = np.repeat(np.arange(starts.size - 1, dtype=np.int32), np.diff(starts))

    def draw(self, job: Job) -> Any:
        """The clusters of a job."""
        return torch.as_tensor(job.index).view(-1)

    def fill(self, drawn: Any) -> Any:
        """The graph of these clusters, in their order."""
        return self._collate(drawn)

    def _collate(self, batch: Any) -> Data:
        chosen = torch.as_tensor(batch).numpy()
        whole, split = self.cluster_data.data, self.cluster_data.partition
        starts = split.partptr.numpy()
        begins, ends = starts[chosen], starts[chosen + 1]
        near, far, edges = self._edges(chosen, begins, ends)
        out = copy.copy(whole)
        for key, value in whole.items():
            if key == "num_nodes":
                out.num_nodes = int((ends - begins).sum())
            elif whole.is_node_attr(key):
                dim = whole.__cat_dim__(key, value)
                parts = [narrow(value, dim, int(a), int(b - a)) for a, b in zip(begins, ends, strict=True)]
                out[key] = torch.cat(parts, dim)
            elif whole.is_edge_attr(key):
                out[key] = take_rows(value, edges, whole.__cat_dim__(key, value))
        is_by_row = split.sparse_format == "csr"
        out.edge_index = torch.stack((near, far) if is_by_row else (far, near))
        return out

    def _edges(self, chosen: Any, begins: Any, ends: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The edges that stay inside the chosen clusters: both ends in the batch's numbers, and which."""
        split = self.cluster_data.partition
        indptr, index = split.indptr.numpy(), split.index.numpy()
        shift = np.full(len(self.cluster_data), _ABSENT, np.int64)
        shift[chosen] = np.cumsum(ends - begins) - ends
        room = int((indptr[ends] - indptr[begins]).sum())
        near, far, edges = (np.empty(room, np.int64) for _ in range(3))
        where = (indptr, index, self._cluster_of, shift, begins, ends)
        count = int(_edges_inside(*where, near, far, edges))
        return tuple(torch.from_numpy(a[:count]) for a in (near, far, edges))  # type: ignore[return-value]


_ABSENT = np.iinfo(np.int64).min


@compiled
def _edges_inside(
    indptr: Any, index: Any, cluster_of: Any, shift: Any, begins: Any, ends: Any, near: Any, far: Any,
    edges: Any,
) -> int:  # fmt: skip
    """The number of edges between nodes of begins[i]..ends[i]; shift[c] moves cluster c to its place."""
    count = 0
    place = 0
    for i in range(begins.size):
        for v in range(begins[i], ends[i]):
            for e in range(indptr[v], indptr[v + 1]):
                moved = shift[cluster_of[index[e]]]
                if moved != _ABSENT:
                    near[count] = place
                    far[count] = index[e] + moved
                    edges[count] = e
                    count += 1
            place += 1
    return count


def _read(path: Path, num_nodes: int, parts: int) -> Any:
    try:
        part = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"save_dir: {path} is not a readable .npy file ({error}); delete it to partition again"
        ) from error
    is_fit = part.shape == (num_nodes,) and part.dtype.kind in "iu"
    if not is_fit or (part.size and not 0 <= part.min() <= part.max() < parts):
        raise InputError(
            f"save_dir: {path} has shape {part.shape} and type {part.dtype}; it is not a partition of "
            f"{num_nodes} nodes into {parts}, delete it to partition again"
        )
    return part.astype(np.int64)


def _write(path: Path, part: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.save(file, part)
    except OSError as error:
        raise InputError(f"save_dir: cannot write {path} ({error})") from error
