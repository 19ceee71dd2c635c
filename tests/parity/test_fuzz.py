"""Random layers with random options and widths on random small graphs, compiled, against PyG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    MLP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    GCNConv,
    GINConv,
    GraphConv,
    LEConv,
    LGConv,
    MixHopConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
)

from tests.parity.harness import agree
from tests.pyg.cases import SHAPES, random_edges, random_weights, randomise, to_adj_t

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
GRAPHS, BATCHES = 1400, 10  # 100 draws of every layer
WIDTHS = (1, 2, 3, 4, 7, 8, 16, 17, 33)


class Draw:
    """The options of one layer, drawn at random; `takes` says what may come with it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.width, self.out = (int(w) for w in rng.choice(WIDTHS, 2))
        self.root = int(rng.choice(WIDTHS))
        self.is_pair = self.is_weighted = self.is_sparse = False
        self.takes_negative = False

    def flag(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def one(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def pair(self) -> Any:
        """in_channels: a number, or two where features come as a pair."""
        self.is_pair = self.flag(0.3)
        return (self.width, self.root) if self.is_pair else self.width

    def weighted(self, negative: bool = False) -> None:
        self.is_weighted, self.takes_negative = self.flag(), negative

    def sparse(self) -> None:
        self.is_sparse = not self.is_pair and self.flag(0.25)


def _gcn(d: Draw) -> nn.Module:
    d.weighted()
    d.sparse()
    normalize = d.flag(0.8)
    loops = normalize and d.flag(0.7)
    options = {"improved": d.flag(0.3), "cached": d.flag(0.2), "add_self_loops": loops, "bias": d.flag()}
    return GCNConv(d.width, d.out, normalize=normalize, **options)


def _sage(d: Draw) -> nn.Module:
    width = d.pair()
    d.sparse()
    options = {"normalize": d.flag(0.3), "root_weight": d.flag(0.7), "project": d.flag(0.3), "bias": d.flag()}
    return SAGEConv(width, d.out, aggr=d.one("mean", "sum", "max", "min"), **options)


def _graph(d: Draw) -> nn.Module:
    width, aggr = d.pair(), d.one("add", "mean", "max", "min")
    if aggr in ("add", "mean"):
        d.weighted(negative=True)
    d.sparse()
    return GraphConv(width, d.out, aggr=aggr, bias=d.flag())


def _gin(d: Draw) -> nn.Module:
    d.is_pair, d.root = d.flag(0.3), d.width
    d.sparse()
    network: Any = d.one(
        nn.Sequential(nn.Linear(d.width, d.out, bias=d.flag()), nn.Tanh(), nn.Linear(d.out, 3)),
        MLP([d.width, d.out, 3], norm=None, act_first=d.flag()),
        nn.Linear(d.width, d.out),
        nn.Sequential(nn.Tanh(), nn.Linear(d.width, d.out)),
    )
    return GINConv(network, eps=d.one(0.0, 0.4), train_eps=d.flag(), aggr=d.one("add", "add", "mean", "max"))


def _sg(d: Draw) -> nn.Module:
    d.weighted()
    d.sparse()
    return SGConv(
        d.width, d.out, K=d.one(0, 1, 2, 3), cached=d.flag(0.2), add_self_loops=d.flag(), bias=d.flag()
    )


def _ssg(d: Draw) -> nn.Module:
    d.weighted()
    d.sparse()
    alpha = d.one(0.0, 0.1)
    return SSGConv(
        d.width, d.out, alpha, K=d.one(1, 2), cached=d.flag(0.2), add_self_loops=d.flag(), bias=d.flag()
    )


def _tag(d: Draw) -> nn.Module:
    d.weighted()
    d.sparse()
    return TAGConv(d.width, d.out, K=d.one(0, 1, 2), bias=d.flag(), normalize=d.flag(0.7))


def _appnp(d: Draw) -> nn.Module:
    d.weighted()
    d.sparse()
    return APPNP(
        d.one(0, 1, 3),
        d.one(0.0, 0.1, 1.0),
        cached=d.flag(0.2),
        add_self_loops=d.flag(),
        normalize=d.flag(0.7),
    )


def _mixhop(d: Draw) -> nn.Module:
    d.weighted()
    d.sparse()
    powers = d.one([0, 1, 2], [0, 2], [1], [2, 0], [1, 1])
    return MixHopConv(d.width, d.out, powers, add_self_loops=d.flag(), bias=d.flag())


def _cheb(d: Draw) -> nn.Module:
    d.weighted()
    return ChebConv(d.width, d.out, d.one(1, 2, 3), normalization=d.one("sym", "rw", None), bias=d.flag())


def _cluster(d: Draw) -> nn.Module:
    d.sparse()
    return ClusterGCNConv(d.width, d.out, diag_lambda=d.one(0.0, 0.3), bias=d.flag())


def _le(d: Draw) -> nn.Module:
    width = d.pair()
    d.weighted(negative=True)
    d.sparse()
    return LEConv(width, d.out, bias=d.flag())


def _arma(d: Draw) -> nn.Module:
    d.weighted()
    stacks, layers = d.one(1, 2, 3), d.one(1, 2, 3)
    act = d.one(None, nn.Tanh())
    return ARMAConv(
        d.width,
        d.out,
        stacks,
        layers,
        shared_weights=d.flag(),
        act=act,
        dropout=d.one(0.0, 0.4),
        bias=d.flag(),
    )


def _lg(d: Draw) -> nn.Module:
    d.weighted()
    d.sparse()
    return LGConv(normalize=d.flag())


LAYERS: tuple[Callable[[Draw], nn.Module], ...] = (
    _gcn, _sage, _graph, _gin, _sg, _ssg, _tag, _appnp, _mixhop, _cheb, _cluster, _le, _arma, _lg,
)  # fmt: skip


def _features(d: Draw, rows: int, width: int, dtype: torch.dtype, may_tie: bool) -> Tensor:
    """Normal, mostly zero, few distinct values (ties), or columns of a wider matrix."""
    kind = d.one("normal", "strided", *(("sparse", "ties") if may_tie else ()))
    values = d.rng.normal(size=(rows, width + 2))
    if kind == "sparse":
        values *= d.rng.random(values.shape) < 0.15
    elif kind == "ties":
        values = np.round(values)
    x = torch.from_numpy(values).to(dtype)
    return x[:, 1 : width + 1] if kind == "strided" else x[:, :width].contiguous()


def _try(seed: int) -> None:
    rng = np.random.default_rng(seed)
    d = Draw(rng)
    module = LAYERS[seed % len(LAYERS)](d)
    dtype = torch.float32 if d.is_sparse else d.one(torch.float32, torch.float64)
    module = randomise(module.to(dtype), rng).train(d.flag())
    if not (d.is_pair or d.is_sparse) and d.flag(0.3):
        module.flow = "target_to_source"
    shape = str(rng.choice(SHAPES))
    sources = 1 if shape == "one node" else int(rng.integers(1, 14))
    targets = int(rng.integers(1, 14)) if d.is_pair else sources
    edges: Tensor = random_edges(rng, shape, targets, sources)
    weight = random_weights(rng, edges, d.takes_negative, dtype) if d.is_weighted else None
    # on a sparse matrix PyG gives the gradient of tied extremes to one edge, on edge lists to all of them
    may_tie = not (d.is_sparse and module.aggr in ("max", "min"))
    x: Any = _features(d, sources, d.width, dtype, may_tie)
    if d.is_pair:
        x = (x, _features(d, targets, d.root, dtype, may_tie))
    rest: tuple[Tensor, ...] = (edges,) if weight is None else (edges, weight)
    if d.is_sparse:
        rest = (to_adj_t(edges, weight, targets, sources).to(dtype),)
    agree(module, x, *rest, wants_grad=d.flag(0.7), calls=d.one(1, 1, 3))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_layers_on_random_graphs(batch: int) -> None:
    for seed in range(batch, GRAPHS, BATCHES):
        try:
            _try(seed)
        except Exception as fault:
            raise AssertionError(f"seed {seed}: {fault}") from fault
