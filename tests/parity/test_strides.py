"""Tensors that lie otherwise than row by row, in every role of every planned layer, against PyG."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    AGNNConv,
    ARMAConv,
    CGConv,
    ChebConv,
    ClusterGCNConv,
    EdgeConv,
    FAConv,
    FiLMConv,
    GATConv,
    GatedGraphConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINConv,
    GMMConv,
    GraphConv,
    InstanceNorm,
    LEConv,
    LGConv,
    MixHopConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    SSGConv,
    SuperGATConv,
    TAGConv,
    TransformerConv,
)

import plait
from tests.parity.harness import GRADIENT, OUTPUT, close, largest

N, WIDTH, OUT, RELATIONS = 40, 12, 5, 3
EDGES = torch.randint(0, N, (2, 300), generator=torch.Generator().manual_seed(0))
KINDS = torch.randint(0, RELATIONS, (300,), generator=torch.Generator().manual_seed(1))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# How a tensor may lie -------------------------------------------------------------------------------------


def transposed(value: Tensor) -> Tensor:
    """The same values, the last axis outermost in memory; a vector as a column of a matrix."""
    if value.dim() < 2:
        return torch.stack([value, value - 1], dim=-1)[..., 0]
    order = tuple(range(value.dim()))[::-1]
    return value.permute(order).contiguous().permute(order)


def every_other(value: Tensor) -> Tensor:
    """The same values, numbers that are not part of it between them."""
    return torch.stack([value, torch.full_like(value, float("nan"))], dim=-1)[..., 0]


def window(value: Tensor) -> Tensor:
    """The same values inside a larger matrix: rows are whole but apart, and start off any alignment."""
    return nn.functional.pad(value, (1, 2), value=float("nan"))[..., 1:-2]


def column_expanded(value: Tensor) -> Tensor:
    """The first column again and again, without memory for it."""
    return value[:, :1].clone().expand(-1, value.shape[1])


def row_expanded(value: Tensor) -> Tensor:
    """The first row again and again."""
    return value[:1].clone().expand(value.shape[0], -1)


def overlapping(value: Tensor) -> Tensor:
    """Rows that begin one element after the other."""
    return value.flatten().clone().as_strided(tuple(value.shape), (1, 1))


def from_singular_vectors(value: Tensor) -> Tensor:
    """An orthogonal factor as torch.linalg.svd hands it out: column by column."""
    return torch.linalg.svd(value, full_matrices=False).U * 1.0


SAME_VALUES = (transposed, every_other, window)
ANY_VALUES = (*SAME_VALUES, column_expanded, row_expanded, overlapping, from_singular_vectors)

# The layers ---------------------------------------------------------------------------------------------


def mlp(inner: int, outer: int = OUT) -> nn.Module:
    return nn.Sequential(nn.Linear(inner, 8), nn.ReLU(), nn.Linear(8, outer))


class With(nn.Module):
    """A layer whose further arguments are fixed."""

    def __init__(self, layer: nn.Module, *more: Any):
        super().__init__()
        self.layer, self.more = layer, more

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        out: Tensor = self.layer(x, *self.more, *rest)
        return out


HISTOGRAM = torch.bincount(torch.bincount(EDGES[1], minlength=N))
PNA = (["mean", "sum", "max"], ["identity", "attenuation"], HISTOGRAM)
Make = Callable[[], nn.Module]

LAYERS: dict[str, tuple[Make, tuple[Any, ...]]] = {
    "GCN": (lambda: GCNConv(WIDTH, OUT), ()),
    "GCN widening": (lambda: GCNConv(WIDTH, 20), ()),
    "SAGE mean": (lambda: SAGEConv(WIDTH, OUT), ()),
    "SAGE max": (lambda: SAGEConv(WIDTH, OUT, aggr="max"), ()),
    "SAGE project": (lambda: SAGEConv(WIDTH, OUT, project=True), ()),
    "GraphConv": (lambda: GraphConv(WIDTH, OUT), ()),
    "GraphConv min": (lambda: GraphConv(WIDTH, OUT, aggr="min"), ()),
    "GIN": (lambda: GINConv(mlp(WIDTH), train_eps=True), ()),
    "SG": (lambda: SGConv(WIDTH, OUT, K=2), ()),
    "SSG": (lambda: SSGConv(WIDTH, OUT, alpha=0.2, K=2), ()),
    "TAG": (lambda: TAGConv(WIDTH, OUT, K=2), ()),
    "APPNP": (lambda: APPNP(K=2, alpha=0.2), ()),
    "MixHop": (lambda: MixHopConv(WIDTH, OUT), ()),
    "Cheb": (lambda: ChebConv(WIDTH, OUT, K=3), ()),
    "ClusterGCN": (lambda: ClusterGCNConv(WIDTH, OUT), ()),
    "LE": (lambda: LEConv(WIDTH, OUT), ()),
    "ARMA": (lambda: ARMAConv(WIDTH, OUT, num_stacks=2, num_layers=2), ()),
    "LG": (LGConv, ()),
    "GAT": (lambda: GATConv(WIDTH, OUT, heads=3), ()),
    "GAT residual": (lambda: GATConv(WIDTH, OUT, heads=3, concat=False, residual=True), ()),
    "GATv2": (lambda: GATv2Conv(WIDTH, OUT, heads=3), ()),
    "Transformer": (lambda: TransformerConv(WIDTH, OUT, heads=3), ()),
    "EdgeConv max": (lambda: EdgeConv(mlp(2 * WIDTH)), ()),
    "EdgeConv sum": (lambda: EdgeConv(mlp(2 * WIDTH), aggr="add"), ()),
    "ResGated": (lambda: ResGatedGraphConv(WIDTH, OUT), ()),
    "AGNN": (AGNNConv, ()),
    "SuperGAT": (lambda: SuperGATConv(WIDTH, OUT, heads=3).eval(), ()),
    "FA": (lambda: With(FAConv(WIDTH), transposed(drawn(N, WIDTH))), ()),
    "GEN": (lambda: GENConv(WIDTH, 7, norm="layer"), ()),
    "FiLM": (lambda: FiLMConv(WIDTH, 7), ()),
    "CG": (lambda: CGConv(WIDTH), ()),
    "GatedGraph": (lambda: GatedGraphConv(WIDTH, 2), ()),
    "PNA": (lambda: PNAConv(WIDTH, OUT, *PNA), ()),
    "RGCN": (lambda: RGCNConv(WIDTH, 8, RELATIONS), (KINDS,)),
}
# the layer, its further argument, whether PyG gives that a gradient
OF_EDGES: dict[str, tuple[Make, Tensor, bool]] = {
    "GCN": (lambda: GCNConv(WIDTH, OUT), drawn(300).abs(), False),
    "GraphConv": (lambda: GraphConv(WIDTH, OUT), drawn(300), False),
    "SG": (lambda: SGConv(WIDTH, OUT, K=2), drawn(300).abs(), False),
    "Cheb": (lambda: ChebConv(WIDTH, OUT, K=3), drawn(300).abs(), False),
    "LE": (lambda: LEConv(WIDTH, OUT), drawn(300), False),
    "GAT": (lambda: GATConv(WIDTH, OUT, heads=3, edge_dim=4, add_self_loops=False), drawn(300, 4), True),
    "GATv2": (lambda: GATv2Conv(WIDTH, OUT, heads=3, edge_dim=4, add_self_loops=False), drawn(300, 4), True),
    "Transformer": (lambda: TransformerConv(WIDTH, OUT, heads=3, edge_dim=4), drawn(300, 4), True),
    "ResGated": (lambda: ResGatedGraphConv(WIDTH, OUT, edge_dim=4), drawn(300, 4), True),
    "GEN": (lambda: GENConv(WIDTH, 7, norm="layer", edge_dim=4), drawn(300, 4), True),
    "CG": (lambda: CGConv(WIDTH, dim=4), drawn(300, 4), True),
    "GMM": (lambda: GMMConv(WIDTH, 7, dim=3, kernel_size=2), drawn(300, 3), True),
    "PNA": (lambda: PNAConv(WIDTH, OUT, *PNA, edge_dim=4), drawn(300, 4), True),
}
PAIRS: dict[str, Make] = {
    "SAGE": lambda: SAGEConv((WIDTH, 7), OUT),
    "SAGE max": lambda: SAGEConv((WIDTH, 7), OUT, aggr="max"),
    "GraphConv": lambda: GraphConv((WIDTH, 7), OUT),
    "GAT": lambda: GATConv((WIDTH, 7), OUT, heads=3, add_self_loops=False),
    "GATv2": lambda: GATv2Conv((WIDTH, 7), OUT, heads=3, add_self_loops=False),
    "Transformer": lambda: TransformerConv((WIDTH, 7), OUT, heads=3),
    "ResGated": lambda: ResGatedGraphConv((WIDTH, 7), OUT),
    "FiLM": lambda: FiLMConv((WIDTH, 7), OUT),
    "GEN": lambda: GENConv((WIDTH, 7), 6, norm="layer"),
    "RGCN": lambda: With(RGCNConv((WIDTH, 7), OUT, RELATIONS), PAIR_EDGES, KINDS),
}
PAIR_EDGES = torch.stack([EDGES[0] % 30, EDGES[1]])


def built(make: Make) -> nn.Module:
    torch.manual_seed(2)
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


# The comparison -------------------------------------------------------------------------------------------


def lies(value: Any, wants_grad: bool = True) -> Any:
    """A leaf with the strides of `value`, sharing its memory; pairs and None go through."""
    if isinstance(value, tuple):
        return tuple(lies(part, wants_grad) for part in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().requires_grad_(wants_grad)


def leaves(given: Any) -> list[Tensor]:
    if isinstance(given, tuple | list):
        return [leaf for part in given for leaf in leaves(part)]
    return [given] if isinstance(given, Tensor) and given.requires_grad else []


def agree(
    module: nn.Module,
    *arguments: Any,
    wants_grad: bool = True,
    direction: Callable[[Tensor], Tensor] = window,
) -> None:
    """The compiled module answers like PyG on the very same tensors, and so do its gradients."""
    results = []
    compiled = plait.compile(copy.deepcopy(module))
    for model in (module, compiled):
        given = [lies(argument, wants_grad) for argument in arguments]
        out = model(*given)
        wanted = [*leaves(given), *model.parameters()]
        grads = torch.autograd.grad(out, wanted, direction(drawn(*out.shape)), allow_unused=True)
        results.append((out, grads))
    assert not compiled.plan.not_planned, compiled.plan.not_planned
    (expected, wanted_grads), (result, grads) = results
    close(result, expected, OUTPUT[expected.dtype], "output")
    scale = 0.02 * max(1.0, largest(*(g for g in wanted_grads if g is not None)))
    for k, (mine, theirs) in enumerate(zip(grads, wanted_grads, strict=True)):
        assert (mine is None) == (theirs is None), f"gradient {k}"
        if mine is not None and theirs is not None:
            close(mine, theirs, GRADIENT[theirs.dtype], f"gradient {k}", scale)


@pytest.mark.parametrize("name", LAYERS)
def test_features(name: str) -> None:
    make, more = LAYERS[name]
    for lay in ANY_VALUES:
        if name == "AGNN" and lay is row_expanded:
            continue  # nodes are all alike: the gradient of beta is zero but for rounding
        if name == "GatedGraph" and lay is row_expanded:
            continue  # sums that the gates saturate on: PyG is 1.2e-5 off double precision, plait 0.9e-5
        agree(built(make), lay(drawn(N, WIDTH)), EDGES, *more)


@pytest.mark.parametrize("name", LAYERS)
def test_incoming_gradients(name: str) -> None:
    make, more = LAYERS[name]
    for lay in (transposed, every_other, column_expanded, row_expanded, overlapping):
        agree(built(make), drawn(N, WIDTH), EDGES, *more, direction=lay)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_biases(name: str) -> None:
    make, more = LAYERS[name]
    for lay in SAME_VALUES:
        module = built(make)
        for parameter in module.parameters():
            parameter.data = lay(parameter.data)
        agree(module, drawn(N, WIDTH), EDGES, *more)


@pytest.mark.parametrize("name", OF_EDGES)
def test_weights_and_features_of_edges(name: str) -> None:
    make, value, has_grad = OF_EDGES[name]
    for lay in SAME_VALUES:
        agree(built(make), drawn(N, WIDTH), EDGES, lay(value), wants_grad=has_grad)


@pytest.mark.parametrize("name", PAIRS)
def test_roots_of_bipartite_layers(name: str) -> None:
    more = () if name == "RGCN" else (PAIR_EDGES,)
    for lay in (transposed, every_other, column_expanded, row_expanded):
        agree(built(PAIRS[name]), (lay(drawn(30, WIDTH)), lay(drawn(N, 7))), *more)


def test_an_instance_norm_between_two_layers() -> None:
    """PyG's InstanceNorm hands on a transposed matrix."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = GCNConv(WIDTH, 9), InstanceNorm(9), GCNConv(9, OUT)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            out: Tensor = self.last(self.norm(self.first(x, edges)).relu(), edges)
            return out

    agree(built(Model), drawn(N, WIDTH), EDGES)


