"""The GCN of gcn_pyg.py over processes: torchrun --nproc-per-node 4 examples/shard_plait.py"""

import torch
from gcn_pyg import GCN
from graphs import Epoch, citation, train
from torch.nn import functional as F

import plait


def prepare(chosen) -> Epoch:
    data = citation(chosen)
    model = GCN(data.num_features, 16, int(data.y.max()) + 1)
    sharded = plait.shard(model, data)  # this process's part: sharded.data
    share = sharded.data
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def epoch() -> float:
        optimizer.zero_grad()
        out = sharded(share.x, share.edge_index)
        loss = sharded.loss(F.cross_entropy, out, share.y, share.train_mask)  # a share of the mean over all
        loss.backward()  # gradients are summed over processes
        optimizer.step()
        return sharded.total(loss).item()

    return epoch


if __name__ == "__main__":
    train(prepare)
