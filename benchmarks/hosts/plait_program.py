"""plait's systems, one rank: `python -m benchmarks.hosts.plait_program FOLDER SETTING OUTPUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.hosts.graphs import CLASSES, WIDTH, seeds_of
from benchmarks.hosts.judge import Judge
from benchmarks.hosts.rank import Record, set_weights, values_of
from benchmarks.hosts.systems import SYSTEMS, Setting
from torch_geometric.nn import GraphSAGE

import plait.distributed
from plait.distributed.train import Trainer


def maps_of(model: GraphSAGE) -> tuple[list[Any], list[Any]]:
    """Its linear maps and biases in the order of all systems."""
    linears = [linear for conv in model.convs for linear in (conv.lin_l, conv.lin_r)]
    return linears, [conv.lin_l.bias for conv in model.convs]


def main(folder: str, text: str, output: str) -> None:
    """Trains and records."""
    setting = Setting.from_dict(json.loads(text))
    system = SYSTEMS[setting.system]
    torch.manual_seed(setting.seed)
    hops = list(reversed(setting.fanout))
    with plait.distributed.init(f"{folder}/plait", wire=system.wire, timeout_seconds=600) as session:
        loader = plait.distributed.NeighborLoader(
            session,
            hops,
            np.concatenate(seeds_of(folder, "plait")),
            setting.batch,
            shuffle=True,
            cache=system.cache,
            policy=system.policy,
            prefetch=4,
            seed=setting.seed,
        )
        model = GraphSAGE(WIDTH, setting.hidden, 2, CLASSES, dropout=setting.dropout)
        set_weights(*maps_of(model), setting.hidden, setting.seed)
        trainer = Trainer(session, model, loader, learning_rate=setting.learning_rate)
        judge = Judge(Path(folder, "judge.npz")) if session.rank == 0 else None
        record = Record(output)
        for epoch in range(setting.epochs):
            dist.barrier()
            record.begin()
            report = trainer.epoch()
            measured = record.end()
            accuracy = None if judge is None else judge.accuracy(*values_of(*maps_of(model)))
            record.write(
                **measured,
                epoch=epoch,
                steps=report.steps,
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
