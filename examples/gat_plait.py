"""Attention on a dense graph under a memory limit: no row per edge and head is stored."""

import torch
from graphs import Epoch, social, train
from torch.nn import functional as F
from torch_geometric.nn import GATConv

import plait


class GAT(torch.nn.Module):
    def __init__(self, features, hidden, classes, heads=4):
        super().__init__()
        self.conv1 = GATConv(features, hidden, heads)
        self.conv2 = GATConv(hidden * heads, classes)

    def forward(self, x, edge_index):
        h = F.elu(self.conv1(x, edge_index))
        return self.conv2(h, edge_index)


def prepare(chosen) -> Epoch:
    data = social(chosen)
    model = GAT(data.num_features, 16, int(data.y.max()) + 1)
    limit = 1600 * data.num_nodes + 40 * data.num_edges  # bytes that a training step may hold
    model = plait.compile(model, data, memory_limit=limit)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


if __name__ == "__main__":
    train(prepare)
