"""Memory on a GPU that mini-batches of up to one size are copied to, and that a captured step reads.

A batch of the host crosses in one copy, padding included, from pinned memory it is packed into. Separate
copies from ordinary memory would each wait until the device has finished the step before, so that host and
device would take turns. Numbers of a batch's own nodes cross as 32 bits and become PyG's 64 on the device,
inside the captured step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.pyg.edges import attach_starts, starts_of
from plait.runtime.capture import Replay

__all__ = ["Slot", "layout", "starts"]

_ALIGNED = 256  # bytes: where an attribute begins
_BLOCKS = 2  # of pinned memory: one is packed while the device copies the other
_OTHER = 1e3  # in padding, to detect code that reads it
_STARTS = "starts of edge_index"  # no attribute's name


@dataclass(frozen=True)
class _Kind:
    """The dimension along which an attribute of a batch counts nodes or edges; -1 for neither."""

    dimension: int
    counts: str  # "nodes", "edges", "starts" or ""

    def used(self, size: tuple[int, int]) -> int:
        """Its length in a batch of so many nodes and edges."""
        return {"nodes": size[0], "edges": size[1], "starts": size[0] + 1}[self.counts]


def _kind_of(name: str, value: Tensor, size: tuple[int, int]) -> _Kind:
    if name == _STARTS:
        return _Kind(0, "starts")
    if name == "edge_index":
        return _Kind(1, "edges")
    if value.dim() and (name.startswith("edge_") or name == "e_id") and value.shape[0] == size[1]:
        return _Kind(0, "edges")
    if value.dim() and value.shape[0] == size[0]:
        return _Kind(0, "nodes")
    return _Kind(-1, "")


def starts(batch: Any) -> Tensor | None:
    """Where the edges of each target begin, if the batch's sampler listed them so."""
    edge_index = getattr(batch, "edge_index", None)
    return starts_of(edge_index) if isinstance(edge_index, Tensor) else None


def _tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch, and where the edges of each target begin if that is known."""
    found = {name: value for name, value in batch.to_dict().items() if isinstance(value, Tensor)}
    listed = starts(batch)
    return found if listed is None else found | {_STARTS: listed}


def _numbers(batch: Any) -> dict[str, Any]:
    """Attributes that are part of what is captured; lists, as the nodes of every hop, are left out."""
    found = batch.to_dict().items()
    return {n: v for n, v in found if isinstance(v, int | float | str) and n != "num_nodes"}


def layout(batch: Any, size: tuple[int, int]) -> tuple[Any, ...]:
    """What batches of one slot have in common besides their size."""
    parts = []
    for name, value in sorted(_tensors(batch).items()):
        kind = _kind_of(name, value, size)
        shape = tuple([n for k, n in enumerate(value.shape) if k != kind.dimension])
        parts.append((name, kind, shape, value.dtype))
    return tuple(parts), tuple(sorted(_numbers(batch).items()))


@dataclass
class _Part:
    """An attribute: `crossing` as it arrives, at byte `begin` of a block, `place` as the step reads it."""

    name: str
    kind: _Kind
    begin: int
    crossing: Tensor
    place: Tensor

    def of(self, block: Tensor) -> Tensor:
        """The same place in another block."""
        end = self.begin + self.crossing.numel() * self.crossing.element_size()
        return block[self.begin : end].view(self.crossing.dtype).view(self.crossing.shape)

    def rest(self, used: int) -> Tensor:
        """The padding behind `used` rows or columns."""
        dimension = self.kind.dimension
        return self.crossing.narrow(dimension, used, self.crossing.shape[dimension] - used)


@dataclass
class _Pinned:
    """A block in pinned memory, its attributes' places as arrays, and the event that ends its last copy."""

    block: Tensor
    places: list[NDArray[Any]]
    copied: Any


