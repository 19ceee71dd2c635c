"""Data, stores and features as users hand them over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToSparseTensor

from plait.errors import InputError
from plait.features.cache import Cache
from plait.loader.inputs import checked_data, checked_rows, the_cache
from tests.loader.batches import small_hetero


def test_data_is_itself() -> None:
    data = Data(x=torch.zeros(2, 1), edge_index=torch.zeros(2, 0, dtype=torch.long))
    assert checked_data(data) is data


def test_a_torch_sparse_matrix_for_edges_is_refused_by_name() -> None:
    data = Data(x=torch.zeros(2, 1), edge_index=torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(InputError, match=r"adj_t is a torch sparse tensor.*set edge_index"):
        checked_data(ToSparseTensor(layout=torch.sparse_csr)(data.clone()))
    data.edge_index = torch.sparse_coo_tensor(data.edge_index, torch.ones(2), (2, 2))
    with pytest.raises(InputError, match=r"edge_index is a torch sparse tensor.*a list \[2, edges\]"):
        checked_data(data)


def test_typed_stores_become_typed_data() -> None:
    data = small_hetero()
    made = checked_data((data, data))
    assert isinstance(made, HeteroData)
    assert set(made.edge_types) == set(data.edge_types)
    for kind in data.node_types:
        assert made[kind].num_nodes == data[kind].num_nodes
    _, rows = checked_rows((data, data), made, None)
    taken = rows["paper", "x"].take(np.array([3, 1]))
    assert np.array_equal(taken, data["paper"].x[[3, 1]])


def test_a_store_without_the_attribute_is_refused() -> None:
    with pytest.raises(InputError, match="it has x"):
        checked_rows(None, Data(), {"z": Data(x=torch.zeros(3, 1))})


def test_features_of_typed_nodes_go_by_type() -> None:
    data = small_hetero()
    count = data["paper"].num_nodes
    cache = Cache(np.zeros((count, 2)), 3)
    _, rows = checked_rows(data, data, {"paper": cache, "author": {"z": np.zeros((40, 1))}})
    assert set(rows) == {("paper", "x"), ("author", "z")}
    assert the_cache(rows) == ("paper", cache)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((5, 1)), "by node type"),
        ({"paper": np.zeros((5, 1))}, r"features\['paper'\]\['x'\] has 5 rows"),
    ],
)
def test_bad_features_of_typed_nodes_are_refused(features: Any, message: str) -> None:
    data = small_hetero()
    with pytest.raises(InputError, match=message):
        checked_rows(data, data, features)
