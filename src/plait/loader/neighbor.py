"""Mini-batches of nodes with their sampled neighbourhoods: PyG's NeighborLoader on another sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.loader import NeighborLoader as PyGNeighborLoader

from plait.errors import InputError
from plait.loader.adapter import NumberedSampler
from plait.loader.epochs import Job, shuffled
from plait.loader.inputs import checked_nodes
from plait.loader.sampled import SampledEpochs, in_order

__all__ = ["NeighborLoader"]


class NeighborLoader(SampledEpochs, PyGNeighborLoader):  # type: ignore[misc]  # torch_geometric ships no types
    """PyG's NeighborLoader: its arguments, its batches, and no compiled wheel needed.

    The batches do not depend on `prefetch` or `num_workers`. Arguments that PyG's loader does not have:

    prefetch: the number of batches prepared ahead, in threads; `budget_bytes` bounds the memory they take.
    features: rows that are not in `data`: an array, the path of a .npy file, a function of ids, a PyG
        FeatureStore or a plait Cache. A single one is `x`; give a dict by attribute name for several, and for
        HeteroData a dict of these by node type.
    seed: fixes all draws; without it one is taken from torch's generator.
    method, batch_dependency: of the sampler; "labor" makes the samples of a batch share sources.
    device: where batches are copied while the previous one is being used.
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
        device: Any = None,
        **kwargs: Any,
    ) -> None:
        """`is_sorted` is accepted and not needed: a sorted edge_index is recognised."""
        if input_time is not None and time_attr is None:
            raise InputError(
                "input_time was given without time_attr; name the attribute that dates neighbours"
            )
        plain, neighbor_sampler = self._prepared(
            data, num_neighbors, neighbor_sampler, features=features, seed=seed, prefetch=prefetch,
            budget_bytes=budget_bytes, device=device, replace=replace, subgraph_type=subgraph_type,
            disjoint=disjoint, temporal_strategy=temporal_strategy, time_attr=time_attr,
            weight_attr=weight_attr, directed=directed, method=method, batch_dependency=batch_dependency,
        )  # fmt: skip
        nodes, count = checked_nodes(plain, input_nodes)
        if input_time is not None and input_time.numel() != count:
            raise InputError(
                f"input_time has {input_time.numel()} entries for {count} input nodes; give one each"
            )
        super().__init__(
            plain, num_neighbors, input_nodes=nodes, input_time=input_time, transform=transform,
            transform_sampler_output=transform_sampler_output, filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler, time_attr=time_attr, **shuffled(count, self.seed, kwargs),
        )  # fmt: skip
        self._check_workers()

    def _drawn(self, inputs: Any, job: Job) -> Any:
        sampler = self.node_sampler
        if isinstance(sampler, NumberedSampler):
            return sampler.sample_from_nodes(inputs, job.epoch, job.number)
        return in_order(sampler.sample_from_nodes(inputs), sampler)

    def _mark(self, data: Any, metadata: Any) -> None:
        self._mark_inputs(data._store, metadata)

    def _mark_typed(self, data: Any, metadata: Any, kind: Any) -> None:
        self._mark_inputs(data[kind], metadata)

    def _mark_inputs(self, store: Any, metadata: Any) -> None:
        store["input_id"], store["seed_time"] = metadata[0], metadata[1]
        store["batch_size"] = metadata[0].size(0)
