"""plait's arms, one rank: `python -m benchmarks.hosts.plait_program FOLDER SETTING OUTPUT`."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from benchmarks.hosts.arms import ARMS, Setting
from benchmarks.hosts.graphs import CLASSES, WIDTH
from benchmarks.hosts.rank import Record, set_weights
from torch_geometric.nn import GraphSAGE

import plait.distributed
from plait.distributed.train import Trainer


def model_of(setting: Setting) -> GraphSAGE:
    """PyG's GraphSAGE with the first weights of all systems."""
    model = GraphSAGE(WIDTH, setting.hidden, 2, CLASSES, dropout=setting.dropout)
    linears = [linear for conv in model.convs for linear in (conv.lin_l, conv.lin_r)]
    set_weights(linears, [conv.lin_l.bias for conv in model.convs], setting.hidden, setting.seed)
    return model


def main(folder: str, text: str, output: str) -> None:
    """Trains and records."""
    setting = Setting.from_dict(json.loads(text))
    arm = ARMS[setting.arm]
    torch.manual_seed(setting.seed)
    hops = list(reversed(setting.fanout))
    with plait.distributed.init(f"{folder}/plait", timeout_seconds=120) as session:
        options = {"batch_size": setting.batch, "seed": setting.seed}
        loader = plait.distributed.NeighborLoader(
            session, hops, "train", shuffle=True, cache=arm.cache, policy=arm.policy, prefetch=4, **options
        )
        judged = plait.distributed.NeighborLoader(session, hops, "val", pad=False, prefetch=2, **options)
        trainer = Trainer(session, model_of(setting), loader, learning_rate=setting.learning_rate)
        record = Record(output)
        for epoch in range(setting.epochs):
            dist.barrier()
            record.begin()
            report = trainer.epoch()
            measured = record.end()
            accuracy = trainer.accuracy(judged)
            record.write(
                **measured,
                epoch=epoch,
                loss=report.loss,
                accuracy=accuracy,
                sampling=report.sampling,
                exchange=report.exchange,
                look_up=report.look_up,
                stall=report.stall,
                compute=report.compute,
                all_reduce=report.all_reduce,
                remote_bytes=report.bytes_in,
                hit_rate=report.hit_rate,
                choice=str(loader.cache.choice),
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