def _array(tensor: Tensor) -> NDArray[Any]:
    """A tensor of the host for numpy, which knows no bfloat16.

    Operations of torch wake threads of their own, beside those that sample, and give up the interpreter.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: NDArray[Any] = tensor.numpy()
    return array


class Slot:
    """Memory that batches of up to one size are copied to, and the step captured on it."""

    replay: Replay

    def __init__(self, batch: Any, size: tuple[int, int], padded: tuple[int, int], device: torch.device):
        self.padded, self.batch = padded, type(batch)()
        self._block, self._parts = _arranged(_tensors(batch), size, padded, device)
        self._pinned: deque[_Pinned] = deque()
        for part in self._parts:
            if part.name != _STARTS:
                self.batch[part.name] = part.place
        for name, number in _numbers(batch).items():
            self.batch[name] = number
        self.batch.num_nodes = padded[0]

    def fill(self, batch: Any, size: tuple[int, int]) -> None:
        """Copy a batch here; `ready` makes of it what the step reads."""
        given = _tensors(batch)
        if all(given[part.name].device.type == "cpu" for part in self._parts):
            self._carry(given, size)
            return
        for part in self._parts:
            value, crossing = given[part.name], part.crossing
            if part.kind.counts:
                used = part.kind.used(size)
                part.rest(used).fill_(self._padding(part, size))
                crossing = crossing.narrow(part.kind.dimension, 0, used)
            crossing.copy_(value, non_blocking=True)

    def _carry(self, given: Mapping[str, Tensor], size: tuple[int, int]) -> None:
        """Pack a batch of the host and have the device copy it, while the host goes on."""
        pinned = self._free_block()
        for part, target in zip(self._parts, pinned.places, strict=True):
            value = _array(given[part.name])
            if not part.kind.counts:
                target[...] = value
                continue
            used, before = part.kind.used(size), (slice(None),) * part.kind.dimension
            target[(*before, slice(used))] = value
            target[(*before, slice(used, None))] = self._padding(part, size)
        self._block.copy_(pinned.block, non_blocking=True)
        if pinned.copied is not None:
            pinned.copied.record()
        self._pinned.append(pinned)

    def _free_block(self) -> _Pinned:
        """Memory of the host that the device has read."""
        if len(self._pinned) == _BLOCKS:
            pinned = self._pinned.popleft()
            if pinned.copied is not None:
                pinned.copied.synchronize()
            return pinned
        is_cuda = self._block.is_cuda
        block = torch.empty(self._block.shape, dtype=torch.uint8, pin_memory=is_cuda)
        copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        return _Pinned(block, [_array(part.of(block)) for part in self._parts], copied)

    def _padding(self, part: _Part, size: tuple[int, int]) -> int:
        """What padding holds: loops of the first padding node, listed behind all other edges; else zeros."""
        return {"edge_index": size[0], _STARTS: self.padded[1]}.get(part.name, 0)

    def disturb(self, size: tuple[int, int]) -> None:
        """Put other values into the padding of what was filled, to detect code that reads it."""
        for part in self._parts:
            if part.name in ("edge_index", _STARTS) or not part.kind.counts:
                continue
            used = part.kind.used(size)
            if part.crossing.is_floating_point():
                part.rest(used).fill_(_OTHER)
            elif used and part.kind.counts == "nodes":
                part.rest(used).copy_(part.crossing[used - 1].expand_as(part.rest(used)))

    def ready(self) -> None:
        """The first thing in a step: attributes as PyG has them, and what the sampler knows of the edges."""
        for part in self._parts:
            if part.place is not part.crossing:
                part.place.copy_(part.crossing)
            if part.name == _STARTS:  # after edge_index, which must not change any more
                attach_starts(self.batch.edge_index, part.place)


def _arranged(
    given: Mapping[str, Tensor], size: tuple[int, int], padded: tuple[int, int], device: torch.device
) -> tuple[Tensor, list[_Part]]:
    """(a block, where every attribute lies in it and is read)."""
    plan, end = [], 0
    for name, value in given.items():
        kind = _kind_of(name, value, size)
        room = kind.used(padded) if kind.counts else 0
        shape = [room if k == kind.dimension else n for k, n in enumerate(value.shape)]
        dtype = torch.int32 if name == "edge_index" else value.dtype
        plan.append((name, kind, end, shape, dtype))
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
    block = torch.zeros(end, dtype=torch.uint8, device=device)
    parts = []
    for name, kind, begin, shape, dtype in plan:
        crossing = block[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        place = crossing if dtype == given[name].dtype else crossing.to(given[name].dtype)
        parts.append(_Part(name, kind, begin, crossing, place))
    return block, parts
