"""A loader's arguments, checked: data or stores, seed nodes, seed links, features from outside."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

from plait.errors import InputError
from plait.features.cache import Cache
from plait.features.rows import Rows, as_rows

__all__ = [
    "RowsByAttribute", "canonical", "checked_data", "checked_links", "checked_nodes", "checked_rows",
    "the_cache",
]  # fmt: skip

RowsByAttribute = dict[tuple[str | None, str], Rows]
"""Rows by node type (None: there is one) and attribute."""


def checked_data(data: object) -> Data | HeteroData:
    """The data; of a pair of stores the edges, whose node attributes come as features."""
    if isinstance(data, Data | HeteroData):
        for store in data.edge_stores:
            for name in ("adj_t", "edge_index"):
                edges = store.get(name)
                if isinstance(edges, Tensor) and edges.layout is not torch.strided:
                    raise InputError(
                        f"data: {name} is a torch sparse tensor, from which PyG cannot select edges; "
                        "set edge_index to a list [2, edges]; transform=ToSparseTensor(...) gives adj_t"
                    )
        return data
    if isinstance(data, tuple | list) and len(data) == 2:
        features, graph = data
        if isinstance(features, FeatureStore) and isinstance(graph, GraphStore):
            return _from_stores(features, graph)
    raise InputError(
        f"data: {type(data).__name__} cannot be sampled; pass a torch_geometric Data or HeteroData, or a "
        "(FeatureStore, GraphStore) pair"
    )


def _from_stores(features: Any, graph: Any) -> Data | HeteroData:
    kinds = {attr.edge_type: attr for attr in graph.get_all_edge_attrs()}
    rows, cols, orders = graph.coo()
    is_plain = not isinstance(rows, dict) or list(kinds) == [None]
    if not isinstance(rows, dict):
        (only,) = kinds
        rows, cols, orders = {only: rows}, {only: cols}, {only: orders}
    if any(order is not None for order in (orders or {}).values()):
        raise InputError("data: the graph store reorders its edges; store them as COO")
    if is_plain or (len(kinds) == 1 and not _has_types(features)):
        ((kind, row),) = rows.items()
        plain = Data(edge_index=torch.stack([row, cols[kind]]))
        size = kinds[kind].size
        if size is not None and None not in size:
            plain.num_nodes = max(size)
        return plain
    data = HeteroData()
    for attr in features.get_all_tensor_attrs():
        data[attr.group_name].num_nodes = features.get_tensor_size(attr)[0]
    for kind, row in rows.items():
        data[kind].edge_index = torch.stack([row, cols[kind]])
        for end, count in zip((kind[0], kind[-1]), kinds[kind].size or (None, None), strict=True):
            if count is not None and "num_nodes" not in data[end]:
                data[end].num_nodes = count
    return data


def _has_types(features: Any) -> bool:
    return any(isinstance(attr.group_name, str) for attr in features.get_all_tensor_attrs())


def checked_rows(data: Any, plain: Data | HeteroData, features: Any) -> tuple[Any, RowsByAttribute]:
    """The data, knowing how many nodes it has, and the features: all a FeatureStore has, then those given."""
    rows = {**_stored(data), **_given(features, isinstance(plain, HeteroData))}
    for (kind, name), source in rows.items():
        count = source.num_rows
        store = plain if kind is None else plain[kind]
        if count is None:
            continue
        if not {"num_nodes", "x"} & set(store.keys()):
            plain = copy.copy(plain)
            (plain if kind is None else plain[kind]).num_nodes = count  # PyG would guess it from the edges
        elif count != store.num_nodes:
            where = f"features[{name!r}]" if kind is None else f"features[{kind!r}][{name!r}]"
            raise InputError(f"{where} has {count} rows, but the graph has {store.num_nodes} nodes")
    return plain, rows


def _stored(data: Any) -> RowsByAttribute:
    """What the FeatureStore of a pair has."""
    if not (isinstance(data, tuple | list) and isinstance(data[0], FeatureStore)):
        return {}
    found = data[0].get_all_tensor_attrs()
    names = {(a.group_name if isinstance(a.group_name, str) else None, str(a.attr_name)) for a in found}
    return {(kind, name): _from_feature_store(data[0], name, kind) for kind, name in sorted(names, key=str)}


def _given(features: Any, is_typed: bool) -> RowsByAttribute:
    """One source alone is `x`; sources of typed nodes go by node type, then by name."""
    if features is None:
        return {}
    if not is_typed:
        named = features if isinstance(features, Mapping) else {"x": features}
        return {(None, str(name)): _as_rows(source, str(name)) for name, source in named.items()}
    if not isinstance(features, Mapping):
        raise InputError("features: with several node types give a dict by node type")
    return {
        (str(kind), name): rows
        for kind, sources in features.items()
        for (_, name), rows in _given(sources, False).items()
    }


def _as_rows(source: Any, name: str) -> Rows:
    return _from_feature_store(source, name) if hasattr(source, "get_tensor") else as_rows(source)


def _from_feature_store(store: Any, name: str, kind: str | None = None) -> Rows:
    """The attribute of that name, and of that node type, of a PyG FeatureStore."""
    every = store.get_all_tensor_attrs()
    found = [a for a in every if a.attr_name == name and kind in (None, a.group_name)]
    if len(found) != 1:
        have = ", ".join(sorted({str(a.attr_name) for a in every})) or "none"
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


def the_cache(rows: RowsByAttribute) -> tuple[str | None, Cache | None]:
    """The one cache among the features, to which batches are announced, and the type of its nodes."""
    caches: list[Any] = [(kind, r) for (kind, _), r in rows.items() if isinstance(r, Cache)]
    if len(caches) > 1:
        raise InputError("features holds several caches; put one cache before all of them")
    return caches[0] if caches else (None, None)


def _as_tensor(nodes: Any) -> Tensor:
    """Node numbers or a mask as a tensor."""
    return nodes if isinstance(nodes, Tensor) else torch.as_tensor(np.asarray(nodes))


def checked_nodes(data: Data | HeteroData, given: Any) -> tuple[Any, int]:
    """The input nodes as PyG takes them, by type where there are several, and how many they are."""
    if isinstance(data, Data):
        if isinstance(given, str) or (isinstance(given, tuple) and given and isinstance(given[0], str)):
            raise InputError(f"input_nodes={given!r} names a node type; Data has one, give indices or a mask")
        nodes = torch.arange(data.num_nodes) if given is None else _as_tensor(given)
        return nodes, _count_nodes(nodes, int(data.num_nodes))
    kind, members = (given, None) if isinstance(given, str) else _pair("input_nodes", given, "a node type")
    if kind not in data.node_types:
        raise InputError(f"input_nodes: {kind!r} is not a node type; there are {', '.join(data.node_types)}")
    count = int(data[kind].num_nodes)
    if members is None:
        return (kind, None), count
    nodes = _as_tensor(members)
    return (kind, nodes), _count_nodes(nodes, count)


def _pair(name: str, given: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{name}: with several types name one, or give a pair of {what} and its members")
    return given[0], given[1]


def _count_nodes(given: Tensor, count: int) -> int:
    if given.dtype == torch.bool:
        if given.shape != (count,):
            raise InputError(f"input_nodes: the mask has shape {tuple(given.shape)} for {count} nodes")
        return int(given.sum())
    if given.dim() != 1 or given.is_floating_point() or given.is_complex():
        raise InputError(
            f"input_nodes has shape {tuple(given.shape)} and type {given.dtype}; give indices or a mask"
        )
    _check_range("input_nodes", given, count)
    return given.numel()


def checked_links(
    data: Data | HeteroData, links: Any, label: Tensor | None, time: Tensor | None
) -> tuple[Any, int]:
    """The seed links as PyG takes them, [2, E] and by type where there are several, and how many they are."""
    kind, given = None, links
    if isinstance(data, HeteroData):
        kind, given = _link_type(data, links)
    elif isinstance(links, tuple) and links and isinstance(links[0], str | tuple):
        raise InputError("edge_label_index names an edge type; Data has one, give a [2, E] tensor")
    if given is None:
        given = data.edge_index if kind is None else data[kind].edge_index
    given = given if isinstance(given, Tensor) else torch.as_tensor(given)
    if given.dim() != 2 or given.size(0) != 2 or given.is_floating_point():
        raise InputError(
            f"edge_label_index has shape {tuple(given.shape)} and type {given.dtype}; "
            "give whole numbers [2, E]"
        )
    for end, side in ((0, given[0]), (-1, given[1])):
        _check_range("edge_label_index", side, int((data if kind is None else data[kind[end]]).num_nodes))
    for name, value in (("edge_label", label), ("edge_label_time", time)):
        if value is not None and value.size(0) != given.size(1):
            raise InputError(f"{name} has {value.size(0)} entries for {given.size(1)} links; give one each")
    return given if kind is None else (kind, given), given.size(1)


def _link_type(data: HeteroData, links: Any) -> tuple[Any, Any]:
    """The edge type and the links given with it."""
    if isinstance(links, tuple | list) and links and all(isinstance(word, str) for word in links):
        kind, given = tuple(links), None
    else:
        kind, given = _pair("edge_label_index", links, "an edge type")
    kind = canonical(data, kind)
    if kind not in data.edge_types:
        raise InputError(f"edge_label_index: {kind!r} is not an edge type; there are {data.edge_types}")
    return kind, given


def canonical(data: HeteroData, kind: Any) -> Any:
    """The edge type in full, where PyG can tell which is meant; else as it was given."""
    try:
        return data._to_canonical(*kind)
    except (TypeError, KeyError, ValueError):
        return kind


def _check_range(name: str, ids: Tensor, count: int) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise InputError(f"{name} holds {bad}, but nodes are numbered 0 to {count - 1}")
