"""Graph classification: GIN over batches of small graphs, shuffled in every epoch."""

import torch
from graphs import Epoch, molecules, train
from torch.nn import Linear, ReLU, Sequential
from torch.nn import functional as F
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

import plait


class GIN(torch.nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.conv1 = GINConv(Sequential(Linear(features, hidden), ReLU(), Linear(hidden, hidden)))
        self.conv2 = GINConv(Sequential(Linear(hidden, hidden), ReLU(), Linear(hidden, hidden)))
        self.head = Linear(hidden, classes)

    def forward(self, x, edge_index, batch):
        h = self.conv1(x, edge_index).relu()
        h = self.conv2(h, edge_index).relu()
        return self.head(global_add_pool(h, batch))


def prepare(chosen) -> Epoch:
    loader = DataLoader(molecules(chosen), batch_size=256, shuffle=True)
    model = GIN(16, 64, 2)
    model = plait.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> float:
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
            loss.backward()
            optimizer.step()
        return loss.item()

    return epoch


if __name__ == "__main__":
    train(prepare)
