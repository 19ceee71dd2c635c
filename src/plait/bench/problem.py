"""The tensors of one comparison: a PyG layer with its weights, a graph, an input and a cotangent."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from plait.bench.cases import EVERY_LAYER, find_graph, known
from plait.bench.gpu.graphs import GRAPHS as DEVICE_GRAPHS
from plait.graph import Graph

__all__ = [
    "Forms", "Problem", "build_layer", "edge_index_of", "forms_of", "hidden_features", "training_step",
]  # fmt: skip

T = TypeVar("T")

_BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn": GCNConv,
    "sage-mean": lambda width_in, width_out: SAGEConv(width_in, width_out, aggr="mean"),
    "sage-max": lambda width_in, width_out: SAGEConv(width_in, width_out, aggr="max"),
    "gin": lambda width_in, width_out: GINConv(
        nn.Sequential(nn.Linear(width_in, width_out), nn.ReLU(), nn.Linear(width_out, width_out))
    ),
    "sgc": lambda width_in, width_out: SGConv(width_in, width_out, K=2),
    "tag": lambda width_in, width_out: TAGConv(width_in, width_out, K=3),
    "rgcn": lambda width_in, width_out: RGCNConv(width_in, width_out, RELATIONS),
    "edgeconv": lambda width_in, width_out: EdgeConv(
        nn.Sequential(nn.Linear(2 * width_in, width_out), nn.ReLU(), nn.Linear(width_out, width_out))
    ),
    "resgated": ResGatedGraphConv,
}
_ATTENTION = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}
_PNA_AGGREGATORS = ["mean", "min", "max", "std"]
_PNA_SCALERS = ["identity", "amplification", "attenuation"]
RELATIONS = 4


def build_layer(
    kind: str, width_in: int, width_out: int, *, heads: int = 1, degrees: Tensor | None = None
) -> nn.Module:
    """A PyG layer as its documentation shows it, seeded: every run measures the same weights.

    Attention layers put `heads` side by side in width_out; `degrees` (nodes by in-degree) is what PNA is
    built from.
    """
    known("--layers", kind, EVERY_LAYER)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind in _ATTENTION:
            attention: nn.Module = _ATTENTION[kind](width_in, width_out // heads, heads=heads)
            return attention
        if kind == "pna":
            seen = torch.tensor([0, 1]) if degrees is None else degrees
            pna: nn.Module = PNAConv(width_in, width_out, _PNA_AGGREGATORS, _PNA_SCALERS, deg=seen)
            return pna
        return _BUILDERS[kind](width_in, width_out)


def edge_index_of(graph: Graph) -> Tensor:
    """[2, edges] int64 in PyG's coalesced order: by source, then by target."""
    by_source = graph.transpose
    rows = by_source.edge_rows().astype(np.int64)
    return torch.from_numpy(np.stack([rows, by_source.indices.astype(np.int64)]))


def hidden_features(num_nodes: int, width: int, seed: int = 0, device: Any = "cpu") -> Tensor:
    """[num_nodes, width] float32 of unit variance, no value twice in a column.

    Where two neighbours tie for the maximum PyG splits the gradient and DGL gives it to one of them; normal
    draws tie a few times on a graph of a million edges. So column j is an affine permutation of a lattice:
    i -> (i * step_j + start_j) mod p, with p prime. None is zero either: PyG's maximum starts from 0 and
    counts that 0 as one of the tied.
    """
    prime = _prime_from(max(num_nodes, 2))
    rng = np.random.default_rng(seed)
    step = rng.integers(1, prime, size=width, dtype=np.int64)
    start = rng.integers(0, prime, size=width, dtype=np.int64)
    if torch.device(device).type != "cpu":
        factors, shifts = (torch.from_numpy(a).to(device) for a in (step, start))
        places = (torch.arange(num_nodes, device=device)[:, None] * factors + shifts) % prime
        return ((places + 0.25) / prime - 0.5).float() * float(np.sqrt(12.0))
    lattice = (np.arange(num_nodes, dtype=np.int64)[:, None] * step + start) % prime
    return torch.from_numpy(((lattice + 0.25) / prime - 0.5).astype(np.float32) * np.float32(np.sqrt(12.0)))


def training_step(
    model: nn.Module, x: Tensor, *arguments: Tensor, cotangent: Tensor | None = None
) -> Callable[[], None]:
    """Forward and backward of a model, gradients dropped before; without a cotangent it is made of ones."""
    parameters = list(model.parameters())
    # of the same size at every call, so made once and outside the clock
    kept = {} if cotangent is None else {"g": cotangent}

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        out = model(x, *arguments)
        if "g" not in kept:
            kept["g"] = torch.ones_like(out)
        torch.autograd.backward(out, kept["g"])

    return step


