"""A sample and the data it was drawn from in, the mini-batch in PyG's terms out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.utils import filter_edge_store_, index_select

from plait.errors import InputError
from plait.features.rows import Rows, as_rows, gather
from plait.runtime.buffers import Buffers

__all__ = ["Assembler", "checked_features", "take_rows"]


class Assembler:
    """Joins sampled nodes and edges with their attributes.

    `features` are rows that replace or join the node attributes of `data`. Rows are copied by plait's own
    kernel: torch's would start a pool of threads for every thread that prepares batches.
    """

    def __init__(self, data: Data, features: Mapping[str, Rows]) -> None:
        self.data = data
        self.features = dict(features)
        self._buffers = Buffers()

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "features": self.features}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _buffers=Buffers())

    def __call__(self, out: Any) -> Data:
        """The batch of a PyG SamplerOutput whose edges have the caller's numbers, less its metadata."""
        data = copy.copy(self.data)
        self._fill_nodes(data, out.node)
        filter_edge_store_(self.data._store, data._store, out.row, out.col, out.edge)
        if "n_id" not in data:
            data.n_id = out.node
        if out.edge is not None and "e_id" not in data:
            data.e_id = out.edge.to(torch.long)
        data.batch = out.batch
        data.num_sampled_nodes = out.num_sampled_nodes
        data.num_sampled_edges = out.num_sampled_edges
        if out.orig_row is not None and out.orig_col is not None:
            data._orig_edge_index = torch.stack([out.orig_row, out.orig_col], dim=0)
        return data

    def _fill_nodes(self, data: Data, nodes: Tensor) -> None:
        """As PyG's filter_node_store_, with `features` in the place of attributes of their names."""
        store, filled = self.data._store, data._store
        for key, value in store.items():
            if key in self.features:
                continue
            if key == "num_nodes":
                filled.num_nodes = nodes.numel()
            elif store.is_node_attr(key):
                dim = self.data.__cat_dim__(key, value, store)
                filled[key] = take_rows(value, nodes, dim, self._buffers)
        for key, rows in self.features.items():
            filled[key] = torch.from_numpy(rows.take(nodes.numpy()))


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


def checked_features(features: object) -> dict[str, Rows]:
    """The rows by attribute name; one source alone is `x`."""
    if features is None:
        return {}
    named = features if isinstance(features, Mapping) else {"x": features}
    return {
        str(name): _from_store(source, name) if hasattr(source, "get_tensor") else as_rows(source)
        for name, source in named.items()
    }


def _from_store(store: Any, name: str) -> Rows:
    """The attribute of that name of a PyG FeatureStore."""
    found = [a for a in store.get_all_tensor_attrs() if a.attr_name == name]
    if len(found) != 1:
        have = ", ".join(sorted({str(a.attr_name) for a in store.get_all_tensor_attrs()})) or "none"
        raise InputError(f"features: the store holds {len(found)} attributes named {name!r} (it has {have})")
    attr = found[0]

    def fetch(ids: Any) -> Any:
        wanted = copy.copy(attr)
        wanted.index = torch.from_numpy(ids)
        if not wanted.is_set("group_name"):  # Data lists its attributes without
            wanted.group_name = None
        return store.get_tensor(wanted)

    size = store.get_tensor_size(attr)
    return as_rows(fetch, None if size is None else int(size[0]))
