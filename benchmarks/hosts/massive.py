"""MassiveGNN's scheme in front of DistDGL, after its description: a buffer, two scores, a batch ahead.

Buffered are the halo's nodes of largest degree at first. Every batch lowers the scores of buffered rows that
it does not ask for; every DELTA batches rows whose score fell below GAMMA ** DELTA leave for the halo's nodes
that were missed most often. A second thread samples and fetches the next batch while this one is trained on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dgl
import numpy as np
import torch

__all__ = ["Buffer", "one_ahead"]

GAMMA, DELTA = 0.995, 32


class Buffer:
    """Feature rows of `tensor`, a share of the halo's kept here; read them with `take`."""

    def __init__(self, graph: Any, tensor: Any, share: float) -> None:
        local = graph.local_partition
        halo = local.ndata[dgl.NID][~local.ndata["inner_node"].bool()]
        count = int(share * halo.numel())
        hottest = halo[torch.topk(graph.in_degrees(halo), count).indices]
        self._tensor = tensor
        self._ids = hottest.sort().values.numpy()
        self._rows = tensor[torch.from_numpy(self._ids)]
        self._keep = np.ones(count, np.float32)
        self._miss = np.zeros(graph.num_nodes(), np.float32)
        self._in_halo = np.zeros(graph.num_nodes(), bool)
        self._in_halo[halo.numpy()] = True
        self._miss[self._ids] = -1
        self._batches = 0

    def take(self, nodes: torch.Tensor) -> torch.Tensor:
        """The rows of `nodes`: buffered ones from here, all others in one pull."""
        self._batches += 1
        wanted = nodes.numpy()
        at = np.minimum(np.searchsorted(self._ids, wanted), self._ids.size - 1)
        is_kept = self._ids[at] == wanted
        slots = at[is_kept]
        self._keep *= GAMMA
        self._keep[slots] /= GAMMA
        out = torch.empty((wanted.size, self._rows.shape[1]))
        out[torch.from_numpy(is_kept)] = self._rows[torch.from_numpy(slots)]
        lacking = wanted[~is_kept]
        tired = np.flatnonzero(self._keep < GAMMA**DELTA) if self._batches % DELTA == 0 else slots[:0]
        if tired.size:
            fetched = self._swap(tired, lacking)
        else:
            self._miss[lacking[self._in_halo[lacking]]] += 1
            fetched = self._tensor[torch.from_numpy(lacking)]
        out[torch.from_numpy(~is_kept)] = fetched
        return out

    def _swap(self, tired: np.ndarray, lacking: np.ndarray) -> torch.Tensor:
        """Replaces low-scored rows by those missed most; the rows of `lacking`, pulled with the new ones."""
        new = np.flatnonzero(self._miss > 0)
        new = new[np.argsort(-self._miss[new], kind="stable")][: tired.size]
        tired = tired[: new.size]
        pulled = self._tensor[torch.from_numpy(np.concatenate((new, lacking)))]
        self._miss[self._ids[tired]] = self._keep[tired]
        self._keep[tired] = self._miss[new]
        self._miss[new] = -1
        self._ids[tired] = new
        self._rows[torch.from_numpy(tired)] = pulled[: new.size]
        order = np.argsort(self._ids)
        self._ids, self._keep = self._ids[order], self._keep[order]
        self._rows = self._rows[torch.from_numpy(order)]
        return pulled[new.size :]


def one_ahead(loader: Any, fetch: Any, seconds: dict[str, float]) -> Iterator[Any]:
    """The batches of a loader with what `fetch` makes of each, prepared by a second thread one ahead."""
    batches = iter(loader)

    def prepare() -> Any:
        begin = time.perf_counter()
        batch = next(batches, None)
        drawn = time.perf_counter()
        seconds["sampling"] += drawn - begin
        if batch is None:
            return None
        made = (batch, *fetch(batch))
        seconds["exchange"] += time.perf_counter() - drawn
        return made

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(prepare)
        while True:
            begin = time.perf_counter()
            made = coming.result()
            seconds["stall"] += time.perf_counter() - begin
            if made is None:
                return
            coming = thread.submit(prepare)
            yield made
