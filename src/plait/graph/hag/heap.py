"""A binary min-heap in the first entries of an array, for compiled searches."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from plait.graph.compiled import compiled

__all__ = ["pop_smallest", "push"]

Ints = NDArray[Any]


@compiled
def push(heap: Ints, size: int, value: int) -> None:
    """Insert `value` into a heap of `size` entries."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] <= value:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = value


@compiled
def pop_smallest(heap: Ints, size: int) -> int:
    """The smallest of `size` entries; the others are a heap of size - 1 afterwards."""
    smallest = heap[0]
    size -= 1
    value = heap[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = value
    return smallest  # type: ignore[no-any-return]
