"""DistDGL's arms, one host: `-m benchmarks.hosts.dgl_program FOLDER SETTING OUTPUT IPS`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import dgl
import torch
import torch.distributed as dist
from benchmarks.hosts.arms import ARMS, Setting
from benchmarks.hosts.graphs import CLASSES, NAME, WIDTH
from benchmarks.hosts.rank import Record, set_weights
from dgl.nn import SAGEConv

_VALIDATED = 2000  # nodes of a rank's validation nodes that are judged


class SAGE(torch.nn.Module):
    """Two layers of DGL's SAGEConv with the first weights of all systems."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [SAGEConv(WIDTH, setting.hidden, "mean"), SAGEConv(setting.hidden, CLASSES, "mean")]
        )
        self.dropout = torch.nn.Dropout(setting.dropout)
        linears = [linear for layer in self.layers for linear in (layer.fc_neigh, layer.fc_self)]
        set_weights(linears, [layer.fc_self.bias for layer in self.layers], setting.hidden, setting.seed)

    def forward(self, blocks: Any, x: torch.Tensor) -> torch.Tensor:
        """The scores of the seeds."""
        hidden = self.dropout(torch.relu(self.layers[0](blocks[0], x)))
        return self.layers[1](blocks[1], hidden)


def batches_of(loader: Any, graph: Any, buffer: Any, seconds: dict[str, float]) -> Iterator[Any]:
    """(blocks, x, y) of every batch of an epoch, fetched as the arm does it."""

    def fetch(batch: Any) -> tuple[Any, Any]:
        nodes, seeds, _ = batch
        x = graph.ndata["feat"][nodes] if buffer is None else buffer.take(nodes)
        return x, graph.ndata["label"][seeds]

    if buffer is not None:
        from benchmarks.hosts.massive import one_ahead

        for (_, _, blocks), x, y in one_ahead(loader, fetch, seconds):
            yield blocks, x, y
        return
    batches = iter(loader)
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        drawn = time.perf_counter()
        seconds["sampling"] += drawn - begin
        if batch is None:
            return
        x, y = fetch(batch)
        seconds["exchange"] += time.perf_counter() - drawn
        yield batch[2], x, y


def accuracy(model: Any, loader: Any, graph: Any) -> float:
    """The share of right answers over all ranks, sampled with the fanouts of training."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for blocks, x, y in batches_of(loader, graph, None, defaultdict(float)):
            counts += torch.tensor([(model(blocks, x).argmax(1) == y).sum(), y.numel()])
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main(folder: str, text: str, output: str, ips: str) -> None:
    """Serves, or trains and records."""
    setting = Setting.from_dict(json.loads(text))
    arm = ARMS[setting.arm]
    dgl.distributed.initialize(ips, net_type="socket")  # a server stays here until the end
    dist.init_process_group("gloo")
    torch.manual_seed(setting.seed)
    graph = dgl.distributed.DistGraph(NAME, part_config=f"{folder}/dgl/{NAME}.json")
    book = graph.get_partition_book()
    train = dgl.distributed.node_split(graph.ndata["train_mask"], book, force_even=True)
    valid = dgl.distributed.node_split(graph.ndata["val_mask"], book, force_even=True)[:_VALIDATED]
    sampler = dgl.dataloading.NeighborSampler(list(setting.fanout))
    options = {"batch_size": setting.batch, "drop_last": False}
    loader = dgl.dataloading.DistNodeDataLoader(graph, train, sampler, shuffle=True, **options)
    judged = dgl.dataloading.DistNodeDataLoader(graph, valid, sampler, shuffle=False, **options)
    buffer = None
    if arm.loader == "massive":
        from benchmarks.hosts.massive import Buffer

        buffer = Buffer(graph, graph.ndata["feat"], arm.cache)
    if arm.loader == "plait":
        import plait.distributed.dgl

        loader = plait.distributed.dgl.prefetched(loader, graph, "feat", "label", cache=arm.cache)
    model = SAGE(setting)
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
    record = Record(output)
    for epoch in range(setting.epochs):
        seconds: dict[str, float] = defaultdict(float)
        total = steps = 0.0
        dist.barrier()
        record.begin()
        with trained.join():
            for blocks, x, y in batches_of(loader, graph, buffer, seconds):
                begin = time.perf_counter()
                loss = torch.nn.functional.cross_entropy(trained(blocks, x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total, steps = total + float(loss.detach()), steps + 1
                seconds["compute"] += time.perf_counter() - begin
        measured = record.end()
        extra = loader.report() if arm.loader == "plait" else {}
        judged_as = accuracy(model, judged, graph)
        record.write(**measured, **{**seconds, **extra}, epoch=epoch, loss=total / steps, accuracy=judged_as)
    dist.barrier()
    dgl.distributed.exit_client()


if __name__ == "__main__":
    if os.environ["DGL_ROLE"] == "server":
        os.environ.setdefault("RANK", "-1")
    main(*sys.argv[1:])
