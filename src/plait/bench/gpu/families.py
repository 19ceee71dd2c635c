"""Training steps of layers that are more than a matrix expression: plait.compile against PyG, both eager.

64 columns in and out, four heads of 16, float32 without TF32; edges have 16 features, or 16 relations. A step
that PyG has no memory for is timed for plait alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    AGNNConv,
    CGConv,
    EdgeConv,
    FAConv,
    FiLMConv,
    GATConv,
    GatedGraphConv,
    GATv2Conv,
    GENConv,
    GMMConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SuperGATConv,
    TransformerConv,
)

import plait
from plait.bench.gpu.clock import milliseconds, relative_error

__all__ = ["LAYERS", "measure"]

_WIDTH, _HEADS, _FEATURES, _RELATIONS = 64, 4, 16, 16
_SCALERS = ["identity", "amplification", "attenuation"]


def _map() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2 * _WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))


def _pna() -> nn.Module:
    degrees = torch.tensor([0, 10, 20, 40, 20, 10])
    layer: nn.Module = PNAConv(_WIDTH, _WIDTH, ["mean", "min", "max", "std"], _SCALERS, degrees)
    return layer


def _heads(make: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: make(_WIDTH, _WIDTH // _HEADS, heads=_HEADS, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "PNA": (_pna, ""),
    "RGCN": (lambda: RGCNConv(_WIDTH, _WIDTH, _RELATIONS), "relations"),
    "RGCN, 4 bases": (lambda: RGCNConv(_WIDTH, _WIDTH, _RELATIONS, num_bases=4), "relations"),
    "EdgeConv, max": (lambda: EdgeConv(_map(), aggr="max"), ""),
    "EdgeConv, mean": (lambda: EdgeConv(_map(), aggr="mean"), ""),
    "GEN": (lambda: GENConv(_WIDTH, _WIDTH, norm="layer"), ""),
    "FiLM": (lambda: FiLMConv(_WIDTH, _WIDTH), ""),
    "CG": (lambda: CGConv(_WIDTH, dim=_FEATURES), "features"),
    "GatedGraph": (lambda: GatedGraphConv(_WIDTH, 2), ""),
    "ResGated, edges": (lambda: ResGatedGraphConv(_WIDTH, _WIDTH, edge_dim=_FEATURES), "features"),
    "GAT, edges": (_heads(GATConv, edge_dim=_FEATURES), "features"),
    "GATv2, edges": (_heads(GATv2Conv, edge_dim=_FEATURES), "features"),
    "Transformer, edges": (_heads(TransformerConv, edge_dim=_FEATURES), "features"),
    "AGNN": (lambda: AGNNConv(), ""),
    "SuperGAT": (lambda: _heads(SuperGATConv)().eval(), ""),
    "FA": (lambda: FAConv(_WIDTH), "first"),
    "GMM": (lambda: GMMConv(_WIDTH, _WIDTH, dim=_FEATURES, kernel_size=3), "features"),
}
"""The layer, and what it takes besides x and the edges."""


def measure(name: str, edge_index: Tensor, num_nodes: int) -> Iterator[dict[str, Any]]:
    """One record per layer."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for layer, (make, takes) in LAYERS.items():
        torch.manual_seed(0)
        module = make().to(edge_index.device)
        yield {"layer": layer, "graph": name, **_record(module, _inputs(takes, edge_index, num_nodes))}


def _inputs(takes: str, edge_index: Tensor, num_nodes: int) -> list[Tensor]:
    x = torch.randn(num_nodes, _WIDTH, device=edge_index.device, requires_grad=True)
    edges = edge_index.shape[1]
    if takes == "first":
        return [x, x.detach().flip(0), edge_index]
    if takes == "features":
        return [x, edge_index, torch.rand(edges, _FEATURES, device=x.device)]
    if takes == "relations":
        return [x, edge_index, torch.randint(0, _RELATIONS, (edges,), device=x.device)]
    return [x, edge_index]


def _record(module: nn.Module, inputs: list[Tensor]) -> dict[str, Any]:
    compiled: Any = plait.compile(copy.deepcopy(module))

    def step(net: nn.Module) -> Tensor:
        net.zero_grad(set_to_none=True)
        inputs[0].grad = None
        out: Tensor = net(*inputs)
        out.square().mean().backward()  # type: ignore[no-untyped-call]  # torch's own lack
        return out.detach()

    ours = step(compiled)
    try:
        theirs = step(module)
    except torch.cuda.OutOfMemoryError:
        return {"ms": milliseconds(lambda: step(compiled), in_a_row=1), "pyg_ms": None}
    error = relative_error(ours, theirs.double())
    del ours, theirs
    pyg = milliseconds(lambda: step(module), repeats=5, in_a_row=1)
    own = milliseconds(lambda: step(compiled), in_a_row=1)
    planned = not compiled.plan.not_planned
    return {"ms": own, "pyg_ms": pyg, "ratio": pyg / own, "error": error, "is_planned": planned}
