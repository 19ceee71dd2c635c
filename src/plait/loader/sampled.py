"""What the loaders of sampled neighbourhoods share: their settings, their samples, their bookkeeping."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.sampler import HeteroSamplerOutput

from plait.loader.adapter import NumberedSampler, make_sampler, picked_seed
from plait.loader.assemble import Assembler
from plait.loader.epochs import Epochs, Job
from plait.loader.hetero import HeteroSampler
from plait.loader.inputs import checked_data, checked_rows, the_cache
from plait.loader.sampler import Sampler

__all__ = ["SampledEpochs", "in_order"]


class SampledEpochs(Epochs):
    """Epochs of sampled neighbourhoods; a loader says how inputs are `_drawn` and how a batch is marked."""

    def _prepared(
        self,
        data: Any,
        num_neighbors: Any,
        neighbor_sampler: Any,
        *,
        features: Any,
        seed: int | None,
        prefetch: int,
        budget_bytes: int | None,
        device: Any,
        **sampling: Any,
    ) -> tuple[Any, Any]:
        """The data as it is sampled, and the sampler; before the DataLoader is initialised."""
        plain, rows = checked_rows(data, checked_data(data), features)
        seed = picked_seed(seed)
        if neighbor_sampler is None:
            neighbor_sampler = make_sampler(plain, num_neighbors, seed=seed, **sampling)
        elif isinstance(neighbor_sampler, Sampler | HeteroSampler):
            neighbor_sampler = NumberedSampler(neighbor_sampler)
        kind, cache = the_cache(rows)
        self._set_out(seed, prefetch, budget_bytes, cache, kind, device)
        self._assemble = Assembler(plain, rows)
        return plain, neighbor_sampler

    def __call__(self, index: Any) -> Any:
        """The batch of these inputs, drawn as batch 0 of the next epoch."""
        return self.fill(self.draw(Job(self.epoch, 0, index)))

    def draw(self, job: Job) -> Any:
        """The sample of a job as PyG's SamplerOutput."""
        loader: Any = self
        out = self._drawn(loader.input_data[job.index], job)
        return out if loader.transform_sampler_output is None else loader.transform_sampler_output(out)

    def fill(self, drawn: Any) -> Any:
        """The batch of a sample: attributes of its nodes and edges, and PyG's bookkeeping."""
        loader: Any = self
        data = self._assemble(drawn)
        if isinstance(drawn, HeteroSamplerOutput):
            self._mark_typed(data, drawn.metadata, loader.input_data.input_type)
        else:
            self._mark(data, drawn.metadata)
        return data if loader.transform is None else loader.transform(data)

    filter_fn = fill

    def _drawn(self, inputs: Any, job: Job) -> Any:
        raise NotImplementedError

    def _mark(self, data: Any, metadata: Any) -> None:
        """Adds what the batch was drawn for."""
        raise NotImplementedError

    def _mark_typed(self, data: Any, metadata: Any, kind: Any) -> None:
        """As `_mark`, where there are several types and `kind` is that of the inputs."""
        raise NotImplementedError


def in_order(drawn: Any, sampler: Any) -> Any:
    """The sample with its edges by the caller's numbers; plait's own already are."""
    order = sampler.edge_permutation
    if order is None or drawn.edge is None:
        return drawn
    if isinstance(order, dict):
        for kind, edge in drawn.edge.items():
            if edge is not None and order.get(kind) is not None:
                drawn.edge[kind] = order[kind][edge.to(torch.long)]
    else:
        drawn.edge = order[drawn.edge.to(torch.long)]
    return drawn
