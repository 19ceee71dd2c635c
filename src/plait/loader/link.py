"""Mini-batches of links with the sampled neighbourhoods of their ends, as PyG's LinkNeighborLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.loader import LinkNeighborLoader as PyGLinkNeighborLoader

from plait.errors import InputError
from plait.loader.adapter import NumberedSampler, checked_data, make_sampler, picked_seed
from plait.loader.assemble import Assembler, checked_features
from plait.loader.epochs import Epochs, Job, shuffled
from plait.loader.neighbor import counted, in_order, stored_features, the_cache
from plait.loader.sampler import Sampler

__all__ = ["LinkNeighborLoader"]


class LinkNeighborLoader(Epochs, PyGLinkNeighborLoader):  # type: ignore[misc]  # torch_geometric ships no types
    """PyG's LinkNeighborLoader: its arguments, its batches, negatives included, and no compiled wheel needed.

    What plait adds (prefetch, budget_bytes, features, seed, method, batch_dependency) is said at
    NeighborLoader. Negatives are PyG's: uniform or weighted nodes, an existing edge now and then among them.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
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
        if (edge_label_time is None) != (time_attr is None):
            raise InputError("edge_label_time and time_attr go together; give both or neither")
        rows = checked_features(stored_features(data, features))
        plain = counted(checked_data(data), rows)
        seed = picked_seed(seed)
        links = _checked_links(plain, edge_label_index, edge_label, edge_label_time)
        if neighbor_sampler is None:
            neighbor_sampler = make_sampler(
                plain,
                num_neighbors,
                int(plain.num_nodes),
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
            edge_label_index=links,
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            neg_sampling=neg_sampling,
            neg_sampling_ratio=neg_sampling_ratio,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **shuffled(links.size(1), seed, kwargs),
        )
        self._check_workers()

    def __call__(self, index: Any) -> Any:
        """The batch of these inputs, drawn as batch 0 of the next epoch."""
        return self.fill(self.draw(Job(self.epoch, 0, index)))

    def draw(self, job: Job) -> Any:
        """The sample of a job as PyG's SamplerOutput."""
        inputs = self.input_data[job.index]
        sampler, negatives = self.link_sampler, self.neg_sampling
        if isinstance(sampler, NumberedSampler):
            out = sampler.sample_from_edges(inputs, negatives, job.epoch, job.number)
        else:
            out = in_order(sampler.sample_from_edges(inputs, neg_sampling=negatives), sampler)
        return out if self.transform_sampler_output is None else self.transform_sampler_output(out)

    def fill(self, drawn: Any) -> Any:
        """The batch of a sample: attributes of its nodes and edges, labels or triplets, PyG's bookkeeping."""
        data = self._assemble(drawn)
        data.input_id = drawn.metadata[0]
        if self.neg_sampling is not None and self.neg_sampling.is_triplet():
            _, data.src_index, data.dst_pos_index, data.dst_neg_index, data.seed_time = drawn.metadata
            for name in ("edge_label_index", "edge_label_time"):  # those of the data, if it had any
                if name in data:
                    delattr(data, name)
        else:
            _, data.edge_label_index, data.edge_label, data.edge_label_time = drawn.metadata
        return data if self.transform is None else self.transform(data)

    filter_fn = fill


def _checked_links(data: Any, links: Any, label: Tensor | None, time: Tensor | None) -> Tensor:
    """The seed links as [2, E]; all edges when none are given."""
    if links is None:
        given: Tensor = data.edge_index
    elif isinstance(links, tuple) and links and isinstance(links[0], str | tuple):
        raise InputError("edge_label_index names an edge type; Data has one, give a [2, E] tensor")
    else:
        given = links if isinstance(links, Tensor) else torch.as_tensor(links)
    if given.dim() != 2 or given.size(0) != 2 or given.is_floating_point():
        raise InputError(
            f"edge_label_index has shape {tuple(given.shape)} and type {given.dtype}; "
            "give whole numbers [2, E]"
        )
    if given.numel() and (int(given.min()) < 0 or int(given.max()) >= data.num_nodes):
        bad = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise InputError(f"edge_label_index holds {bad}, but nodes are numbered 0 to {data.num_nodes - 1}")
    for name, value in (("edge_label", label), ("edge_label_time", time)):
        if value is not None and value.size(0) != given.size(1):
            raise InputError(f"{name} has {value.size(0)} entries for {given.size(1)} links; give one each")
    return given
