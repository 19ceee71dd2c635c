"""Node classification as tensors, and the two-layer models the benchmarks and the demo train on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from plait.bench.cases import MODELS, known
from plait.bench.problem import Forms
from plait.errors import InputError
from plait.graph import LoadedGraph

__all__ = ["HIDDEN", "Task", "TwoLayers", "build_model", "load_task"]

HIDDEN = 64
TRAIN_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """A node classification task, as tensors."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    train_mask: Tensor
    test_mask: Tensor
    num_classes: int
    is_symmetric: bool

    @property
    def train_rows(self) -> Tensor:
        """The node numbers the loss is taken over."""
        return self.train_mask.nonzero().view(-1)


class TwoLayers(nn.Module):
    """conv, ReLU, conv: what the examples of every library train first."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def build_model(kind: str, width_in: int, classes: int) -> TwoLayers:
    """The seeded PyG model of a kind: gcn, sage (mean) or gin."""
    known("--models", kind, MODELS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TwoLayers(_conv(kind, width_in, HIDDEN), _conv(kind, HIDDEN, classes))


def _conv(kind: str, width_in: int, width_out: int) -> nn.Module:
    if kind == "gcn":
        conv: nn.Module = GCNConv(width_in, width_out)
    elif kind == "sage":
        conv = SAGEConv(width_in, width_out)
    else:
        conv = GINConv(nn.Sequential(nn.Linear(width_in, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width_out)))
    return conv


def load_task(loaded: LoadedGraph, name: str) -> Task:
    """The training task of a file; a graph without a split gets a seeded one with a tenth of its labels."""
    features = loaded.dense_x()
    if features is None or loaded.y is None or loaded.y.ndim != 1:
        raise InputError(
            f"graph {name!r}: training needs features and one label per node; see plait bench layers"
        )
    forms = Forms.of(loaded.graph)
    labels = torch.from_numpy(np.asarray(loaded.y, np.int64))
    train, test = _split(loaded, labels)
    return Task(
        torch.from_numpy(np.ascontiguousarray(features, np.float32)),
        forms.edge_index,
        labels.clamp(min=0),
        train,
        test,
        int(labels.max()) + 1,
        forms.is_symmetric,
    )


def _split(loaded: LoadedGraph, labels: Tensor) -> tuple[Tensor, Tensor]:
    if "train" in loaded.masks:
        masks = {name: torch.from_numpy(np.atleast_2d(mask)[0].copy()) for name, mask in loaded.masks.items()}
        return masks["train"], masks.get("test", ~masks["train"])
    labelled = (labels >= 0).nonzero().view(-1)
    order = torch.randperm(labelled.numel(), generator=torch.Generator().manual_seed(0))
    count = max(1, int(TRAIN_SHARE * labelled.numel()))
    train = torch.zeros(labels.numel(), dtype=torch.bool)
    train[labelled[order[:count]]] = True
    return train, (labels >= 0) & ~train
