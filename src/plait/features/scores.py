"""How hot a feature row will be, before training: by degree, by presampling, by inclusion probability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plait.errors import InputError
from plait.graph.compiled import compiled

if TYPE_CHECKING:
    from plait.graph import Graph

__all__ = ["degree", "inclusion_probability", "presample"]

Array = NDArray[Any]


def degree(graph: Graph) -> Array:
    """Out-degrees: how many targets could need the row. For a symmetric graph the usual degree."""
    return np.bincount(graph.indices, minlength=graph.num_sources)


def presample(batches: Iterable[ArrayLike], num_nodes: int) -> Array:
    """How many of the sampled `batches` (arrays of node ids) contain each node (GNNLab's PreSC).

    An epoch of fewer than 32 batches tells too little: draw several.
    """
    counts = np.zeros(num_nodes, np.int64)
    for nodes in batches:
        counts[np.unique(np.asarray(nodes))] += 1
    return counts


def inclusion_probability(graph: Graph, fanout: Sequence[int], train: ArrayLike, batch_size: int) -> Array:
    """The probability that a batch of `batch_size` nodes of `train` samples each node (VIP, SALIENT++).

    p_0(v) = batch_size / |train| on train, else 0; p_h(v) = 1 - prod over edges v -> u of
    (1 - min(1, fanout_h / degree(u)) p_{h-1}(u)); the answer is 1 - prod over h of (1 - p_h(v)).
    """
    nodes = np.asarray(train)
    if nodes.ndim != 1 or nodes.size == 0:
        raise InputError(f"train must list at least one node; got shape {nodes.shape}")
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size}: a batch has at least one node")
    if nodes.min() < 0 or nodes.max() >= graph.num_nodes:
        raise InputError(f"train: nodes are numbered 0 to {graph.num_nodes - 1}")
    current = np.zeros(graph.num_nodes)
    current[nodes] = min(1.0, batch_size / nodes.size)
    missed = 1.0 - current
    degrees = np.maximum(np.diff(graph.indptr), 1)
    for k in fanout:
        chance = current if k < 0 else np.minimum(1.0, k / degrees) * current
        absent = np.ones(graph.num_sources)
        _absent(graph.indptr, graph.indices, chance, absent)
        current = 1.0 - absent
        missed *= absent
    return np.asarray(1.0 - missed)


@compiled
def _absent(indptr: Any, indices: Any, chance: Any, absent: Any) -> None:
    for target in range(indptr.size - 1):
        stay = 1.0 - chance[target]
        if stay < 1.0:
            for p in range(indptr[target], indptr[target + 1]):
                absent[indices[p]] *= stay
