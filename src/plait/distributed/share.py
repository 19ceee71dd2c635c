"""One rank's share of a full graph: its nodes contiguous, those without remote neighbours first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from plait.distributed.parts import MASKS, Parts, shares
from plait.distributed.session import opened
from plait.errors import InputError
from plait.graph import Graph
from plait.graph.division import Portion, edges_into
from plait.graph.partition import assign

__all__ = ["Whole", "assigned", "data_of", "whole_of"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Whole:
    """The source of the whole graph: the caller's `data`, or a folder of `parts`.

    Nothing is copied here, and a rank reads only what it needs from a folder.
    """

    num_nodes: int
    part: Array | None = None  # of every node, where it is known
    data: Data | None = None
    parts: Parts | None = None

    def edges(self) -> tuple[Array, Array]:
        """Sources and targets of all edges, in the caller's order."""
        if self.data is not None:
            source, target = self.data.edge_index.cpu().numpy()
            return source, target
        assert self.parts is not None
        graph = self.parts.graph()
        return np.asarray(graph.indices, np.int64), np.repeat(np.arange(graph.num_nodes), graph.degrees)

    def edges_of(self, rank: int, part: Array) -> tuple[Array, Array, Array]:
        """The edges into a rank's nodes: their numbers, sources and targets."""
        if self.data is not None:
            return edges_into(*self.edges(), part, rank)
        assert self.parts is not None
        begin, end = np.searchsorted(part, (rank, rank + 1)).tolist()  # nodes of a folder ascend by rank
        pointer, sources = self.parts.edges(begin, end)
        numbers = np.arange(int(pointer[0]), int(pointer[-1]))
        return numbers, np.asarray(sources, np.int64), np.repeat(np.arange(begin, end), np.diff(pointer))


def whole_of(data: Any, parts: Any, rank: int, size: int) -> Whole:
    """The graph and, where `parts` says so, the rank of every node.

    `parts` is a folder of parts, an array with the rank of every node, or None: then METIS finds one.
    """
    if isinstance(parts, str | os.PathLike):
        return _from_folder(opened(parts, False, rank, size), size)
    if not isinstance(data, Data) or data.get("edge_index") is None:
        raise InputError(
            f"data: {type(data).__name__}; pass a PyG Data with edge_index, or parts= the folder of plait "
            "partition"
        )
    if data.num_nodes is None or data.num_nodes < size:
        raise InputError(f"data: {data.num_nodes} nodes for {size} ranks; start at most one rank per node")
    given = None if parts is None else _given(parts, int(data.num_nodes), size)
    return Whole(int(data.num_nodes), given, data)


def _from_folder(parts: Parts, size: int) -> Whole:
    if parts.num_nodes < size:
        raise InputError(f"parts: {parts.num_nodes} nodes for {size} ranks; start at most one rank per node")
    part = np.empty(parts.num_nodes, np.int64)
    for rank, own in enumerate(shares(parts.num_parts, size)):
        part[parts.bounds[own.start] : parts.bounds[own.stop]] = rank
    return Whole(parts.num_nodes, part, parts=parts)


def _given(parts: Any, num_nodes: int, size: int) -> Array:
    given = np.asarray(parts)
    if given.shape != (num_nodes,) or given.dtype.kind not in "iu":
        raise InputError(
            f"parts: {given.dtype} of shape {given.shape}; give the folder of plait partition, or the rank "
            f"of each of {num_nodes} nodes"
        )
    if given.size and not 0 <= given.min() <= given.max() < size:
        raise InputError(f"parts: ranks are numbered 0 to {size - 1}, it holds {given.min()}..{given.max()}")
    return given.astype(np.int64)


def assigned(whole: Whole, size: int, method: str, seed: int) -> Array:
    """The rank of every node, found where it was not given."""
    if whole.part is not None:
        return whole.part
    graph = Graph.from_edge_index(*whole.edges(), whole.num_nodes)
    mask = None if whole.data is None else whole.data.get("train_mask")
    train = None if mask is None or mask.dim() != 1 else mask.cpu().numpy()
    return assign(graph, size, method, train=train, seed=seed)


def data_of(whole: Whole, mine: Portion, device: torch.device) -> Data:
    """What the model is called with on one rank: rows, labels, masks and edges of its own nodes."""
    begin, end = mine.bounds[mine.rank], mine.bounds[mine.rank + 1]
    own = mine.nodes[begin:end]
    share = Data(edge_index=torch.from_numpy(mine.local_edges), num_nodes=int(end - begin))
    share.n_id = torch.from_numpy(own)
    values = _from_data(whole, own, mine.edges) if whole.data is not None else _from_parts(whole, own)
    for name, value in values.items():
        share[name] = value
    return share.to(device)


def _from_data(whole: Whole, own: Array, edges: Array) -> dict[str, Any]:
    data = whole.data
    assert data is not None
    found = {}
    for name, value in data.to_dict().items():
        if name == "edge_index" or not isinstance(value, Tensor):
            continue
        if data.is_node_attr(name):
            found[name] = value[torch.from_numpy(own).to(value.device)]
        elif data.is_edge_attr(name):
            found[name] = value[torch.from_numpy(edges).to(value.device)]
    return found


def _from_parts(whole: Whole, own: Array) -> dict[str, Any]:
    parts = whole.parts
    assert parts is not None
    owner = parts.owners(own)
    x = np.empty((own.size, parts.x(0).shape[1]), np.float32)
    for part in np.unique(owner):
        mine = owner == part
        x[mine] = parts.x(int(part))[own[mine] - parts.bounds[part]]
    found = {"x": torch.from_numpy(x)}
    labels = parts.y()
    if labels is not None:
        found["y"] = torch.from_numpy(np.asarray(labels[own]))
    for name in MASKS:
        if f"{name}_mask.npy" in parts.manifest.files:
            mask = np.zeros(parts.num_nodes, bool)
            mask[parts.split(name)] = True
            found[f"{name}_mask"] = torch.from_numpy(mask[own])
    return found
