"""io.py: what is saved comes back, the shared real graphs are read, damaged files are refused."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from plait.errors import GraphError
from plait.graph import Graph, SparseFeatures, generate, load, load_arrays, save

from .reference import dense, lists_of, random_graph

DATA = Path(os.environ.get("PLAIT_DATA", Path(__file__).parents[3] / "shared" / "data"))


def shared(name):
    path = DATA / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"{path} is not there; set PLAIT_DATA to the folder of real graphs")
    return path


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    "graph",
    [
        random_graph(0),
        random_graph(0).with_self_loops(),
        Graph.from_edge_index([0, 4], [1, 1], 3, 7),
        Graph.from_edge_index([], [], 5),
    ],
    ids=["random", "looped", "bipartite", "no edges"],
)
def test_a_saved_graph_comes_back(tmp_path, graph, compress):
    path = tmp_path / "a graph"
    save(path, graph, compress)
    back = load(path)
    assert back.fingerprint == graph.fingerprint
    np.testing.assert_array_equal(back.order, graph.order)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a graph"]


def test_features_labels_masks_and_the_rest_come_back(tmp_path):
    made = generate.sbm(60, 3, features=5)
    path = tmp_path / "demo.npz"
    save(
        path,
        made.graph,
        x=made.x,
        y=made.y,
        train_mask=made.masks["train"],
        test_mask=made.masks["test"],
        graph_ptr=np.array([0, 30, 60]),
        edge_weight=np.arange(made.graph.num_edges),
        note=np.array("hello"),
        meta={"name": "demo", "n": 60},
    )
    back = load_arrays(path)
    np.testing.assert_array_equal(back.x, made.x)
    np.testing.assert_array_equal(back.dense_x(), made.x)
    np.testing.assert_array_equal(back.y, made.y)
    assert set(back.masks) == {"train", "test"}
    np.testing.assert_array_equal(back.masks["train"], made.masks["train"])
    assert back.graph_ptr.tolist() == [0, 30, 60]
    assert back.meta == {"name": "demo", "n": 60}
    np.testing.assert_array_equal(back.arrays["edge_weight"], np.arange(made.graph.num_edges))
    assert str(back.arrays["note"]) == "hello"


def test_sparse_features_come_back_and_become_dense(tmp_path):
    x = SparseFeatures(
        np.array([0, 2, 2, 3]), np.array([0, 3, 1]), np.array([1.0, 2.5, 3.0], np.float32), (3, 4)
    )
    expected = [[1, 0, 0, 2.5], [0, 0, 0, 0], [0, 3, 0, 0]]
    np.testing.assert_array_equal(x.to_dense(), expected)
    save(tmp_path / "g.npz", generate.star(3), x=x)
    back = load_arrays(tmp_path / "g.npz")
    assert isinstance(back.x, SparseFeatures)
    np.testing.assert_array_equal(back.dense_x(), expected)


def test_saving_over_a_file_leaves_the_old_one_when_it_fails(tmp_path):
    path = tmp_path / "g.npz"
    save(path, generate.star(3))
    with pytest.raises(GraphError, match="bad has dtype object"):
        save(path, generate.star(9), bad=np.array([{}]))
    with pytest.raises(GraphError, match="'indptr' belongs to the format"):
        save(path, generate.star(9), indptr=np.zeros(3))
    assert load(path).num_nodes == 3
    assert len(list(tmp_path.iterdir())) == 1


def shared_format(path, src, dst, num_nodes, **more):
    """Writes edges the way the shared real graphs are stored: row u lists v for u -> v."""
    by_source = Graph.from_edge_index(dst, src, num_nodes)
    meta = np.array(json.dumps({"name": "made"}))
    np.savez_compressed(
        path, indptr=by_source.indptr.astype(np.int64), indices=by_source.indices, meta=meta, **more
    )
    return by_source


def test_the_shared_format_stores_targets_by_source_so_it_is_turned(tmp_path):
    path = tmp_path / "directed.npz"
    src, dst = np.array([0, 0, 1, 3]), np.array([1, 2, 2, 0])
    shared_format(path, src, dst, 4, edge_type=np.array([10, 11, 12, 13], np.uint8))
    back = load_arrays(path)
    assert lists_of(back.graph) == {0: [3], 1: [0], 2: [0, 1], 3: []}
    kinds = dict(
        zip(
            zip(back.graph.indices, back.graph.edge_rows(), strict=True),
            back.arrays["edge_type"],
            strict=True,
        )
    )
    assert kinds == {(0, 1): 10, (0, 2): 11, (1, 2): 12, (3, 0): 13}
    assert back.meta["name"] == "made"


def test_edge_arrays_of_a_symmetric_shared_file_keep_their_direction(tmp_path):
    path = tmp_path / "symmetric.npz"
    src, dst = np.array([0, 1, 1, 2]), np.array([1, 0, 2, 1])
    shared_format(path, src, dst, 3, edge_type=np.array([1, 10, 12, 21]), y=np.array([0, 1, -1], np.int16))
    back = load_arrays(path)
    assert back.graph.is_symmetric
    kinds = dict(
        zip(
            zip(back.graph.indices, back.graph.edge_rows(), strict=True),
            back.arrays["edge_type"],
            strict=True,
        )
    )
    assert kinds == {(0, 1): 1, (1, 0): 10, (1, 2): 12, (2, 1): 21}
    assert back.y.dtype == np.int64


def test_cora_is_read_as_published():
    cora = load_arrays(shared("cora"))
    assert (cora.graph.num_nodes, cora.graph.num_edges) == (2708, 10556)
    assert cora.graph.is_symmetric
    assert cora.graph.num_self_loops == 0
    assert cora.dense_x().shape == (2708, 1433)
    assert {name: int(mask.sum()) for name, mask in cora.masks.items()} == {
        "train": 140,
        "val": 500,
        "test": 1000,
    }
    assert np.bincount(cora.y).size == 7


def test_a_directed_real_graph_is_turned_to_its_targets():
    path = shared("cit_hepph")
    graph = load(path)
    with np.load(path, allow_pickle=False) as stored:
        np.testing.assert_array_equal(graph.out_degrees, np.diff(stored["indptr"]))
        np.testing.assert_array_equal(
            graph.degrees, np.bincount(stored["indices"], minlength=graph.num_nodes)
        )
    assert graph.num_self_loops == 44
    assert graph.degrees.max() == 846


def test_a_set_of_graphs_keeps_its_borders():
    mutag = load_arrays(shared("tu_mutag"))
    graph_of_node = np.searchsorted(mutag.graph_ptr, np.arange(mutag.graph.num_nodes), side="right")
    assert mutag.graph_ptr.size == 189
    assert (graph_of_node[mutag.graph.indices] == graph_of_node[mutag.graph.edge_rows()]).all()
    assert mutag.arrays["graph_y"].shape == (188,)


def test_every_cut_of_a_file_is_refused(tmp_path):
    path = tmp_path / "g.npz"
    save(path, generate.grid(5, 5), y=np.arange(25))
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:end])
        with pytest.raises(GraphError, match=r"g\.npz"):
            load_arrays(path)


@pytest.mark.parametrize("compress", [False, True])
def test_a_changed_byte_is_refused_or_harmless(tmp_path, compress):
    path = tmp_path / "g.npz"
    graph = generate.grid(6, 6)
    save(path, graph, compress, y=np.arange(36))
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    refused = 0
    for place in rng.integers(0, len(whole), 150):
        damaged = whole.copy()
        damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            back = load_arrays(path)
        except GraphError:
            refused += 1
        else:  # a date or a flag of the archive
            assert back.graph.fingerprint == graph.fingerprint
    assert refused > 50


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def zip_of(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_npy", ".npy"), content)
    return buffer.getvalue()


OWN = {"format": np.array("plait-graph-1"), "num_sources": np.int64(2)}
FOREIGN = {
    "empty": (b"", "not a readable npz"),
    "text": (b"node,edge\n1,2\n", "not a readable npz"),
    "one array": (npy(np.arange(3)), "holds one array"),
    "pickle": (npy(np.array([{}], dtype=object), allow_pickle=True), "not a readable npz"),
    "pickle inside": (
        zip_of(indptr_npy=npy(np.array([{}], dtype=object), allow_pickle=True)),
        "not a readable",
    ),
    "zip of text": (zip_of(indptr_npy=b"hello", indices_npy=b"world"), "g.npz"),
    "other arrays": (npz(a=np.arange(3)), "no indptr and indices"),
    "another format": (npz(format=b"csr", indptr=np.array([0, 1]), indices=np.array([0])), "load_npz"),
    "a later version": (
        npz(format="plait-graph-9", indptr=np.array([0, 0]), indices=np.zeros(0)),
        "plait-graph-9",
    ),
    "indptr too long": (npz(indptr=np.array([0, 5]), indices=np.array([0])), "indptr runs from 0 to 5"),
    "index out of range": (
        npz(**OWN, indptr=np.array([0, 1, 1]), indices=np.array([2])),
        "indices holds node 2",
    ),
    "negative index": (npz(indptr=np.array([0, 1]), indices=np.array([-1])), "indices holds -1"),
    "float index": (npz(indptr=np.array([0, 1]), indices=np.array([0.0])), "dtype float64"),
    "rows not sorted": (
        npz(**OWN, indptr=np.array([0, 2, 2]), indices=np.array([1, 0])),
        "rows are not sorted",
    ),
    "no num_sources": (
        npz(format="plait-graph-1", indptr=np.array([0, 0]), indices=np.zeros(0, int)),
        "num_sources",
    ),
    "order too short": (
        npz(**OWN, indptr=np.array([0, 1, 1]), indices=np.array([0]), order=np.zeros(0, int)),
        "order does not have one number per edge",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_or_damaged_file_is_refused_by_name_and_fault(tmp_path, name):
    content, says = FOREIGN[name]
    path = tmp_path / "g.npz"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"g\.npz") as caught:
        load(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((3, 2))},
        {"y": np.zeros(3)},
        {"train_mask": np.zeros((10, 3), bool)},
        {"x_indptr": np.array([0, 1]), "x_indices": np.array([0]), "x_shape": np.array([4, 2])},
        {"x_indptr": np.array([0, 1, 1, 1, 1]), "x_indices": np.array([2]), "x_shape": np.array([4, 2])},
        {"x_indptr": np.array([0, 1, 0, 1, 1]), "x_indices": np.array([0]), "x_shape": np.array([4, 2])},
        {"x_indptr": np.array([0, 0, 0, 0, 0])},
        {"meta": np.array("{not json")},
    ],
)
def test_arrays_that_do_not_fit_the_graph_are_refused(tmp_path, arrays):
    path = tmp_path / "g.npz"
    graph = generate.star(4)
    path.write_bytes(npz(indptr=graph.indptr, indices=graph.indices, **arrays))
    assert load(path).num_nodes == 4
    with pytest.raises(GraphError, match="do not fit together"):
        load_arrays(path)


def test_edges_listed_as_pyg_does_are_a_graph(tmp_path):
    path = tmp_path / "listed.npz"
    edges = np.array([[2, 0, 1, 0], [1, 2, 2, 1]])
    np.savez(path, edge_index=edges, x=np.zeros((5, 3)), y=np.arange(5), edge_weight=np.array([21, 2, 12, 1]))
    back = load_arrays(path)
    assert lists_of(back.graph) == {0: [], 1: [0, 2], 2: [0, 1], 3: [], 4: []}
    assert back.arrays["edge_weight"].tolist() == [1, 21, 2, 12]  # in the order of the CSR
    assert "edge_index" not in back.arrays
    assert load(path).fingerprint == back.graph.fingerprint
    np.savez(path, edge_index=edges)
    assert load(path).num_nodes == 3  # nothing says that there are more
    np.savez(path, edge_index=edges, num_nodes=7)
    assert load(path).num_nodes == 7


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"edge_index": np.array([[0, 5], [1, 1]]), "x": np.zeros((3, 2))}, "src"),
        ({"edge_index": np.array([[0, 1], [-1, 1]])}, "dst"),
        ({"edge_index": np.zeros((3, 2), int)}, "edge_index"),
        ({"edge_index": np.zeros((2, 2))}, "integer"),
        ({"edge_index": np.array([["a"], ["b"]])}, "integer"),
        ({"edge_index": np.zeros((2, 2), int), "num_nodes": np.array("x")}, "num_nodes"),
        ({"x": np.zeros((3, 2))}, "no edge_index"),
    ],
)
def test_edges_that_are_no_graph_are_refused_with_the_file(tmp_path, arrays, says):
    path = tmp_path / "listed.npz"
    np.savez(path, **arrays)
    for read in (load, load_arrays):
        with pytest.raises(GraphError, match=f"listed.npz.*{says}"):
            read(path)


def test_a_missing_file_is_a_graph_error(tmp_path):
    with pytest.raises(GraphError, match="no such file"):
        load(tmp_path / "nothing.npz")


def test_a_folder_is_a_graph_error(tmp_path):
    with pytest.raises(GraphError, match="not a readable npz"):
        load(tmp_path)


def test_dense_of_a_loaded_graph_agrees_with_the_saved_one(tmp_path):
    graph = random_graph(9, 12, 60)
    save(tmp_path / "g.npz", graph)
    np.testing.assert_array_equal(dense(load(tmp_path / "g.npz")), dense(graph))
