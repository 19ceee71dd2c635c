"""A heterogeneous model: users and items, three relations, one SAGE layer each per step."""

import torch
from graphs import Epoch, shop, train
from torch.nn import functional as F
from torch_geometric.nn import HeteroConv, Linear, SAGEConv


class Shop(torch.nn.Module):
    def __init__(self, relations, features, hidden, classes):
        super().__init__()
        self.conv1 = HeteroConv({name: SAGEConv((features, features), hidden) for name in relations})
        self.conv2 = HeteroConv({name: SAGEConv((hidden, hidden), hidden) for name in relations})
        self.head = Linear(hidden, classes)

    def forward(self, x_dict, edge_index_dict):
        h = {name: rows.relu() for name, rows in self.conv1(x_dict, edge_index_dict).items()}
        return self.head(self.conv2(h, edge_index_dict)["item"])


def prepare(chosen) -> Epoch:
    data = shop(chosen)
    model = Shop(data.edge_types, 64, 64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x_dict, data.edge_index_dict)
        loss = F.cross_entropy(out, data["item"].y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


if __name__ == "__main__":
    train(prepare)
