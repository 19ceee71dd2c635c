"""plait's sampler in the shape PyG's loaders ask for: inputs in, SamplerOutput out."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import BaseSampler, NegativeSampling, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample

from plait.errors import InputError
from plait.graph import Graph
from plait.loader.draw import stream_key
from plait.loader.sampler import Sample, Sampler

__all__ = ["NumberedSampler", "checked_data", "make_sampler", "picked_seed"]


class NumberedSampler(BaseSampler):  # type: ignore[misc]  # torch_geometric ships no types
    """Samples that depend on the numbers of epoch and batch and on nothing else."""

    def __init__(self, sampler: Sampler, node_time: Tensor | None = None) -> None:
        self.sampler = sampler
        self.node_time = node_time
        self.num_neighbors = list(sampler.fanout)
        self.num_nodes = sampler.graph.num_nodes
        self.disjoint = sampler.disjoint

    def sample_from_nodes(self, index: Any, epoch: int = 0, batch: int = 0) -> SamplerOutput:
        """The neighbourhood of the input nodes, with their numbers and times as metadata."""
        out = self._sample(index.node, index.time, epoch, batch)
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(
        self, index: Any, neg_sampling: Any = None, epoch: int = 0, batch: int = 0
    ) -> SamplerOutput:
        """The neighbourhood of the ends of the input links and of their negatives, PyG's metadata with it."""
        if neg_sampling is not None:
            neg_sampling = _SeededNegatives(
                neg_sampling, int(stream_key(self.sampler.seed, epoch, batch, 0xE))
            )
        return edge_sample(
            index,
            lambda seed, seed_time: self._sample(seed, seed_time, epoch, batch),
            self.num_nodes,
            self.disjoint,
            node_time=self.node_time,
            neg_sampling=neg_sampling,
        )

    def _sample(self, seed: Tensor, seed_time: Tensor | None, epoch: int, batch: int) -> SamplerOutput:
        times = None if seed_time is None else seed_time.numpy()
        return to_output(self.sampler.sample(seed.numpy(), epoch, batch, seed_time=times))


def to_output(sample: Sample) -> SamplerOutput:
    """The sample in PyG's terms; no copies."""
    return SamplerOutput(
        node=torch.from_numpy(sample.n_id),
        row=torch.from_numpy(sample.row),
        col=torch.from_numpy(sample.col),
        edge=torch.from_numpy(sample.e_id),
        batch=None if sample.batch is None else torch.from_numpy(sample.batch.astype(np.int64, copy=False)),
        num_sampled_nodes=_listed(sample.num_sampled_nodes),
        num_sampled_edges=_listed(sample.num_sampled_edges),
    )


def _listed(counts: tuple[int, ...] | None) -> list[int] | None:
    return None if counts is None else list(counts)


class _SeededNegatives(NegativeSampling):  # type: ignore[misc]  # torch_geometric ships no types
    """PyG's negatives from a generator of their own: torch's is shared by all threads."""

    def __init__(self, like: NegativeSampling, seed: int) -> None:
        super().__init__(like.mode, like.amount, like.src_weight, like.dst_weight)
        self._generator = torch.Generator().manual_seed(seed & (2**63 - 1))

    def sample(self, num_samples: int, endpoint: str, num_nodes: int | None = None) -> Tensor:
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is None:
            return torch.randint(num_nodes or 0, (num_samples,), generator=self._generator)
        if weight.numel() != num_nodes:
            raise InputError(
                f"neg_sampling: {endpoint}_weight has {weight.numel()} entries for {num_nodes} nodes; "
                "give one weight per node"
            )
        return torch.multinomial(weight, num_samples, replacement=True, generator=self._generator)


def picked_seed(seed: int | None) -> int:
    """The seed as given, else one from torch's generator, so that torch.manual_seed repeats a run."""
    return int(torch.randint(2**62, ())) if seed is None else seed


def checked_data(data: object) -> Data:
    """The data as a homogeneous Data; a pair of stores becomes one without node attributes."""
    if isinstance(data, HeteroData):
        raise InputError(
            "data: HeteroData is not sampled yet; pass data.to_homogeneous(), or use PyG's own loader"
        )
    if isinstance(data, Data):
        return data
    if isinstance(data, tuple | list) and len(data) == 2:
        features, graph = data
        if isinstance(features, FeatureStore) and isinstance(graph, GraphStore):
            return _from_store(graph)
    raise InputError(
        f"data: {type(data).__name__} is not sampled; pass a torch_geometric Data, or a (FeatureStore, "
        "GraphStore) pair with one edge type"
    )


def _from_store(store: Any) -> Data:
    kinds = store.get_all_edge_attrs()
    count = len({a.edge_type for a in kinds})
    if count != 1:
        raise InputError(f"data: the graph store holds {count} edge types; only one is sampled yet")
    row, col, order = store.coo()
    if isinstance(row, dict):
        row, col = next(iter(row.values())), next(iter(col.values()))
        order = None if order is None else next(iter(order.values()))
    if order is not None:
        raise InputError("data: the graph store reorders its edges; store them as COO")
    data = Data(edge_index=torch.stack([row, col]))
    if kinds[0].size is not None and None not in kinds[0].size:
        data.num_nodes = max(kinds[0].size)
    return data


def make_sampler(
    data: Data,
    num_neighbors: Any,
    num_nodes: int,
    *,
    replace: bool,
    subgraph_type: Any,
    disjoint: bool,
    temporal_strategy: str,
    time_attr: str | None,
    weight_attr: str | None,
    directed: bool,
    seed: int,
    method: str = "uniform",
    batch_dependency: int = 1,
) -> NumberedSampler:
    """The sampler of PyG's arguments."""
    fanout = getattr(num_neighbors, "values", num_neighbors)
    if isinstance(num_neighbors, dict) or isinstance(fanout, dict):
        raise InputError(
            "num_neighbors: one fanout per edge type belongs to heterogeneous data; give a list for Data"
        )
    if not directed:
        warnings.warn("directed=False is PyG's old name of subgraph_type='induced'", stacklevel=4)
        subgraph_type = "induced"
    times = _times(data, time_attr)
    weight = None if weight_attr is None else _attribute(data, "weight_attr", weight_attr).view(-1)
    dated: dict[str, Any] = {name: value.detach().cpu().numpy() for name, value in times.items()}
    sampler = Sampler(
        Graph.from_any(data, num_nodes),
        fanout,
        replace=replace,
        direction=subgraph_type,
        disjoint=disjoint,
        temporal_strategy=temporal_strategy,
        weight=None if weight is None else weight.detach().cpu().numpy(),
        seed=seed,
        method=method,
        batch_dependency=batch_dependency,
        **dated,
    )
    return NumberedSampler(sampler, times.get("node_time"))


def _times(data: Data, name: str | None) -> dict[str, Tensor]:
    if name is None:
        return {}
    value = _attribute(data, "time_attr", name)
    if data.is_node_attr(name):
        return {"node_time": value}
    if data.is_edge_attr(name):
        return {"edge_time": value}
    raise InputError(f"time_attr={name!r} has neither one entry per node nor one per edge")


def _attribute(data: Data, argument: str, name: str) -> Tensor:
    if name not in data:
        raise InputError(f"{argument}={name!r}: data has no such attribute; it has {', '.join(data.keys())}")
    value: Tensor = data[name]
    return value
