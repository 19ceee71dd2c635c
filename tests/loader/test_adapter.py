"""What PyG's loaders ask of a sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_geometric.sampler import BaseSampler, NegativeSampling, NodeSamplerInput

from plait.errors import InputError
from plait.graph import Graph
from plait.loader import Sampler
from plait.loader.adapter import NumberedSampler, _SeededNegatives, picked_seed
from tests.loader.batches import small_data


def test_it_is_a_sampler_of_pyg() -> None:
    data = small_data()
    sampler = Sampler(Graph.from_any(data), [3], seed=4)
    numbered = NumberedSampler(sampler)
    assert isinstance(numbered, BaseSampler)
    nodes = torch.tensor([5, 1])
    out = numbered.sample_from_nodes(NodeSamplerInput(torch.arange(2), nodes), epoch=2, batch=3)
    assert np.array_equal(out.node, sampler.sample(nodes.numpy(), 2, 3).n_id)
    assert numbered.edge_permutation is None


def test_negatives_repeat_and_do_not_touch_torchs_generator() -> None:
    like = NegativeSampling("binary", 1)
    before = torch.get_rng_state()
    one, two = (_SeededNegatives(like, 7).sample(20, "src", 100) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, _SeededNegatives(like, 8).sample(20, "src", 100))


def test_weights_of_another_graph_are_refused() -> None:
    like = NegativeSampling("triplet", 1, dst_weight=torch.ones(5))
    with pytest.raises(InputError, match="dst_weight has 5"):
        _SeededNegatives(like, 0).sample(3, "dst", 9)


def test_a_seed_is_kept_or_drawn_from_torch() -> None:
    assert picked_seed(5) == 5
    torch.manual_seed(1)
    first = picked_seed(None)
    torch.manual_seed(1)
    assert picked_seed(None) == first
