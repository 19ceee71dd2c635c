"""Mini-batches: neighbour sampling on CSR, and what turns samples into batches.

Names are loaded when first used, so that the sampler can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.loader.cluster import ClusterData as ClusterData
    from plait.loader.cluster import ClusterLoader as ClusterLoader
    from plait.loader.hetero import HeteroSampler as HeteroSampler
    from plait.loader.layerwise import inference as inference
    from plait.loader.link import LinkNeighborLoader as LinkNeighborLoader
    from plait.loader.neighbor import NeighborLoader as NeighborLoader
    from plait.loader.prefetch import Prefetch as Prefetch
    from plait.loader.sampler import Sample as Sample
    from plait.loader.sampler import Sampler as Sampler

_HOME = {
    "ClusterData": "plait.loader.cluster",
    "ClusterLoader": "plait.loader.cluster",
    "HeteroSampler": "plait.loader.hetero",
    "LinkNeighborLoader": "plait.loader.link",
    "NeighborLoader": "plait.loader.neighbor",
    "Prefetch": "plait.loader.prefetch",
    "Sample": "plait.loader.sampler",
    "Sampler": "plait.loader.sampler",
    "inference": "plait.loader.layerwise",
}

__all__ = [
    "ClusterData", "ClusterLoader", "HeteroSampler", "LinkNeighborLoader", "NeighborLoader", "Prefetch",
    "Sample", "Sampler", "inference",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"plait.loader has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
