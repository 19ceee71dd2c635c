"""Mini-batches of nodes with their sampled neighbourhoods, PyG's NeighborLoader in all but the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore
from torch_geometric.loader import NeighborLoader as PyGNeighborLoader

from plait.errors import InputError
from plait.features.cache import Cache
from plait.features.rows import Rows
from plait.loader.adapter import NumberedSampler, checked_data, make_sampler, picked_seed
from plait.loader.assemble import Assembler, checked_features
from plait.loader.epochs import Epochs, Job, shuffled
from plait.loader.sampler import Sampler

__all__ = ["NeighborLoader"]


class NeighborLoader(Epochs, PyGNeighborLoader):  # type: ignore[misc]  # torch_geometric ships no types
    """PyG's NeighborLoader: its arguments, its batches, and no compiled wheel needed.

    Besides PyG's: `prefetch=k` prepares up to k batches ahead in threads, `budget_bytes` bounds what they
    hold; `features` gives rows from outside `data` (an array, the path of a .npy file, a function of ids, a
    PyG FeatureStore, a plait Cache; a dict by attribute name, one alone is `x`); `seed` fixes all draws
    (without it one is taken from torch's generator); `method="labor"` and `batch_dependency` are the
    sampler's. The batches are the same whatever prefetch and num_workers are.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        prefetch: int = 0,
        budget_bytes: int | None = None,
        features: Any = None,
        seed: int | None = None,
        method: str = "uniform",
        batch_dependency: int = 1,
        **kwargs: Any,
    ) -> None:
        """`is_sorted` is accepted and not needed: a sorted edge_index is recognised."""
        if input_time is not None and time_attr is None:
            raise InputError(
                "input_time was given without time_attr; name the attribute that dates neighbours"
            )
        rows = checked_features(stored_features(data, features))
        plain = counted(checked_data(data), rows)
        count = int(plain.num_nodes)
        seed = picked_seed(seed)
        nodes = _checked_nodes(input_nodes, count)
        if input_time is not None and input_time.numel() != nodes.numel():
            raise InputError(
                f"input_time has {input_time.numel()} entries for {nodes.numel()} input nodes; give one each"
            )
        if neighbor_sampler is None:
            neighbor_sampler = make_sampler(
                plain,
                num_neighbors,
                count,
                replace=replace,
                subgraph_type=subgraph_type,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                directed=directed,
                seed=seed,
                method=method,
                batch_dependency=batch_dependency,
            )
        elif isinstance(neighbor_sampler, Sampler):
            neighbor_sampler = NumberedSampler(neighbor_sampler)
        self._set_out(seed, prefetch, budget_bytes, the_cache(rows))
        self._assemble = Assembler(plain, rows)
        kwargs.pop("dataset", None)
        kwargs.pop("collate_fn", None)
        super().__init__(
            plain,
            num_neighbors,
            input_nodes=nodes if input_nodes is None else _as_tensor(input_nodes),
            input_time=input_time,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            time_attr=time_attr,
            **shuffled(nodes.numel(), seed, kwargs),
        )
        self._check_workers()

    def __call__(self, index: Any) -> Any:
        """The batch of these inputs, drawn as batch 0 of the next epoch."""
        return self.fill(self.draw(Job(self.epoch, 0, index)))

    def draw(self, job: Job) -> Any:
        """The sample of a job as PyG's SamplerOutput."""
        inputs = self.input_data[job.index]
        if isinstance(self.node_sampler, NumberedSampler):
            out = self.node_sampler.sample_from_nodes(inputs, job.epoch, job.number)
        else:
            out = in_order(self.node_sampler.sample_from_nodes(inputs), self.node_sampler)
        return out if self.transform_sampler_output is None else self.transform_sampler_output(out)

    def fill(self, drawn: Any) -> Any:
        """The batch of a sample: attributes of its nodes and edges, and PyG's bookkeeping."""
        data = self._assemble(drawn)
        data.input_id, data.seed_time = drawn.metadata[0], drawn.metadata[1]
        data.batch_size = drawn.metadata[0].size(0)
        return data if self.transform is None else self.transform(data)

    filter_fn = fill


def in_order(drawn: Any, sampler: Any) -> Any:
    """The sample with its edges by the caller's numbers; plait's own already are."""
    order = sampler.edge_permutation
    if order is not None and drawn.edge is not None:
        drawn.edge = order[drawn.edge.to(torch.long)]
    return drawn


def stored_features(data: Any, features: Any) -> Any:
    """What `features` are when data is a (FeatureStore, GraphStore) pair: all the store has."""
    if not (isinstance(data, tuple | list) and isinstance(data[0], FeatureStore)):
        return features
    store = {attr.attr_name: data[0] for attr in data[0].get_all_tensor_attrs()}
    given = features if isinstance(features, dict) else {} if features is None else {"x": features}
    return {**store, **given}


def counted(data: Data, rows: dict[str, Rows]) -> Data:
    """The data, knowing its number of nodes: as it says, else as there are rows, which must agree."""
    known = [r.num_rows for r in rows.values() if r.num_rows is not None]
    if known and not {"num_nodes", "x"} & set(data.keys()):
        data = copy.copy(data)
        data.num_nodes = known[0]  # PyG would guess it from the largest number in edge_index
    for name, source in rows.items():
        if source.num_rows is not None and source.num_rows != data.num_nodes:
            raise InputError(
                f"features[{name!r}] has {source.num_rows} rows, but the graph has {data.num_nodes} nodes"
            )
    return data


def the_cache(rows: dict[str, Rows]) -> Cache | None:
    """The one cache among the features, which is told what comes."""
    caches: list[Any] = [r for r in rows.values() if isinstance(r, Cache)]
    if len(caches) > 1:
        raise InputError("features holds several caches; put one cache before all of them")
    return caches[0] if caches else None


def _as_tensor(nodes: Any) -> Tensor:
    return nodes if isinstance(nodes, Tensor) else torch.as_tensor(np.asarray(nodes))


def _checked_nodes(nodes: Any, count: int) -> Tensor:
    """The input nodes as indices."""
    if nodes is None:
        return torch.arange(count)
    if isinstance(nodes, str) or (isinstance(nodes, tuple) and nodes and isinstance(nodes[0], str)):
        raise InputError(f"input_nodes={nodes!r} names a node type; Data has one, give its indices or a mask")
    given = _as_tensor(nodes)
    if given.dtype == torch.bool:
        if given.shape != (count,):
            raise InputError(f"input_nodes: the mask has shape {tuple(given.shape)} for {count} nodes")
        return given.nonzero().view(-1)
    if given.dim() != 1 or given.is_floating_point() or given.is_complex():
        raise InputError(
            f"input_nodes has shape {tuple(given.shape)} and type {given.dtype}; give indices or a mask"
        )
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= count):
        bad = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise InputError(f"input_nodes holds {bad}, but nodes are numbered 0 to {count - 1}")
    return given
