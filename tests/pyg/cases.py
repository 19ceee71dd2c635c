"""Every lowered layer with every option it has, and random small graphs to run them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    MLP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    GatedGraphConv,
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
from torch_geometric.nn.aggr import MeanAggregation
from torch_geometric.utils import coalesce, to_torch_csr_tensor

WIDTH, ROOT_WIDTH, OUT = 5, 4, 3


@dataclass(frozen=True)
class Case:
    """A layer with its options; `make` takes flow, `make_pair` builds it for x = (sources, targets)."""

    name: str
    make: Callable[..., nn.Module]
    make_pair: Callable[..., nn.Module] | None = None
    root_width: int = ROOT_WIDTH
    takes_weights: bool = False
    takes_negative: bool = False
    takes_sparse: bool = True
    needs_root: bool = False

    def __str__(self) -> str:
        return self.name


def _name(layer: type, options: dict[str, Any]) -> str:
    return f"{layer.__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"


def _case(layer: type, fixed: tuple[Any, ...] = (WIDTH, OUT), has_pair: bool = False, **facts: Any) -> Any:
    def build(**options: Any) -> Case:
        pair = (lambda **kw: layer((WIDTH, ROOT_WIDTH), OUT, **options, **kw)) if has_pair else None
        return Case(_name(layer, options), lambda **kw: layer(*fixed, **options, **kw), pair, **facts)

    return build


def _network(kind: str) -> Any:
    return {
        "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, OUT)),
        "no bias": lambda: nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Tanh()),
        "linear": lambda: nn.Linear(WIDTH, OUT),
        "mlp": lambda: MLP([WIDTH, 4, OUT]),
        "mlp, act first": lambda: MLP([WIDTH, 4, 4, OUT], act_first=True, norm="layer_norm", dropout=0.5),
        "mlp, not plain": lambda: MLP([WIDTH, OUT], plain_last=False, norm=None),
        "mlp, one": lambda: MLP([WIDTH, OUT]),
        "relu first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, OUT)),
        "identity": nn.Identity,
        "empty": nn.Sequential,
    }[kind]()


def _gin(kind: str, **options: Any) -> Case:
    def make(**kw: Any) -> nn.Module:
        return GINConv(_network(kind), **options, **kw)

    return Case(_name(GINConv, {"nn": kind, **options}), make, make, root_width=WIDTH)


_gcn = _case(GCNConv, takes_weights=True)
_sage = _case(SAGEConv, has_pair=True)
_graph = _case(GraphConv, has_pair=True, takes_weights=True, takes_negative=True)
_graph_peak = _case(GraphConv, has_pair=True)
_sg = _case(SGConv, takes_weights=True)
_ssg = _case(SSGConv, takes_weights=True)
_tag = _case(TAGConv, takes_weights=True)
_appnp = _case(APPNP, (), takes_weights=True)
_mixhop = _case(MixHopConv, takes_weights=True)
_cheb = _case(ChebConv, takes_weights=True, takes_sparse=False)
_cluster = _case(ClusterGCNConv)
_le = _case(LEConv, has_pair=True, takes_weights=True, takes_negative=True, needs_root=True)
_arma = _case(ARMAConv, takes_weights=True, takes_sparse=False)
_lg = _case(LGConv, (), takes_weights=True)
_gated_graph = _case(GatedGraphConv, (WIDTH + 1, 2), takes_weights=True)

CASES: tuple[Case, ...] = (
    _gcn(),
    _gcn(improved=True),
    _gcn(add_self_loops=False),
    _gcn(normalize=False),
    _gcn(bias=False),
    _gcn(cached=True),
    *(_sage(aggr=aggr) for aggr in ("mean", "sum", "add", "max", "min")),
    _sage(aggr=MeanAggregation()),
    _sage(root_weight=False),
    _sage(normalize=True),
    _sage(project=True),
    _sage(project=True, root_weight=False, aggr="max"),
    _sage(bias=False),
    *(_graph(aggr=aggr) for aggr in ("add", "mean")),
    *(_graph_peak(aggr=aggr) for aggr in ("max", "min")),
    _graph(bias=False),
    _gin("sequential"),
    _gin("sequential", train_eps=True),
    _gin("no bias", eps=0.3),
    _gin("linear"),
    _gin("mlp"),
    _gin("mlp, act first", train_eps=True),
    _gin("mlp, not plain"),
    _gin("mlp, one"),
    _gin("relu first", eps=-0.5),
    _gin("identity"),
    _gin("empty"),
    *(_gin("linear", aggr=aggr) for aggr in ("mean", "max", "min")),
    *(_sg(K=k) for k in (0, 1, 3)),
    _sg(K=2, add_self_loops=False, bias=False),
    _sg(K=2, cached=True),
    *(_ssg(alpha=0.1, K=k) for k in (0, 1, 4)),
    _ssg(alpha=0.0, K=2, add_self_loops=False, bias=False),
    _ssg(alpha=0.4, K=3, cached=True),
    *(_tag(K=k) for k in (0, 1, 3)),
    _tag(K=2, normalize=False),
    _tag(K=2, bias=False),
    *(_appnp(K=k, alpha=0.1) for k in (0, 1, 6)),
    _appnp(K=2, alpha=0.0, add_self_loops=False),
    _appnp(K=3, alpha=0.3, normalize=False, add_self_loops=False),
    _appnp(K=3, alpha=1.0, cached=True),
    _mixhop(),
    *(_mixhop(powers=powers) for powers in ([0], [1], [0, 3], [2, 0], [1, 1])),
    _mixhop(add_self_loops=False, bias=False),
    *(_cheb(K=k) for k in (1, 2, 4)),
    *(_cheb(K=3, normalization=kind) for kind in ("rw", None)),
    _cheb(K=2, bias=False),
    _cluster(),
    _cluster(diag_lambda=0.5),
    _cluster(bias=False),
    _le(),
    _le(bias=False),
    _arma(),
    _arma(num_stacks=3),
    _arma(num_stacks=2, num_layers=3),
    _arma(num_stacks=2, num_layers=2, shared_weights=True),
    _arma(num_layers=2, act=None, bias=False),
    _lg(),
    _lg(normalize=False),
    _gated_graph(),
    _gated_graph(aggr="mean", bias=False),
)

SHAPES = ("random", "no edges", "loops", "repeated", "hub", "one node", "isolated")


def random_edges(rng: np.random.Generator, shape: str, targets: int, sources: int) -> Tensor:
    """[2, E] edges (source, target), in no order."""
    count = 0 if shape == "no edges" else int(rng.integers(1, 4 * max(targets, sources)))
    src, dst = rng.integers(0, sources, count), rng.integers(0, targets, count)
    if shape == "hub" and count:
        dst[: count // 2 + 1] = targets - 1
    if shape == "isolated":
        src, dst = src // 2, dst // 2
    if shape == "repeated":
        src, dst = np.concatenate([src, src, src[:1]]), np.concatenate([dst, dst, dst[:1]])
    if shape == "loops":
        same = np.arange(min(targets, sources))[::2]
        src, dst = np.concatenate([src, same, same]), np.concatenate([dst, same, same])
    order = rng.permutation(len(src))
    return torch.from_numpy(np.stack([src[order], dst[order]]))


def random_weights(rng: np.random.Generator, edges: Tensor, is_signed: bool, dtype: torch.dtype) -> Tensor:
    """Multiples of 1/8, zeros among them: their sums are exact, so degrees that vanish do so for everyone."""
    return torch.from_numpy(rng.integers(-16 if is_signed else 0, 17, edges.size(1)) / 8.0).to(dtype)


def to_adj_t(edges: Tensor, weight: Tensor | None, targets: int, sources: int) -> Tensor:
    """The torch CSR matrix [targets, sources] of PyG's sparse path; repeated edges are added up."""
    flipped = edges.flip(0)
    if weight is None:  # a pattern: repeated edges count once, as PyG's ToSparseTensor leaves them
        flipped = coalesce(flipped, num_nodes=max(targets, sources, 1))
        return to_torch_csr_tensor(
            flipped, torch.ones(flipped.size(1)), (targets, sources), is_coalesced=True
        )
    return to_torch_csr_tensor(flipped, weight, (targets, sources))


def randomise(module: nn.Module, rng: np.random.Generator) -> nn.Module:
    """The module with every parameter drawn anew: biases and eps start at 0, where mistakes do not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(0, 0.7, tuple(parameter.shape))))
    return module
