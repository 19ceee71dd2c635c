"""plait's samplers with the interface of PyG's: inputs in, SamplerOutput out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NegativeSampling, SamplerOutput
from torch_geometric.sampler.base import NumNeighbors
from torch_geometric.sampler.neighbor_sampler import edge_sample

from plait.errors import InputError
from plait.graph import Graph
from plait.loader.draw import stream_key
from plait.loader.hetero import HeteroSample, HeteroSampler
from plait.loader.inputs import canonical
from plait.loader.sampler import Sample, Sampler

__all__ = ["NumberedSampler", "make_sampler", "picked_seed"]


class NumberedSampler(BaseSampler):  # type: ignore[misc]  # torch_geometric ships no types
    """A sampler whose samples depend on the numbers of epoch and batch and on nothing else.

    `node_time` dates negatives (by node type where there are several). Samples of several types are made
    bidirectional here, by PyG: it pairs relations with their reverses.
    """

    def __init__(
        self, sampler: Sampler | HeteroSampler, node_time: Any = None, is_bidirectional: bool = False
    ) -> None:
        self.sampler = sampler
        self.node_time = node_time
        self.is_bidirectional = is_bidirectional
        self.num_neighbors: Any = sampler.fanout
        self.num_nodes = sampler.graph.num_nodes if isinstance(sampler, Sampler) else sampler.num_nodes
        self.disjoint = sampler.disjoint

    def sample_from_nodes(self, index: Any, epoch: int = 0, batch: int = 0) -> Any:
        """The neighbourhood of the input nodes, with their numbers and times as metadata."""
        seed, time = index.node, index.time
        if index.input_type is not None:
            seed = {index.input_type: seed}
            time = None if time is None else {index.input_type: time}
        out = self._directed(self._sample(seed, time, epoch, batch))
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(self, index: Any, neg_sampling: Any = None, epoch: int = 0, batch: int = 0) -> Any:
        """The neighbourhood of the ends of the input links and of their negatives, PyG's metadata with it."""
        if neg_sampling is not None:
            neg_sampling = _SeededNegatives(
                neg_sampling, int(stream_key(self.sampler.seed, epoch, batch, 0xE))
            )
        out = edge_sample(
            index,
            lambda seed, seed_time: self._sample(seed, seed_time, epoch, batch),
            self.num_nodes,
            self.disjoint,
            node_time=self.node_time,
            neg_sampling=neg_sampling,
        )
        return self._directed(out)

    def _sample(self, seed: Any, seed_time: Any, epoch: int, batch: int) -> Any:
        if isinstance(self.sampler, Sampler):
            times = None if seed_time is None else seed_time.numpy()
            return to_output(self.sampler.sample(seed.numpy(), epoch, batch, seed_time=times))
        seeds = {kind: ids.numpy() for kind, ids in seed.items()}
        dated = None if seed_time is None else {kind: times.numpy() for kind, times in seed_time.items()}
        return to_hetero_output(self.sampler.sample(seeds, epoch, batch, seed_time=dated))

    def _directed(self, out: Any) -> Any:
        return out.to_bidirectional() if self.is_bidirectional else out


def to_output(sample: Sample) -> SamplerOutput:
    """The sample in PyG's terms; no copies."""
    row, col = _ends(sample.row, sample.col)
    out = SamplerOutput(
        node=torch.from_numpy(sample.n_id),
        row=row,
        col=col,
        edge=torch.from_numpy(sample.e_id),
        batch=None if sample.batch is None else torch.from_numpy(sample.batch),
        num_sampled_nodes=_listed(sample.num_sampled_nodes),
        num_sampled_edges=_listed(sample.num_sampled_edges),
    )
    if sample.indptr is not None:
        out.by_target = (row, col, sample.indptr)  # holds for these two tensors: a transform may bring others
    return out


def to_hetero_output(sample: HeteroSample) -> HeteroSamplerOutput:
    """The typed sample in PyG's terms; no copies."""
    node, edge = (
        {kind: torch.from_numpy(array) for kind, array in arrays.items()}
        for arrays in (sample.n_id, sample.e_id)
    )
    ends = {kind: _ends(array, sample.col[kind]) for kind, array in sample.row.items()}
    row, col = ({kind: pair[side] for kind, pair in ends.items()} for side in range(2))
    batch = None if sample.batch is None else {k: torch.from_numpy(t) for k, t in sample.batch.items()}
    hops = {"num_sampled_nodes": sample.num_sampled_nodes, "num_sampled_edges": sample.num_sampled_edges}
    return HeteroSamplerOutput(node=node, row=row, col=col, edge=edge, batch=batch, **hops)


