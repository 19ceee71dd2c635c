"""Mini-batches by neighbour sampling: GraphSAGE on a graph that does not have to fit one step."""

import torch
from graphs import Epoch, social, train
from torch.nn import functional as F
from torch_geometric.nn import SAGEConv

import plait
from plait.loader import NeighborLoader


class SAGE(torch.nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.conv1 = SAGEConv(features, hidden)
        self.conv2 = SAGEConv(hidden, classes)

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index).relu()
        return self.conv2(h, edge_index)


def prepare(chosen) -> Epoch:
    data = social(chosen)
    model = SAGE(data.num_features, 64, int(data.y.max()) + 1)
    model = plait.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = NeighborLoader(data, [15, 10], input_nodes=data.train_mask, batch_size=1024, shuffle=True)

    def epoch() -> float:
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
        return loss.item()

    return epoch


if __name__ == "__main__":
    train(prepare)
