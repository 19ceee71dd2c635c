"""bench/task: tasks from files and generators, splits, and the models trained on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.bench.task import STACKS, build_model, build_stack, explain_data, load_task
from plait.errors import InputError
from plait.graph import LoadedGraph, generate


def test_a_task_keeps_the_split_of_its_graph() -> None:
    loaded = generate.sbm(60, features=5)
    task = load_task(loaded, "sbm")
    assert task.train_mask.numpy().tolist() == loaded.masks["train"].tolist()
    assert task.num_classes == 4
    assert task.train_rows.tolist() == np.flatnonzero(loaded.masks["train"]).tolist()


def test_a_graph_without_a_split_gets_a_tenth_of_its_labels_the_same_every_time() -> None:
    loaded = generate.sbm(200, features=5)
    labels = loaded.y.copy()
    labels[:50] = -1
    bare = LoadedGraph(loaded.graph, loaded.x, labels)
    first, second = load_task(bare, "bare"), load_task(bare, "bare")
    assert int(first.train_mask.sum()) == 15
    assert torch.equal(first.train_mask, second.train_mask)
    assert not first.train_mask[:50].any()
    assert not (first.train_mask & first.test_mask).any()


def test_the_first_of_several_splits_is_taken() -> None:
    loaded = generate.sbm(40, features=5)
    masks = {name: np.stack([mask, ~mask]) for name, mask in loaded.masks.items()}
    task = load_task(LoadedGraph(loaded.graph, loaded.x, loaded.y, masks), "splits")
    assert task.train_mask.tolist() == loaded.masks["train"].tolist()


def test_a_graph_without_features_cannot_be_trained_on() -> None:
    with pytest.raises(InputError, match="needs features and one label per node"):
        load_task(LoadedGraph(generate.star(5)), "star")


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin"])
def test_models_are_the_same_every_time_and_end_in_the_classes(kind: str) -> None:
    first, second = build_model(kind, 5, 3), build_model(kind, 5, 3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first(torch.ones(4, 5), torch.tensor([[0, 1], [1, 2]])).shape == (4, 3)


@pytest.mark.parametrize("kind", STACKS)
def test_stacks_have_a_layer_for_every_pair_of_widths(kind: str) -> None:
    model = build_stack(kind, (6, 5, 4, 3))
    assert len(model.convs) == 3
    assert model(torch.ones(4, 6), torch.tensor([[0, 1], [1, 2]])).shape == (4, 3)


def test_widths_default_to_features_hidden_and_classes() -> None:
    data, widths, note = explain_data("sbm:num_nodes=50,features=7", None, None)
    assert widths == (7, 64, 4)
    assert data.x.shape == (50, 7)
    assert note == ""


def test_features_of_another_width_are_made_up_and_that_is_said() -> None:
    data, widths, note = explain_data("star:n=9", None, (12, 3))
    assert data.x.shape == (9, 12)
    assert widths == (12, 3)
    assert "random" in note


def test_a_graph_without_features_gets_64_columns_and_that_is_said() -> None:
    data, widths, note = explain_data("star:n=9", None, None)
    assert widths == (64, 64, 64)
    assert data.x.shape == (9, 64)
    assert "64 random columns" in note
    assert "--widths" in note