def _ends(row: Any, col: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors, of one storage where they are the rows of one array: an edge_index needs no copy."""
    both = row.base
    if both is None or both is not col.base or both.shape != (2, row.size):
        return torch.from_numpy(row), torch.from_numpy(col)
    joined = torch.from_numpy(both)
    return joined[0], joined[1]


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


def make_sampler(
    data: Data | HeteroData,
    num_neighbors: Any,
    *,
    subgraph_type: Any,
    time_attr: str | None,
    weight_attr: str | None,
    directed: bool,
    **options: Any,
) -> NumberedSampler:
    """The sampler of PyG's arguments; `options` are common to plait's samplers."""
    if not directed:
        warnings.warn("directed=False is PyG's old name of subgraph_type='induced'", stacklevel=4)
        subgraph_type = "induced"
    direction = str(getattr(subgraph_type, "value", subgraph_type))
    attributes = (time_attr, weight_attr)
    if isinstance(data, HeteroData):
        return _typed_sampler(data, num_neighbors, direction, *attributes, options)
    return _plain_sampler(data, num_neighbors, direction, *attributes, options)


def _plain_sampler(
    data: Data, num_neighbors: Any, direction: str, time: str | None, weight: str | None, options: Any
) -> NumberedSampler:
    fanout = getattr(num_neighbors, "values", num_neighbors)
    if isinstance(num_neighbors, Mapping) or isinstance(fanout, Mapping):
        raise InputError(
            "num_neighbors: one fanout per edge type belongs to heterogeneous data; give a list for Data"
        )
    dates = _times(data, time)
    weights = None if weight is None else _attribute(data, "weight_attr", weight).view(-1)
    dated: dict[str, Any] = {name: _array(value) for name, value in dates.items()}
    graph = Graph.from_any(data, int(data.num_nodes))
    drawn = {"weight": None if weights is None else _array(weights), "direction": direction, **options}
    return NumberedSampler(Sampler(graph, fanout, **drawn, **dated), dates.get("node_time"))


def _typed_sampler(
    data: HeteroData, num_neighbors: Any, direction: str, time: str | None, weight: str | None, options: Any
) -> NumberedSampler:
    graphs = {kind: _relation(data, kind) for kind in data.edge_types}
    if isinstance(num_neighbors, NumNeighbors):
        num_neighbors = num_neighbors.get_values(list(graphs))
    if isinstance(num_neighbors, Mapping):
        num_neighbors = {canonical(data, kind): hops for kind, hops in num_neighbors.items()}
    dates = _typed_times(data, time)
    weights = None if weight is None else _collected(data, "weight_attr", weight, data.edge_types)
    arrays: dict[str, Any] = {
        name: _arrays(value) for name, value in {**dates, "weight": weights}.items() if value
    }
    is_bidirectional = direction == "bidirectional"
    sampler = HeteroSampler(
        graphs,
        num_neighbors,
        {kind: int(data[kind].num_nodes) for kind in data.node_types},
        direction="directional" if is_bidirectional else direction,
        **arrays,
        **options,
    )
    return NumberedSampler(sampler, dates.get("node_time"), is_bidirectional)


def _relation(data: HeteroData, kind: tuple[str, str, str]) -> Graph:
    store = data[kind]
    if not isinstance(store.get("edge_index"), Tensor):
        raise InputError(f"data[{kind!r}] has no edge_index tensor; other formats are not sampled by type")
    counts = [data[end].num_nodes for end in (kind[0], kind[-1])]
    if None in counts:
        raise InputError(
            f"data: the numbers of {kind[0]!r} and {kind[-1]!r} nodes are unknown; set num_nodes"
        )
    source, target = _array(store.edge_index)
    return Graph.from_edge_index(source, target, int(counts[1]), int(counts[0]))


def _times(data: Data, name: str | None) -> dict[str, Tensor]:
    if name is None:
        return {}
    value = _attribute(data, "time_attr", name)
    if data.is_node_attr(name):
        return {"node_time": value}
    if data.is_edge_attr(name):
        return {"edge_time": value}
    raise InputError(f"time_attr={name!r} has neither one entry per node nor one per edge")


def _typed_times(data: HeteroData, name: str | None) -> dict[str, dict[Any, Tensor]]:
    if name is None:
        return {}
    of_nodes, of_edges = (
        {kind: data[kind][name] for kind in kinds if name in data[kind]}
        for kinds in (data.node_types, data.edge_types)
    )
    if of_nodes and of_edges:
        raise InputError(f"time_attr={name!r} is an attribute of nodes and of edges; rename one of them")
    if not of_nodes and not of_edges:
        raise InputError(f"time_attr={name!r}: no node type and no edge type has such an attribute")
    return {"node_time": of_nodes} if of_nodes else {"edge_time": of_edges}


def _collected(data: HeteroData, argument: str, name: str, kinds: Any) -> dict[Any, Tensor]:
    found = {kind: data[kind][name].view(-1) for kind in kinds if name in data[kind]}
    if not found:
        raise InputError(f"{argument}={name!r}: no edge type has such an attribute")
    return found


def _attribute(data: Data, argument: str, name: str) -> Tensor:
    if name not in data:
        raise InputError(f"{argument}={name!r}: data has no such attribute; it has {', '.join(data.keys())}")
    value: Tensor = data[name]
    return value


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def _arrays(tensors: dict[Any, Tensor]) -> dict[Any, Any]:
    return {kind: _array(tensor) for kind, tensor in tensors.items()}
