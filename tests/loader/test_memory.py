"""Epoch after epoch the same memory: no object, thread, file or page more than the first ones took."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.features.cache import Cache
from plait.graph.partition import has_metis
from plait.loader import ClusterData, ClusterLoader, LinkNeighborLoader, NeighborLoader
from tests.loader.batches import small_data, small_hetero

EPOCHS = 3  # of a round


def loaders() -> dict[str, Any]:
    data = small_data(2000, 12_000)
    data.x = torch.randn(2000, 16)
    given = {"batch_size": 200, "shuffle": True, "seed": 0}
    made = {
        "plain": NeighborLoader(data, [5, 5], **given),
        "prefetch": NeighborLoader(data, [5, 5], prefetch=2, **given),
        "cache": NeighborLoader(data, [5, 5], prefetch=2, features=Cache(data.x, 300), **given),
        "lru": NeighborLoader(data, [5, 5], prefetch=2, features=Cache(data.x, 300, "lru"), **given),
        "links": LinkNeighborLoader(data, [3], data.edge_index[:, :2000], neg_sampling="binary", **given),
        "hetero": NeighborLoader(small_hetero(), [3, 2], "paper", prefetch=2, batch_size=7, shuffle=True),
    }
    if has_metis():
        made["clusters"] = ClusterLoader(ClusterData(data, 20, log=False), batch_size=2, prefetch=2)
    return made


LOADERS = loaders()


def epoch(loader: Any) -> None:
    for _ in loader:
        pass


def held(loader: Any, epochs: int) -> int:
    """Bytes of Python objects and arrays alive after so many epochs."""
    for _ in range(epochs):
        epoch(loader)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("name", LOADERS)
def test_epochs_leave_no_objects_behind(name: str) -> None:
    loader = LOADERS[name]
    epoch(loader)
    threads = threading.active_count()
    tracemalloc.start()
    try:
        after = [held(loader, EPOCHS) for _ in range(4)]
    finally:
        tracemalloc.stop()
    # a leak grows in every round; pools that are filled, and threads that meet, grow in some of them
    grown = min(b - a for a, b in pairwise(after))
    assert grown < 3000 * EPOCHS  # the arrays of one epoch of the smallest loader are 20,000 bytes
    assert threading.active_count() == threads


def pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_epochs_leave_no_pages_and_no_files_behind() -> None:
    loader = LOADERS["cache"]
    for _ in range(EPOCHS):
        epoch(loader)
    gc.collect()
    before, files = pages(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        epoch(loader)
    gc.collect()
    grown = (pages() - before) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 20_000_000  # all batches of these epochs together are twice that
    assert len(os.listdir("/proc/self/fd")) == files
