"""Whole PyG layers as one operation: PyG on an edge list, on torch CSR, and planned by plait."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.ops.operation import GRAPH, Operation, Variant, Work

__all__ = ["OPERATIONS"]

_HEADS = 4


def _build(kind: str, inputs: Inputs) -> nn.Module:
    """The seeded layer, its width kept, in the inputs' dtype and on their device."""
    from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

    width = inputs.case.size("width")

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer: nn.Module
            if kind == "gat":
                layer = GATConv(width, width, heads=_HEADS, concat=False)
            elif kind == "gin":
                # no ReLU inside: one that switches under rounding would make right gradients look wrong
                layer = GINConv(nn.Linear(width, width))
            else:
                layer = {"gcn": GCNConv, "sage": SAGEConv}[kind](width, width)
            return layer.to(inputs["x"].device, inputs["x"].dtype)

    return inputs.once(("layer", kind), make)


def _inputs(case: Case, draw: Draw) -> dict[str, Tensor]:
    nodes = case.size("nodes")
    source, target = draw.edges()
    # no self loops and no repeats, as data sets come: PyG's own formats disagree about what those mean
    keys = torch.unique((target.long() * nodes + source.long())[source != target])
    source, target = (keys % nodes).to(source.dtype), (keys // nodes).to(source.dtype)
    x = draw.normal(nodes, case.size("width"))
    value = torch.ones(source.numel(), dtype=x.dtype, device=x.device)
    return {"source": source, "target": target, "x": x, "value": value}


def _work(case: Case) -> Work:
    edges, nodes, width = case.size("edges"), case.size("nodes"), case.size("width")
    row = width * case.float_bytes
    least = edges * case.index_bytes + 2.0 * nodes * row + width * row
    return Work(2.0 * nodes * width * width + edges * width, least, least + 2.0 * edges * row)


def _edge_index(inputs: Inputs) -> Tensor:
    return inputs.once("edge_index", lambda: torch.stack([inputs["source"], inputs["target"]]))


def _on_edges(inputs: Inputs, kind: str) -> Callable[[], Tensor]:
    layer, edge_index, x = _build(kind, inputs), _edge_index(inputs), inputs["x"]
    return lambda: layer(x, edge_index)


def _on_csr(inputs: Inputs, kind: str) -> Callable[[], Tensor]:
    matrix = inputs.edges_csr() if kind in ("sage", "gat") else inputs.csr()  # these count edges
    layer, x = _build(kind, inputs), inputs["x"]

    def call() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "CSR support is in beta state", on every call
            out: Tensor = layer(x, matrix)
            return out

    return call


def _planned(inputs: Inputs, kind: str) -> Callable[[], Tensor]:
    from torch_geometric.data import Data

    import plait

    edge_index, x = _edge_index(inputs), inputs["x"]
    # one that needs a gradient, as a hidden activation does: what is known to be constant is computed once
    wanting = x if x.requires_grad else x.detach().clone().requires_grad_()
    stand_in = torch.zeros_like(wanting).requires_grad_()
    data = Data(x=stand_in, edge_index=edge_index, num_nodes=inputs.case.size("nodes"))
    mode = "inference" if inputs.case.direction == "forward" else "training"
    layer: Any = plait.compile(copy.deepcopy(_build(kind, inputs)), data, mode=mode)
    return lambda: layer(wanting, edge_index)


def _reference(inputs: Inputs, kind: str) -> Tensor:
    return _on_edges(inputs, kind)()


def _operation(kind: str) -> Operation:
    needs = "torch_geometric"
    return Operation(
        name=f"layer_{kind}",
        family="layer",
        about=f"{kind.upper()} as PyG constructs it; the gradient is that of x",
        takes={name: value for name, value in GRAPH.items() if name != "order"},
        draw=_inputs,
        variants=(
            Variant("pyg", functools.partial(_on_edges, kind=kind), needs=needs),
            Variant("pyg-csr", functools.partial(_on_csr, kind=kind), needs=needs),
            Variant(
                "plait",
                functools.partial(_planned, kind=kind),
                devices=("cpu",),
                why="plait plans layers on the CPU; on a GPU they run in PyG",
                needs=needs,
            ),
        ),
        work=_work,
        reference=functools.partial(_reference, kind=kind),
        leaves=("x",),
    )


OPERATIONS = tuple(_operation(kind) for kind in ("gcn", "sage", "gin", "gat"))
