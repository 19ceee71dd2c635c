"""bench/problem: the input has no ties, the weights are the same every run, forms are made once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.bench.cases import EVERY_LAYER
from plait.bench.problem import Forms, Problem, build_layer, edge_index_of, hidden_features
from plait.errors import InputError
from plait.graph import Graph, generate


@pytest.mark.parametrize("nodes", [1, 2, 7, 1000])
def test_features_have_no_value_twice_and_no_zero(nodes: int) -> None:
    x = hidden_features(nodes, 9).numpy()
    assert x.shape == (nodes, 9)
    assert x.dtype == np.float32
    assert all(np.unique(column).size == nodes for column in x.T)
    assert (x != 0.0).all()


def test_features_have_about_unit_variance() -> None:
    assert hidden_features(5000, 8).std().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("kind", EVERY_LAYER)
def test_layers_are_built_with_the_same_weights_every_time(kind: str) -> None:
    before = torch.get_rng_state()
    first, second = build_layer(kind, 5, 3), build_layer(kind, 5, 3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(InputError, match="known are"):
        build_layer("gcm", 5, 3)


def test_edges_come_by_source_then_target() -> None:
    graph = Graph.from_edge_index([2, 0, 1, 0], [0, 2, 0, 1], 3)
    assert edge_index_of(graph).tolist() == [[0, 0, 1, 2], [1, 2, 0, 0]]


def test_forms_are_made_once() -> None:
    forms = Forms.of(generate.grid(3, 3))
    assert forms.normalised(True)[0] is forms.normalised(True)[0]
    assert forms.normalised(True)[0].shape[1] == forms.normalised(False)[0].shape[1] + 9


def test_a_given_layer_is_used_and_the_input_wants_a_gradient() -> None:
    layer = build_layer("gcn", 4, 2)
    problem = Problem("gcn", Forms.of(generate.star(5)), 4, 2, layer)
    assert problem.layer is layer
    assert problem.x.requires_grad
    assert problem.cotangent.shape == (5, 2)
