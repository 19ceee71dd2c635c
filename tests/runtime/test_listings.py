"""Graphs that come once: how long they are kept."""

from __future__ import annotations

import gc

import torch

from plait.runtime.listings import Listings


def test_a_graph_is_handed_on_when_the_model_comes_back_to_it() -> None:
    listings, edges = Listings(), torch.zeros((2, 3))
    first = listings.of("key", edges, 1)
    assert first is not None
    assert listings.of("key", edges, 1) is first
    assert listings.of("key", edges, 2) is first
    assert listings.of("key", edges, 3) is None
    assert listings.of("key", edges, 3) is None


def test_few_are_kept_and_none_whose_tensor_is_gone() -> None:
    listings = Listings()
    tensors = [torch.zeros((2, 3)) for _ in range(9)]
    for number, edges in enumerate(tensors):
        listings.of(number, edges, number)
    assert len(listings) == 4
    del edges, tensors
    gc.collect()
    listings.of("next", torch.zeros(2, 1), 10)
    assert len(listings) == 1
