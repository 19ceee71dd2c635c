"""Batches on their way to a device: copied from pinned memory on a stream of its own while others compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from plait.errors import InputError
from plait.pyg.edges import attach_starts, carry, starts_of

__all__ = ["Transfer"]


class Transfer:
    """Starts copies in the threads that prepare batches, and ends them where batches are handed out.

    On a CUDA device the copy does not wait for the computation and the computation waits, on the device, for
    its own copy only. Elsewhere a batch is simply moved; with no device it stays, pinned if requested.
    """

    def __init__(self, device: Any, pin: bool) -> None:
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"device={device!r} is not a device of torch ({error}); write for example cuda:0"
            ) from error
        self._is_cuda = self.device is not None and self.device.type == "cuda"
        if self._is_cuda and not torch.cuda.is_available():
            raise InputError(
                f"device={device!r}: torch finds no such device; leave it out to stay on the CPU"
            )
        self._pin = (pin or self._is_cuda) and torch.cuda.is_available()
        self._stream: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}

    def start(self, batch: Any) -> Any:
        """The batch on its way, with the event that ends its copy; its edge_index carries its graph along."""
        edge_index = _edges_of(batch)
        if self._pin:
            batch = batch.pin_memory()
            if edge_index is not None:
                carry(edge_index, batch.edge_index)
        if self.device is None:
            return batch, None
        if not self._is_cuda:
            return batch.to(self.device), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's own lack
        starts = None if edge_index is None else starts_of(batch.edge_index)
        with torch.cuda.stream(self._stream):
            moved = batch.to(self.device, non_blocking=True)
            if starts is not None:
                attach_starts(moved.edge_index, starts.to(self.device, non_blocking=True))
            return moved, self._stream.record_event()

    def finish(self, started: Any) -> Any:
        """The batch, safe to use on the current stream of the caller."""
        batch, event = started
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            # its memory belongs to the copying stream: not to be used again before the caller is done with it
            batch.record_stream(current)
            edge_index = _edges_of(batch)
            starts = None if edge_index is None else starts_of(edge_index)
            if starts is not None:
                starts.record_stream(current)
        return batch


def _edges_of(batch: Any) -> Tensor | None:
    """The edge_index of a batch of one node type."""
    found = batch._store.get("edge_index") if isinstance(batch, Data) else None
    return found if isinstance(found, Tensor) else None
