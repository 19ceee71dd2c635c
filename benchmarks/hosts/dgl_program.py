"""DistDGL's programs, one host: `-m benchmarks.hosts.dgl_program FOLDER SETTING OUTPUT IPS`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.distributed as dist
from benchmarks.hosts.graphs import CLASSES, NAME, WIDTH, seeds_of
from benchmarks.hosts.judge import Judge
from benchmarks.hosts.rank import Record, set_weights, values_of
from benchmarks.hosts.systems import SYSTEMS, Setting
from dgl.nn import SAGEConv


class SAGE(torch.nn.Module):
    """Two layers of DGL's SAGEConv with the first weights of all systems."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [SAGEConv(WIDTH, setting.hidden, "mean"), SAGEConv(setting.hidden, CLASSES, "mean")]
        )
        self.dropout = torch.nn.Dropout(setting.dropout)
        set_weights(*self.maps(), setting.hidden, setting.seed)

    def maps(self) -> tuple[list[Any], list[Any]]:
        """Its linear maps and biases in the order of all systems."""
        linears = [linear for layer in self.layers for linear in (layer.fc_neigh, layer.fc_self)]
        return linears, [layer.fc_self.bias for layer in self.layers]

    def forward(self, blocks: Any, x: torch.Tensor) -> torch.Tensor:
        """The scores of the seeds."""
        hidden = self.dropout(torch.relu(self.layers[0](blocks[0], x)))
        return self.layers[1](blocks[1], hidden)


def batches_of(loader: Any, graph: Any, buffer: Any, seconds: dict[str, float]) -> Iterator[Any]:
    """(blocks, x, y) of every batch of an epoch, fetched as the system does it."""

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


def main(folder: str, text: str, output: str, ips: str) -> None:
    """Serves, or trains and records."""
    setting = Setting.from_dict(json.loads(text))
    system = SYSTEMS[setting.system]
    dgl.distributed.initialize(ips, net_type="socket")  # a server stays here until the end
    dist.init_process_group("gloo")
    torch.manual_seed(setting.seed)
    dgl.seed(setting.seed)
    graph = dgl.distributed.DistGraph(NAME, part_config=f"{folder}/dgl/{NAME}.json")
    train = torch.from_numpy(seeds_of(folder, "dgl")[dist.get_rank()])
    sampler = dgl.dataloading.NeighborSampler(list(setting.fanout))
    loader = dgl.dataloading.DistNodeDataLoader(
        graph, train, sampler, shuffle=True, batch_size=setting.batch, drop_last=False
    )
    buffer = None
    if system.loader == "massive":
        from benchmarks.hosts.massive import Buffer

        buffer = Buffer(graph, graph.ndata["feat"], system.cache)
    if system.loader == "plait":
        import plait.distributed.dgl

        loader = plait.distributed.dgl.prefetched(loader, graph, "feat", "label", cache=system.cache)
    model = SAGE(setting)
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate)
    judge = Judge(Path(folder, "judge.npz")) if dist.get_rank() == 0 else None
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
        extra = loader.report() if system.loader == "plait" else {}
        accuracy = None if judge is None else judge.accuracy(*values_of(*model.maps()))
        told = {"epoch": epoch, "steps": steps, "loss": total / steps, "accuracy": accuracy}
        record.write(**measured, **{**seconds, **extra}, **told)
    dist.barrier()
    dgl.distributed.exit_client()


if __name__ == "__main__":
    if os.environ["DGL_ROLE"] == "server":
        os.environ.setdefault("RANK", "-1")
    main(*sys.argv[1:])
