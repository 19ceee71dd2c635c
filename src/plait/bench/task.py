"""Node classification as tensors, and the two-layer models the benchmarks and the demo train on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

from plait.bench.cases import ATTENTION, EVERY_MODEL, HEADS, LAYERS, find_graph, known
from plait.bench.problem import Forms, build_layer, edge_index_of
from plait.errors import InputError
from plait.graph import LoadedGraph

__all__ = [
    "HIDDEN", "STACKS", "Stack", "Task", "adam_step", "build_model", "build_stack", "explain_data",
    "load_task",
]  # fmt: skip

HIDDEN = 64
GAT_HEADS = 8
TRAIN_SHARE = 0.1
# the names `plait explain --model` takes
STACKS = {layer: layer for layer in (*LAYERS, *ATTENTION)} | {"sage": "sage-mean"}


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


class Stack(nn.Module):
    """Layers with a ReLU between them: what the examples of every library train first."""

    def __init__(self, convs: Iterable[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        out: Tensor = self.convs[-1](x, edge_index)
        return out


def build_model(kind: str, width_in: int, classes: int) -> Stack:
    """The seeded two-layer PyG model of a kind: gcn, sage (mean), gin or gat, 64 wide inside."""
    known("--models", kind, EVERY_MODEL)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "gat":  # as in the paper: 8 heads side by side, then one
            first = GATConv(width_in, HIDDEN // GAT_HEADS, heads=GAT_HEADS)
            return Stack([first, GATConv(HIDDEN, classes)])
        return Stack([_conv(kind, width_in, HIDDEN), _conv(kind, HIDDEN, classes)])


def _conv(kind: str, width_in: int, width_out: int) -> nn.Module:
    inner = nn.Sequential(nn.Linear(width_in, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width_out))
    if kind == "gin":
        conv: nn.Module = GINConv(inner)
    else:
        conv = GCNConv(width_in, width_out) if kind == "gcn" else SAGEConv(width_in, width_out)
    return conv


def build_stack(kind: str, widths: Sequence[int]) -> Stack:
    """A model of len(widths) - 1 layers of one kind."""
    layer = STACKS[known("--model", kind, tuple(STACKS))]
    return Stack(
        build_layer(layer, a, b, heads=1 if b % HEADS else HEADS) for a, b in itertools.pairwise(widths)
    )


def adam_step(
    parameters: Iterable[nn.Parameter], loss_of: Callable[..., Tensor], learning_rate: float = 0.01
) -> Callable[..., Tensor]:
    """A training step as users write it: called with the arguments of `loss_of`, it returns the loss."""
    optimiser = torch.optim.Adam(parameters, lr=learning_rate)

    def step(*given: Any) -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(*given)
        torch.autograd.backward(loss)
        optimiser.step()
        return loss.detach()

    return step


def explain_data(
    name: str, data_dir: str | None, widths: tuple[int, ...] | None
) -> tuple[Data, tuple[int, ...], str]:
    """(data, widths, a note where something had to be made up) for a graph file or generator.

    Features of another width than the first one asked for are replaced by random ones of that width; so are
    missing ones, which are HIDDEN wide unless told otherwise.
    """
    if widths is not None and len(widths) < 2:
        raise InputError(f"--widths: {widths[0]} alone is no layer; give at least two, e.g. 128,64,16")
    loaded = find_graph(name, data_dir)
    features, note = loaded.dense_x(), ""
    if widths is None:
        classes = int(loaded.y.max()) + 1 if loaded.y is not None and loaded.y.ndim == 1 else HIDDEN
        widths = (HIDDEN if features is None else features.shape[1], HIDDEN, classes)
        if features is None:
            note = f"{name} has no features: {HIDDEN} random columns stand in; --widths gives others"
    if features is None or features.shape[1] != widths[0]:
        note = note or f"{name} has no features of width {widths[0]}: dense random ones stand in"
        features = np.random.default_rng(0).standard_normal((loaded.graph.num_nodes, widths[0]), np.float32)
    x = torch.from_numpy(np.ascontiguousarray(features, np.float32))
    return Data(x=x, edge_index=edge_index_of(loaded.graph)), widths, note


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
