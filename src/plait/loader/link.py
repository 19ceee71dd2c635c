"""Mini-batches of links with the sampled neighbourhoods of their ends, as PyG's LinkNeighborLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.loader import LinkNeighborLoader as PyGLinkNeighborLoader

from plait.errors import InputError
from plait.loader.adapter import NumberedSampler
from plait.loader.epochs import Job, shuffled
from plait.loader.inputs import checked_links
from plait.loader.sampled import SampledEpochs, in_order

__all__ = ["LinkNeighborLoader"]


class LinkNeighborLoader(SampledEpochs, PyGLinkNeighborLoader):  # type: ignore[misc]  # torch_geometric ships no types
    """PyG's LinkNeighborLoader: its arguments, its batches, negatives included, and no compiled wheel needed.

    NeighborLoader explains plait's own arguments (prefetch, budget_bytes, features, seed, method,
    batch_dependency, device). Negatives are PyG's: uniform or weighted nodes, so a few are existing edges.
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
        device: Any = None,
        **kwargs: Any,
    ) -> None:
        """`is_sorted` is accepted and not needed: a sorted edge_index is recognised."""
        if (edge_label_time is None) != (time_attr is None):
            raise InputError("edge_label_time and time_attr go together; give both or neither")
        plain, neighbor_sampler = self._prepared(
            data, num_neighbors, neighbor_sampler, features=features, seed=seed, prefetch=prefetch,
            budget_bytes=budget_bytes, device=device, replace=replace, subgraph_type=subgraph_type,
            disjoint=disjoint, temporal_strategy=temporal_strategy, time_attr=time_attr,
            weight_attr=weight_attr, directed=directed, method=method, batch_dependency=batch_dependency,
        )  # fmt: skip
        links, count = checked_links(plain, edge_label_index, edge_label, edge_label_time)
        super().__init__(
            plain, num_neighbors, edge_label_index=links, edge_label=edge_label,
            edge_label_time=edge_label_time, neg_sampling=neg_sampling, neg_sampling_ratio=neg_sampling_ratio,
            time_attr=time_attr, transform=transform, transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker, neighbor_sampler=neighbor_sampler,
            **shuffled(count, self.seed, kwargs),
        )  # fmt: skip
        self._check_workers()

    def _drawn(self, inputs: Any, job: Job) -> Any:
        sampler, negatives = self.link_sampler, self.neg_sampling
        if isinstance(sampler, NumberedSampler):
            return sampler.sample_from_edges(inputs, negatives, job.epoch, job.number)
        return in_order(sampler.sample_from_edges(inputs, neg_sampling=negatives), sampler)

    def _mark(self, data: Any, metadata: Any) -> None:
        self._mark_links(data, data, data, metadata)

    def _mark_typed(self, data: Any, metadata: Any, kind: Any) -> None:
        self._mark_links(data[kind], data[kind[0]], data[kind[-1]], metadata)

    def _mark_links(self, links: Any, sources: Any, targets: Any, metadata: Any) -> None:
        """Labels go with the links, triplets with the nodes at their ends."""
        links.input_id = metadata[0]
        if self.neg_sampling is None or not self.neg_sampling.is_triplet():
            _, links.edge_label_index, links.edge_label, links.edge_label_time = metadata
            return
        _, sources.src_index, targets.dst_pos_index, targets.dst_neg_index, time = metadata
        sources.seed_time = targets.seed_time = time
        for name in ("edge_label_index", "edge_label_time"):  # those of the data, if it had any
            if name in links:
                delattr(links, name)
