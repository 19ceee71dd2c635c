"""Data for the examples: generated on the spot, or a graph from an npz file; and the clock they share."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch_geometric import seed_everything
from torch_geometric.data import Data, HeteroData

from plait.graph import generate, io

Epoch = Callable[[], float]


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The settings every example understands; an npz file is one that plait.graph.io reads."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000, help="nodes of the generated graph")
    parser.add_argument("--epochs", type=int, default=30, help="epochs to train")
    parser.add_argument("--data", metavar="FILE", help="an npz file with indptr, indices, x, y, train_mask")
    return parser.parse_args(argv)


def train(prepare: Callable[[argparse.Namespace], Epoch]) -> None:
    """Train as the command line says and print the loss and the median time of an epoch."""
    chosen = options()
    seed_everything(0)
    epoch, seconds, loss = prepare(chosen), [], float("nan")
    for _ in range(chosen.epochs):
        started = time.perf_counter()
        loss = epoch()
        seconds.append(time.perf_counter() - started)
    print(
        f"loss {loss:.4f} after {chosen.epochs} epochs, {1e3 * statistics.median(seconds):.2f} ms per epoch"
    )


def citation(chosen: argparse.Namespace, words: int = 1000) -> Data:
    """A citation graph: papers of seven fields as bags of words, edges mostly inside a field."""
    if chosen.data:
        return load(chosen.data)
    made = generate.sbm(chosen.nodes, classes=7, degree_in=3, degree_out=1, features=1)
    rng, y = np.random.default_rng(0), made.y
    chance = np.full((7, words), 0.008)  # cora: 1.3% of the words of a paper
    chance[np.arange(words) * 7 // words, np.arange(words)] = 0.04
    x = torch.from_numpy((rng.random((y.size, words)) < chance[y]).astype(np.float32))
    return _data(made, x)


def social(chosen: argparse.Namespace, features: int = 64) -> Data:
    """Communities with a few dozen friends each and dense features."""
    if chosen.data:
        return load(chosen.data)
    made = generate.sbm(chosen.nodes, classes=8, degree_in=20, degree_out=12, features=features)
    return _data(made, torch.from_numpy(made.x))


def molecules(chosen: argparse.Namespace, atoms: int = 24, features: int = 16) -> list[Data]:
    """Small graphs of two classes: rings, and rings with a chord through the middle."""
    rng, ring = np.random.default_rng(0), np.arange(atoms)
    chord = np.array([[0], [atoms // 2]])
    graphs = []
    for number in range(max(chosen.nodes // atoms, 2)):
        edges = np.stack([ring, (ring + 1) % atoms])
        edges = np.concatenate([edges, chord], axis=1) if number % 2 else edges
        edges = torch.from_numpy(np.concatenate([edges, edges[::-1]], axis=1))
        x = torch.from_numpy(rng.standard_normal((atoms, features), dtype=np.float32))
        graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 2])))
    return graphs


def shop(chosen: argparse.Namespace, features: int = 64) -> HeteroData:
    """Users who buy items; each item belongs to one of four kinds, and users follow each other."""
    rng, data = np.random.default_rng(0), HeteroData()
    users, items = chosen.nodes, chosen.nodes // 4
    kind = rng.integers(0, 4, items)
    data["user"].x = torch.from_numpy(rng.standard_normal((users, features), dtype=np.float32))
    data["item"].x = torch.from_numpy(rng.standard_normal((items, features), dtype=np.float32))
    data["item"].x[np.arange(items), kind] += 1
    data["item"].y = torch.from_numpy(kind)
    bought = np.stack([rng.integers(0, users, 10 * users), rng.integers(0, items, 10 * users)])
    follows = rng.integers(0, users, (2, 8 * users))
    data["user", "buys", "item"].edge_index = torch.from_numpy(bought)
    data["item", "bought_by", "user"].edge_index = torch.from_numpy(bought[::-1].copy())
    data["user", "follows", "user"].edge_index = torch.from_numpy(follows)
    return data


def load(path: str) -> Data:
    """The graph of an npz file; labels and a training mask are made up where it has none."""
    loaded = io.load_arrays(path)
    x = loaded.dense_x()
    count = loaded.graph.num_nodes
    x = np.random.default_rng(0).standard_normal((count, 64)) if x is None else x
    return _data(loaded, torch.as_tensor(x, dtype=torch.float32))


def _data(made: io.LoadedGraph, x: torch.Tensor) -> Data:
    edge_index = torch.from_numpy(np.stack([made.graph.indices, made.graph.edge_rows()]).astype(np.int64))
    y = np.arange(len(x)) % 2 if made.y is None else np.maximum(made.y, 0)
    mask = made.masks.get("train", np.arange(len(x)) % 3 == 0)
    mask = mask[0] if mask.ndim == 2 else mask
    return Data(
        x=x, edge_index=edge_index, y=torch.from_numpy(y.astype(np.int64)), train_mask=torch.from_numpy(mask)
    )
