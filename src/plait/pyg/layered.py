"""A model over one batch, each layer on the rows that later layers read and on no others.

A batch of L hops lists its nodes hop by hop. What layer i computes is read for the nodes of the first
L - 1 - i hops around the seeds alone, so the nodes of the last hop need no row of the first layer, and so on:
with fanouts 25, 10 and batches of 1000 the first layer computes one row in six.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GATConv, GINConv, GraphConv, SAGEConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

__all__ = ["Layered", "can_be_layered"]

# Their rows depend on the in-edges of a node and on nothing else of the graph; GCN's depend on the degrees of
# both ends, which a head of the graph does not have.
_LOCAL = (GATConv, GINConv, GraphConv, SAGEConv)


def can_be_layered(model: nn.Module) -> bool:
    """Whether the rows of a layer of this model may be computed without those of the other nodes.

    So they may in PyG's GraphSAGE, GIN and GAT, and their kind, without norms over nodes, which see all
    rows, and without jumping knowledge, which reads every layer's.
    """
    return (
        isinstance(model, BasicGNN)
        and all(type(conv) in _LOCAL for conv in model.convs)
        and all(type(norm) in (nn.Identity, nn.LayerNorm) for norm in model.norms)
        and model.jk_mode is None
    )


class Layered(nn.Module):
    """`model`, whose forward takes a batch's nodes and edges by hop and returns the rows of its seeds."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, edge_index: Tensor, nodes: Sequence[int], edges: Sequence[int]) -> Tensor:
        """One row per seed; `nodes` and `edges` are num_sampled_nodes and num_sampled_edges of the batch."""
        model: Any = self.model
        layers = len(model.convs)
        for i, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
            rows, ends = sum(nodes[: layers - i]), sum(edges[: layers - i])
            x = conv((x, x[:rows]), edge_index[:, :ends])
            if i < layers - 1:
                x = model.act(x) if model.act is not None and model.act_first else x
                x = norm(x)
                x = model.act(x) if model.act is not None and not model.act_first else x
                x = model.dropout(x)
        return x
