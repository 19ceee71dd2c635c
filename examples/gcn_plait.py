"""Node classification: a two-layer GCN on a citation graph, full batch."""

import torch
from graphs import Epoch, citation, train
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

import plait


class GCN(torch.nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, classes)

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index).relu()
        h = F.dropout(h, 0.5, self.training)
        return self.conv2(h, edge_index)


def prepare(chosen) -> Epoch:
    data = citation(chosen)
    model = GCN(data.num_features, 16, int(data.y.max()) + 1)
    model = plait.compile(model, data, rows=data.train_mask)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

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
