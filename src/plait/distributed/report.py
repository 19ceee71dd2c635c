"""What the analysis predicts for an epoch of mini-batches, to compare with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.analysis.analysis import Options, analyse
from plait.analysis.models import layers_by_name
from plait.analysis.network import Network
from plait.analysis.statistics import Statistics
from plait.kernels import launch
from plait.runtime.machine import machine_in_use

__all__ = ["Prediction", "predicted"]

_MINI_BATCH = "mini-batch, dependent"


@dataclass(frozen=True)
class Prediction:
    """An epoch as the analysis sees it: seconds of the slowest rank, bytes of all, nothing cached."""

    seconds: float
    bytes_of_rows: float

    def beside(self, seconds: float, size: float) -> str:
        """The prediction compared with the measured epoch, in one line."""
        return (
            f"predicted {self.seconds:.2f} s ({self.seconds / max(seconds, 1e-9):.2f} of measured), "
            f"{self.bytes_of_rows / 1e6:.1f} MB without a cache "
            f"({size / max(self.bytes_of_rows, 1.0):.2f} of it sent)"
        )


def predicted(
    session: Any, loader: Any, model: str, widths: Sequence[int], network: Network, seeds: Any
) -> Prediction | None:
    """An epoch of mini-batches over the session's parts, as plait analyze prices it; None for one rank."""
    if session.size == 1:
        return None
    statistics, machine = Statistics.of(session.graph), machine_in_use()
    threads = launch.num_threads()
    layers = layers_by_name(model, tuple(widths), statistics, machine, threads=threads)
    owner = np.repeat(np.arange(session.size), np.diff(session.bounds))
    options = Options(
        workers=(session.size,),
        network=network,
        partitions={session.size: owner},
        batch_size=loader.batch_size * len(session.owned),
        fanouts=tuple(loader.fanouts),
        seeds=np.asarray(seeds, np.int64),
        train_share=len(seeds) / max(1, statistics.nodes),
        threads=threads,
        wire_bytes=session.exchange.local.row[1].itemsize,
    )
    found = analyse(model, layers, statistics, machine, options)
    strategy = next(s for s in found.strategies if s.name == _MINI_BATCH)
    return Prediction(strategy.seconds_per_epoch, sum(t.total for t in strategy.traffic_per_layer))