def _prime_from(least: int) -> int:
    candidate = least
    while any(candidate % divisor == 0 for divisor in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate


class Forms:
    """Representations of one graph that peers prepare once and share over layers, made when needed."""

    def __init__(self, edge_index: Tensor, num_nodes: int, is_symmetric: bool) -> None:
        self.edge_index = edge_index
        self.num_nodes = num_nodes
        self.is_symmetric = is_symmetric
        self._made: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, graph: Graph) -> Forms:
        """The representations of a plait graph."""
        return cls(edge_index_of(graph), graph.num_nodes, graph.is_symmetric)

    def to(self, device: str) -> Forms:
        """The same edges on a device; representations made so far are made again there."""
        if self.edge_index.device.type == device:
            return self
        return Forms(self.edge_index.to(device), self.num_nodes, self.is_symmetric)

    def normalised(self, has_loops: bool) -> tuple[Tensor, Tensor]:
        """(edge_index, edge_weight) after PyG's normalisation, done once as its docs advise."""

        def make() -> tuple[Tensor, Tensor]:
            edge_index, weight = gcn_norm(
                self.edge_index, None, self.num_nodes, add_self_loops=has_loops, dtype=torch.float32
            )
            return edge_index, weight

        return self.once(("normalised", has_loops), make)

    def with_loops(self) -> Tensor:
        """The edges with exactly one loop at every node, as attention layers see them."""
        return self.normalised(True)[0]

    def degrees(self) -> Tensor:
        """How many nodes have in-degree 0, 1, 2, ..."""
        return torch.bincount(torch.bincount(self.edge_index[1], minlength=self.num_nodes))

    def relations(self) -> Tensor:
        """A relation of each edge, drawn once."""

        def make() -> Tensor:
            generator = torch.Generator().manual_seed(2)
            drawn = torch.randint(0, RELATIONS, (self.edge_index.shape[1],), generator=generator)
            return drawn.to(self.edge_index.device)

        return self.once("relations", make)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned the first time this key was asked for."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made


def forms_of(name: str, data_dir: str | None = None, device: str = "cpu") -> Forms:
    """A graph by its name, on a device; those of bench/gpu/graphs.py are made there."""
    if device == "cuda" and name in DEVICE_GRAPHS:
        edge_index, num_nodes = DEVICE_GRAPHS[name]()
        return Forms(edge_index, num_nodes, is_symmetric=False)
    return Forms.of(find_graph(name, data_dir).graph).to(device)


@dataclass(frozen=True)
class Problem:
    """A layer on a graph: what every peer is handed, and what its answer is compared with."""

    kind: str
    forms: Forms
    width_in: int
    width_out: int
    given: nn.Module | None = None
    heads: int = 1

    @cached_property
    def layer(self) -> nn.Module:
        """The PyG layer whose weights all peers use; copy it before changing it."""
        if self.given is not None:
            return self.given
        degrees = self.forms.degrees() if self.kind == "pna" else None
        made = build_layer(self.kind, self.width_in, self.width_out, heads=self.heads, degrees=degrees)
        return made.to(self.edge_index.device)

    @cached_property
    def x(self) -> Tensor:
        """The input: a hidden activation, so it needs a gradient."""
        features = hidden_features(self.forms.num_nodes, self.width_in, device=self.edge_index.device)
        return features.requires_grad_()

    @cached_property
    def cotangent(self) -> Tensor:
        """The fixed gradient of the output a training step starts from."""
        device = self.edge_index.device
        generator = torch.Generator(device).manual_seed(1)
        return torch.randn(self.forms.num_nodes, self.width_out, generator=generator, device=device)

    @property
    def edge_index(self) -> Tensor:
        """[2, edges] as the user has it: no loops added, no weights."""
        return self.forms.edge_index

    @property
    def num_nodes(self) -> int:
        """Nodes of the graph."""
        return self.forms.num_nodes

    @property
    def normalised(self) -> tuple[Tensor, Tensor]:
        """(edge_index, edge_weight) after this layer's normalisation; TAG adds no loops."""
        return self.forms.normalised(self.kind != "tag")

    @property
    def is_normalised(self) -> bool:
        """Whether the layer scales by degrees at all."""
        return self.kind in ("gcn", "sgc", "tag")

    @property
    def extra(self) -> tuple[Tensor, ...]:
        """What the layer takes after x and the edges."""
        return (self.forms.relations(),) if self.kind == "rgcn" else ()

    @property
    def has_own_loops(self) -> bool:
        """Whether the layer removes loops and adds its own on every call, and can be told not to."""
        return self.kind in ("gat", "gatv2")

    @property
    def gathered_width(self) -> int:
        """Width of the rows PyG gathers per edge, in all."""
        # of what GAT holds, seen on pubmed at width 128
        projected = {"gcn": 1.0, "gat": 1.0, "gatv2": 1.3, "transformer": 1.2, "resgated": 1.1}
        if self.kind in projected:
            return int(projected[self.kind] * self.width_out)
        both_ends = {"edgeconv": 2 * (self.width_in + self.width_out), "pna": 4 * self.width_in}
        return both_ends.get(self.kind, self.width_in)