def test_factors_and_transforms() -> None:
    x = drawn(N, WIDTH)
    spectrum = torch.fft.rfft(drawn(N, 2 * WIDTH - 2))
    for given in (torch.linalg.qr(x).Q, spectrum.real, spectrum.imag, spectrum.conj().imag):
        agree(built(lambda: GCNConv(WIDTH, OUT)), given, EDGES)
        agree(built(lambda: GATConv(WIDTH, OUT, heads=3)), given, EDGES)


def test_a_constant_input_keeps_its_strides_from_call_to_call() -> None:
    """What is hoisted is computed from the input as it lies, dense and sparse."""
    for x in (drawn(N, WIDTH), drawn(N, WIDTH) * (drawn(N, WIDTH) > 1.2)):
        for lay in SAME_VALUES:
            module = built(lambda: SGConv(WIDTH, OUT, K=2))
            given, compiled = lay(x), plait.compile(copy.deepcopy(module))
            for _ in range(3):
                close(compiled(given, EDGES), module(given, EDGES), OUTPUT[torch.float32], "output")


@pytest.mark.parametrize("width", [1, 2])
def test_a_single_column_of_any_stride(width: int) -> None:
    for lay in SAME_VALUES:
        agree(built(lambda: GCNConv(width, 1)), lay(drawn(N, width)), EDGES)
        agree(built(lambda: SAGEConv(width, 3)), lay(drawn(N, width)), EDGES)
