"""Link prediction: a GCN encoder, dot products as scores, new negative edges in every epoch."""

import torch
from graphs import Epoch, social, train
from torch.nn import functional as F
from torch_geometric.nn import GCNConv
from torch_geometric.utils import negative_sampling

import plait


class Encoder(torch.nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, hidden)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def score(z, edges):
    return (z[edges[0]] * z[edges[1]]).sum(dim=1)


def prepare(chosen) -> Epoch:
    data = social(chosen)
    model = Encoder(data.num_features, 64)
    model = plait.compile(model, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    held_out = torch.randperm(data.num_edges)[:10_000]
    linked = data.edge_index[:, held_out]
    target = torch.cat([torch.ones(linked.shape[1]), torch.zeros(linked.shape[1])])

    def epoch() -> float:
        optimizer.zero_grad()
        z = model(data.x, data.edge_index)
        apart = negative_sampling(data.edge_index, data.num_nodes, linked.shape[1])
        scores = torch.cat([score(z, linked), score(z, apart)])
        loss = F.binary_cross_entropy_with_logits(scores, target[: len(scores)])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


if __name__ == "__main__":
    train(prepare)
