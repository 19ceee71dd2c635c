"""Builds PyG's mini-batch from a sample and the data it was drawn from."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import filter_edge_store_, index_select
from torch_geometric.sampler import HeteroSamplerOutput

from plait.features.cache import Cache
from plait.features.rows import as_rows, gather
from plait.loader.inputs import RowsByAttribute
from plait.pyg.edges import Demand, attach
from plait.runtime.buffers import Buffers

__all__ = ["Assembler", "take_rows"]

# Batches of one loader differ by a few per cent in size; without room to spare, 50 epochs of 1024 seeds added
# two buffers of 2 MB, one each time a batch was larger than all before it.
_HEADROOM = 0.125
_TORCH = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


class Assembler:
    """Joins sampled nodes and edges with their attributes.

    `features` are rows that replace or join the node attributes of `data`. Rows are copied by plait's own
    kernel: torch's would start a pool of threads for every thread that prepares batches.
    """

    def __init__(self, data: Data | HeteroData, features: RowsByAttribute) -> None:
        self.data = data
        self.features = dict(features)
        self._buffers, self._demand = Buffers(_HEADROOM), Demand()

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "features": self.features}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _buffers=Buffers(_HEADROOM), _demand=Demand())

    def __call__(self, out: Any) -> Any:
        """The batch of a PyG SamplerOutput whose edges have the caller's numbers, less its metadata."""
        data = copy.copy(self.data)
        if isinstance(out, HeteroSamplerOutput):
            self._fill_types(data, out)
            return data
        self._fill_nodes(None, self.data._store, data._store, out.node)
        self._fill_edges(self.data._store, data._store, out.row, out.col, out.edge)
        self._attach_graph(data._store, out)
        store = data._store  # Data's own setters look every name up twice, 0.1 ms per batch
        if "n_id" not in store:
            store["n_id"] = out.node
        if out.edge is not None and "e_id" not in store:
            store["e_id"] = out.edge.to(torch.long)
        store["batch"] = out.batch
        store["num_sampled_nodes"] = out.num_sampled_nodes
        store["num_sampled_edges"] = out.num_sampled_edges
        if out.orig_row is not None and out.orig_col is not None:
            data._orig_edge_index = torch.stack([out.orig_row, out.orig_col], dim=0)
        return data

    def _attach_graph(self, store: Any, out: Any) -> None:
        """Attaches to edge_index what its sampler knows, for planned layers."""
        edge_index, by_target = store.get("edge_index"), getattr(out, "by_target", None)
        if edge_index is None or by_target is None or edge_index.device.type != "cpu":
            return
        row, col, pointer = by_target
        if row is out.row and col is out.col and row._version == col._version == 0:
            attach(edge_index, row.numpy(), pointer, out.node.numel(), self._demand)

    def _fill_types(self, data: HeteroData, out: HeteroSamplerOutput) -> None:
        none = torch.empty(0, dtype=torch.long)
        for kind in self.data.node_types:
            nodes = out.node.get(kind, none)
            self._fill_nodes(kind, self.data[kind], data[kind], nodes)
            if "n_id" not in data[kind]:
                data[kind].n_id = nodes
        for kind in self.data.edge_types:
            ends = (out.row.get(kind, none), out.col.get(kind, none))
            edge = (out.edge or {}).get(kind, none)
            self._fill_edges(self.data[kind], data[kind], *ends, edge)
            if edge is not None and "e_id" not in data[kind]:
                data[kind].e_id = edge.to(torch.long)
        data.set_value_dict("batch", out.batch)
        data.set_value_dict("num_sampled_nodes", out.num_sampled_nodes)
        data.set_value_dict("num_sampled_edges", out.num_sampled_edges)

    def _fill_nodes(self, kind: str | None, store: Any, filled: Any, nodes: Tensor) -> None:
        """As PyG's filter_node_store_, with `features` in the place of attributes of their names."""
        for key, value in store.items():
            if (kind, key) in self.features:
                continue
            if key == "num_nodes":
                filled.num_nodes = nodes.numel()
            elif store.is_node_attr(key):
                dim = self.data.__cat_dim__(key, value, store)
                filled[key] = take_rows(value, nodes, dim, self._buffers)
        for (owner, key), rows in self.features.items():
            if owner == kind:
                filled[key] = self._rows(rows, nodes)

    def _rows(self, rows: Any, nodes: Tensor) -> Tensor:
        """The rows of `nodes`, in memory that is used again where their source can write to it."""
        booked = rows.room if isinstance(rows, Cache) else None
        if booked is not None and booked.shape[0] == nodes.numel():
            owner = booked.base
            out: Tensor | None = owner if isinstance(owner, Tensor) else torch.from_numpy(booked)
        else:
            out = self._empty(rows, nodes.numel())
        if out is None:
            return torch.from_numpy(rows.take(nodes.numpy()))
        rows.fill(nodes.numpy(), out.numpy())
        return out

    def room(self, rows: Any, count: int) -> NDArray[Any] | None:
        """Memory for that many rows before they are taken; None where their type is not known yet."""
        out = self._empty(rows, count)
        return None if out is None else out.numpy()

    def _empty(self, rows: Any, count: int) -> Tensor | None:
        shape, dtype = (rows.row if hasattr(rows, "fill") else None) or ((), None)
        kind = None if dtype is None else _TORCH.get(np.dtype(dtype))
        if kind is None or torch.utils.data.get_worker_info() is not None:
            return None
        return self._buffers.take(count, math.prod(shape), kind).view(count, *shape)

    def _fill_edges(self, store: Any, filled: Any, row: Tensor, col: Tensor, edge: Tensor | None) -> None:
        """As PyG's filter_edge_store_, without copying ends that lie as an edge_index does."""
        if "adj_t" in store or edge is None:
            filter_edge_store_(store, filled, row, col, edge)
            return
        for key, value in store.items():
            if key == "edge_index":
                filled["edge_index"] = _side_by_side(row, col).to(value.device)
            elif store.is_edge_attr(key):
                filled[key] = take_rows(value, edge, self.data.__cat_dim__(key, value, store), self._buffers)


