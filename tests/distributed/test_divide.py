"""Folders of parts: what is written is the graph again, bad files are named, runs go on."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from plait.distributed import Parts, files, partition
from plait.errors import InputError, PartsError
from plait.graph import Graph, LoadedGraph, SparseFeatures, generate


def divided(tmp_path: Path, loaded: Any, parts: int = 3, **options: Any) -> Parts:
    return partition(loaded, parts, tmp_path / "parts", file=io.StringIO(), **{"method": "random", **options})


def sbm(nodes: int = 90) -> LoadedGraph:
    return generate.sbm(nodes, 3, features=5)


ODD = {
    "no edges": Graph.from_edge_index([], [], num_nodes=7),
    "loops, repeats, isolated": Graph.from_edge_index([0, 0, 1, 1, 5], [0, 1, 1, 1, 2], num_nodes=9),
    "hub": generate.star(20),
    "directed": Graph.from_edge_index([0, 1, 2, 3, 4, 5], [5, 5, 1, 0, 3, 2], num_nodes=6),
}


def edges(graph: Graph, names: np.ndarray) -> list[tuple[int, int]]:
    return sorted(zip(names[graph.indices].tolist(), names[graph.edge_rows()].tolist(), strict=True))


@pytest.mark.parametrize("graph", ODD.values(), ids=ODD)
@pytest.mark.parametrize("method", ["random", "fennel"])
def test_the_parts_are_the_graph_under_other_numbers(tmp_path: Path, graph: Graph, method: str) -> None:
    parts = divided(tmp_path, graph, method=method)
    nodes, stored = parts.nodes(), parts.graph()
    assert sorted(nodes) == list(range(graph.num_nodes))
    assert edges(stored, nodes) == edges(graph, np.arange(graph.num_nodes))
    assert all((np.diff(row) >= 0).all() for row in np.split(stored.indices, stored.indptr[1:-1]))


def test_features_labels_and_masks_follow_their_nodes(tmp_path: Path) -> None:
    loaded = sbm()
    parts = divided(tmp_path, loaded)
    nodes = parts.nodes()
    rows = np.concatenate([parts.x(p) for p in range(3)])
    assert np.array_equal(rows, loaded.x[nodes])
    assert np.array_equal(parts.y(), loaded.y[nodes])
    for name in ("train", "val", "test"):
        assert set(nodes[parts.split(name)]) == set(np.flatnonzero(loaded.masks[name]))
    assert np.array_equal(parts.owners(np.arange(90)), np.repeat(np.arange(3), np.diff(parts.bounds)))


def test_sparse_features_are_stored_dense(tmp_path: Path) -> None:
    dense = np.where(np.random.default_rng(0).random((30, 8)) < 0.3, 1.5, 0).astype(np.float32)
    rows, columns = np.nonzero(dense)
    pointer = np.concatenate(([0], np.cumsum((dense != 0).sum(axis=1))))
    x = SparseFeatures(pointer, columns.astype(np.int32), dense[rows, columns], (30, 8))
    parts = divided(tmp_path, LoadedGraph(generate.star(30), x))
    assert np.array_equal(np.concatenate([parts.x(p) for p in range(3)]), dense[parts.nodes()])


def test_halos_and_statistics_count_what_a_loop_counts(tmp_path: Path) -> None:
    loaded = sbm()
    parts = divided(tmp_path, loaded)
    graph, owner = parts.graph(), parts.owners(np.arange(90))
    pairs = list(zip(graph.indices, graph.edge_rows(), strict=True))
    for p, counted in enumerate(parts.manifest.statistics["parts"]):
        inward = [(u, v) for u, v in pairs if owner[v] == p]
        outside = {u for u, v in inward if owner[u] != p}
        assert parts.halo(p).tolist() == sorted(outside)
        assert counted["halo"] == len(outside)
        assert counted["edges"] == len(inward)
        assert counted["cut_edges"] == sum(owner[u] != p for u, _ in inward)
        assert counted["nodes"] == (owner == p).sum()
        assert 0 < counted["remote_rows"] <= 60  # one batch: at most every node of the others


def test_a_pyg_data_is_taken(tmp_path: Path) -> None:
    loaded = sbm()
    edge_index = np.stack((loaded.graph.indices, loaded.graph.edge_rows())).astype(np.int64)
    data = Data(
        x=torch.from_numpy(loaded.x),
        y=torch.from_numpy(loaded.y),
        edge_index=torch.from_numpy(edge_index),
        train_mask=torch.from_numpy(loaded.masks["train"]),
    )
    parts = divided(tmp_path, data)
    assert np.array_equal(parts.x(1), loaded.x[parts.nodes()][parts.bounds[1] : parts.bounds[2]])
    assert parts.split("train").size == loaded.masks["train"].sum()
    with pytest.raises(InputError, match="no val mask"):
        parts.split("val")


def test_an_assignment_is_followed(tmp_path: Path) -> None:
    given = np.arange(90) % 3
    parts = divided(tmp_path, sbm(), assignment=given)
    assert np.array_equal(given[parts.nodes()], parts.owners(np.arange(90)))
    assert parts.manifest.method == "given"


def test_nothing_is_pickled_and_no_partial_file_stays(tmp_path: Path) -> None:
    parts = divided(tmp_path, sbm())
    found = sorted(path.name for path in parts.folder.iterdir())
    assert found == sorted([*parts.manifest.files, "manifest.json"])
    assert all(name.endswith(".npy") for name in parts.manifest.files)


@pytest.mark.parametrize("name", ["part-1.x.npy", "indices.npy", "part-2.halo.npy"])
def test_a_changed_file_is_named_on_request(tmp_path: Path, name: str) -> None:
    parts = divided(tmp_path, sbm())
    content = bytearray((parts.folder / name).read_bytes())
    content[-3] ^= 1
    (parts.folder / name).write_bytes(content)
    Parts(parts.folder)
    with pytest.raises(PartsError, match=name):
        Parts(parts.folder, verify=True)


def test_a_full_disk_leaves_no_half_file_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []

    def full(handle: int) -> None:
        flushed.append(handle)
        if len(flushed) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", full)
        with pytest.raises(PartsError, match=r"cannot write .* make room"):
            divided(tmp_path, sbm())
    assert not list((tmp_path / "parts").glob(".*"))
    with pytest.raises(PartsError, match="was not finished"):
        Parts(tmp_path / "parts")
    Parts(divided(tmp_path, sbm()).folder, verify=True)


def test_a_file_cut_short_is_named_when_it_is_opened(tmp_path: Path) -> None:
    parts = divided(tmp_path, sbm())
    path = parts.folder / "part-0.x.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(PartsError, match=r"part-0\.x\.npy has"):
        Parts(parts.folder).x(0)
    path.unlink()
    with pytest.raises(PartsError, match=r"part-0\.x\.npy"):
        Parts(parts.folder).x(0)


def test_a_second_run_writes_only_what_is_missing_or_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = divided(tmp_path, sbm())
    (parts.folder / "part-0.x.npy").unlink()
    damaged = parts.folder / "indices.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    written: list[str] = []

    def counted(path: Path, *rest: Any) -> Any:
        written.append(path.name)
        return files.write_array(path, *rest)

    monkeypatch.setattr("plait.distributed.divide.write_array", counted)
    monkeypatch.setattr("plait.distributed.divide.assign", lambda *a, **k: pytest.fail("assigned again"))
    again = divided(tmp_path, sbm())
    assert sorted(written) == ["indices.npy", "part-0.x.npy"]
    Parts(again.folder, verify=True)


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, part: int, nodes: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("plait.distributed.divide._Division._features", interrupted)
        with pytest.raises(KeyboardInterrupt):
            divided(tmp_path, sbm())
    with pytest.raises(PartsError, match="not finished"):
        Parts(tmp_path / "parts")
    monkeypatch.setattr("plait.distributed.divide.assign", lambda *a, **k: pytest.fail("assigned again"))
    Parts(divided(tmp_path, sbm()).folder, verify=True)


def test_parts_of_another_graph_are_not_overwritten_unasked(tmp_path: Path) -> None:
    divided(tmp_path, sbm())
    with pytest.raises(InputError, match="another graph"):
        divided(tmp_path, sbm(80))
    assert divided(tmp_path, sbm(80), overwrite=True).num_nodes == 80


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"bounds": [0, 5, 3, 90]},
        {"bounds": [0, 30, 60, 91]},
        {"parts": "3"},
        {"files": {"x": 3}},
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    parts = divided(tmp_path, sbm())
    path = parts.folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PartsError, match=r"manifest\.json"):
        Parts(parts.folder)
    path.write_text("{")
    with pytest.raises(PartsError, match="JSON"):
        Parts(parts.folder)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for message, options in {
        "assignment": {"assignment": [0, 1]},
        "parts are numbered": {"assignment": np.full(90, 3)},
        "method": {"method": "cut"},
        "batch_size": {"batch_size": 0},
        "parts=0": {"parts": 0},
    }.items():
        with pytest.raises(InputError, match=message):
            divided(tmp_path, sbm(), **{"overwrite": True, **options})
    with pytest.raises(InputError, match="list is not a graph"):
        divided(tmp_path, [])
    with pytest.raises(PartsError, match="no manifest"):
        Parts(tmp_path / "nowhere")
