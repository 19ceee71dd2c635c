"""The output of a model for every node of a graph, layer by layer, in blocks that fit a memory limit.

Edges are what does not fit: a layer that makes one message per edge holds edges x width numbers. Here every
message passing layer runs over blocks of targets with all their in-edges; what lies between the layers runs
on whole matrices of nodes x width, as the model is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from plait.errors import InputError
from plait.features.rows import ArrayRows, as_rows
from plait.graph import Graph
from plait.loader.assemble import take_rows
from plait.loader.sampler import Sampler

__all__ = ["inference"]

DEFAULT_LIMIT = 1 << 30

# Layers whose output for a node depends on its in-edges and the rows at their ends, and on nothing further
# away. By exact type: a subclass may look further.
_LOCAL = (
    gnn.CGConv,
    gnn.ClusterGCNConv,
    gnn.EdgeConv,
    gnn.FeaStConv,
    gnn.FiLMConv,
    gnn.GATConv,
    gnn.GATv2Conv,
    gnn.GENConv,
    gnn.GINConv,
    gnn.GINEConv,
    gnn.GeneralConv,
    gnn.GraphConv,
    gnn.LEConv,
    gnn.NNConv,
    gnn.ResGatedGraphConv,
    gnn.SAGEConv,
    gnn.SimpleConv,
    gnn.TransformerConv,
)
# Numbers of the widest matrix held per edge and per node of a block: messages, what they were gathered from
# and their sums, with room for one more of each.
_PER_EDGE = 3
_PER_NODE = 4
# Ends and number of an edge, copied a few times where a layer adds self loops.
_INDEX_BYTES = 160


def inference(
    model: nn.Module, data: Any, *, memory_limit: int = DEFAULT_LIMIT, features: Any = None, **kwargs: Any
) -> Any:
    """model(x, edge_index, **kwargs) without gradients, dropout off, for all nodes of `data`.

    `memory_limit` bounds, in bytes, what a block of a layer holds; the rows of nodes between layers are not
    included. `features` (an array or the path of a .npy file, which stays on disk) replace data.x. A message
    passing layer that is not known to look at its in-edges only runs whole, with a warning. Tensors in
    kwargs with one entry per edge, such as edge_weight, follow their edges.
    """
    if memory_limit < 1:
        raise InputError(f"memory_limit={memory_limit}: give a positive number of bytes")
    if not isinstance(getattr(data, "edge_index", None), Tensor):
        raise InputError("data has no edge_index tensor; inference runs on torch_geometric Data with one")
    x = _rows_of(data, features)
    blocks = _Blocks(data.edge_index, int(x.size(0)), memory_limit)
    modes = [(module, module.training) for module in model.modules()]  # parts may be frozen in evaluation
    model.eval()
    try:
        with torch.no_grad(), _in_blocks(model, blocks):
            return model(x, data.edge_index, **kwargs)
    finally:
        for module, is_training in modes:
            module.training = is_training


def _rows_of(data: Any, features: Any) -> Tensor:
    if features is None:
        if not isinstance(getattr(data, "x", None), Tensor):
            raise InputError("data has no x; give the rows as features=")
        rows: Tensor = data.x
        return rows
    held = as_rows(features)
    if not isinstance(held, ArrayRows):
        raise InputError("features: inference reads an array or a .npy file; write the rows to one first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mapped file is read-only, and nothing writes to x here
        return torch.from_numpy(held.array)


@contextmanager
def _in_blocks(model: nn.Module, blocks: _Blocks) -> Iterator[None]:
    """Inside, the layers of the model run block by block."""
    changed = []
    try:
        for name, layer in model.named_modules():
            run = blocks.runner(layer, name)
            if run is not None and "forward" not in vars(layer):
                vars(layer)["forward"] = run
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del vars(layer)["forward"]


class _Blocks:
    """Runs layers over blocks of the targets of one graph."""

    def __init__(self, edge_index: Tensor, num_nodes: int, limit: int) -> None:
        self.edge_index, self.num_nodes, self.limit = edge_index, num_nodes, limit
        self._sampler = _all_in_edges(edge_index, num_nodes)
        self._normalised: dict[tuple[Any, ...], tuple[Sampler, Tensor]] = {}

    def runner(self, layer: nn.Module, name: str) -> Callable[..., Any] | None:
        """The replacement of the layer's forward; None to keep it."""
        is_forward = getattr(layer, "flow", "source_to_target") == "source_to_target"
        if type(layer) is gnn.GCNConv and is_forward:
            return lambda x, edge_index, edge_weight=None: self._gcn(layer, x, edge_index, edge_weight)
        if type(layer) in _LOCAL and is_forward:
            whole = layer.forward
            return lambda x, edge_index, *args, **kwargs: self._local(
                layer, whole, x, edge_index, args, kwargs
            )
        if isinstance(layer, gnn.MessagePassing):
            warnings.warn(
                f"inference: {name or 'the model'} ({type(layer).__name__}) runs on the whole graph at once; "
                "memory_limit does not hold for it",
                stacklevel=4,
            )
        return None

    def _local(
        self, layer: Any, whole: Any, x: Any, edge_index: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = [*args, *kwargs.values()]
        if edge_index is not self.edge_index or not self._is_nodes(x) or not all(map(self._follows, given)):
            return whole(x, edge_index, *args, **kwargs)

        def part(rows: Tensor, edges: Tensor, e_id: Tensor) -> Tensor:
            here = [self._of_edges(a, e_id) for a in args]
            named = {k: self._of_edges(a, e_id) for k, a in kwargs.items()}
            out: Tensor = whole(rows, edges, *here, **named)
            return out

        return self._run(layer, self._sampler, x, part)

    def _gcn(self, layer: Any, x: Any, edge_index: Any, edge_weight: Tensor | None) -> Any:
        """GCNConv weighs an edge by the degrees of both ends, so the weights come from the whole graph."""
        whole = type(layer).forward
        if edge_index is not self.edge_index or not self._is_nodes(x) or not layer.normalize:
            if not layer.normalize:
                return self._local(layer, lambda *a: whole(layer, *a), x, edge_index, (edge_weight,), {})
            return whole(layer, x, edge_index, edge_weight)
        sampler, weight = self._norms(layer, edge_weight, x.dtype)

        def part(rows: Tensor, edges: Tensor, e_id: Tensor) -> Tensor:
            layer.normalize = False
            try:
                out: Tensor = whole(layer, rows, edges, weight[e_id])
                return out
            finally:
                layer.normalize = True

        return self._run(layer, sampler, x, part)

    def _norms(self, layer: Any, edge_weight: Tensor | None, dtype: torch.dtype) -> tuple[Sampler, Tensor]:
        key = (layer.improved, layer.add_self_loops, dtype, None if edge_weight is None else id(edge_weight))
        if key not in self._normalised:
            edges, weight = gcn_norm(
                self.edge_index,
                edge_weight,
                self.num_nodes,
                layer.improved,
                layer.add_self_loops,
                layer.flow,
                dtype,
            )
            self._normalised[key] = (_all_in_edges(edges, self.num_nodes), weight)
        return self._normalised[key]

    def _run(self, layer: nn.Module, sampler: Sampler, x: Tensor, part: Callable[..., Tensor]) -> Tensor:
        """The rows of all targets, block by block."""
        out: Tensor | None = None
        for begin, end in self._bounds(layer, sampler.graph, x):
            sample = sampler.sample(np.arange(begin, end))
            edges = torch.from_numpy(np.stack((sample.row, sample.col)))
            rows = take_rows(x, torch.from_numpy(sample.n_id))
            result = part(rows, edges, torch.from_numpy(sample.e_id))[: end - begin]
            if out is None:
                out = result.new_empty((self.num_nodes, *result.shape[1:]))
            out[begin:end] = result
        assert out is not None
        return out

    def _bounds(self, layer: nn.Module, graph: Graph, x: Tensor) -> Iterator[tuple[int, int]]:
        width = max([x[0].numel(), *(size for p in layer.parameters() for size in p.shape)])
        per_node = _PER_NODE * width * x.element_size() + 64
        per_edge = (
            _PER_EDGE * width * x.element_size() + per_node + _INDEX_BYTES
        )  # each may bring a source of its own
        cost = np.cumsum(np.diff(graph.indptr).astype(np.float64) * per_edge + per_node)
        begin = 0
        while begin < self.num_nodes:
            before = cost[begin - 1] if begin else 0.0
            end = int(np.searchsorted(cost, before + self.limit, side="right"))
            if end == begin:
                needed = int(cost[begin] - before)
                raise InputError(
                    f"memory_limit={self.limit}: node {begin} alone has {int(graph.degrees[begin])} in-edges "
                    f"of width {width}, about {needed} bytes; raise memory_limit to that"
                )
            yield begin, end
            begin = end

    def _is_nodes(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor) and x.dim() >= 2 and x.size(0) == self.num_nodes and x.device.type == "cpu"
        )

    def _follows(self, value: Any) -> bool:
        """Whether an argument can be cut to a block: nothing, a number, or one entry per edge."""
        if isinstance(value, Tensor):
            return value.dim() >= 1 and value.size(0) == self.edge_index.size(1)
        return value is None

    def _of_edges(self, value: Any, e_id: Tensor) -> Any:
        return value[e_id] if isinstance(value, Tensor) else value


def _all_in_edges(edge_index: Tensor, num_nodes: int) -> Sampler:
    return Sampler(Graph.from_any(edge_index, num_nodes), [-1])