def _side_by_side(row: Tensor, col: Tensor) -> Tensor:
    """[2, E] of both, in place where col follows row in memory."""
    storage, count = row.untyped_storage(), row.numel()
    follows = col.untyped_storage().data_ptr() == storage.data_ptr() and row.dtype == col.dtype
    if follows and count and col.storage_offset() == row.storage_offset() + count and row.stride() == (1,):
        return row.new_empty(0).set_(storage, row.storage_offset(), (2, count), (count, 1))
    return torch.stack([row, col], dim=0)


def take_rows(value: Any, nodes: Tensor, dim: int = 0, buffers: Buffers | None = None) -> Tensor:
    """The entries `nodes` of `value` along `dim`, in one of `buffers` where that is possible."""
    if isinstance(value, np.ndarray) and dim == 0:
        return torch.from_numpy(as_rows(value).take(nodes.numpy()))
    if not _is_plain(value, dim) or torch.utils.data.get_worker_info() is not None:
        chosen: Tensor = index_select(value, nodes.to(getattr(value, "device", "cpu")), dim=dim)
        return chosen
    width = value[0].numel() if value.size(0) else 1
    if buffers is None:
        out = torch.empty((nodes.numel(), *value.shape[1:]), dtype=value.dtype)
    else:
        out = buffers.take(nodes.numel(), width, value.dtype).view(nodes.numel(), *value.shape[1:])
    if nodes.numel():
        gather(_bytes(value), nodes.numpy(), _bytes(out))
    return out


def _is_plain(value: Any, dim: int) -> bool:
    """Whether its rows lie one after the other in this machine's memory."""
    return (
        isinstance(value, Tensor)
        and type(value) is Tensor
        and dim == 0
        and value.dim() >= 1
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.is_contiguous()
        and value.numel() > 0
        and not value.requires_grad
    )


def _bytes(tensor: Tensor) -> Any:
    """Its memory as rows of bytes; numpy knows no bfloat16, and a copy needs no dtype."""
    return tensor.detach().view(tensor.size(0), -1).view(torch.uint8).numpy()
