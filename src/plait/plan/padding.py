"""A few sizes that mini-batches are padded to: one captured step serves all batches of a size."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fitting", "padded_sizes"]

Size = tuple[int, ...]
_MOST_POINTS = 256  # batches looked at one by one; of more, neighbours are joined first


def padded_sizes(
    sizes: Sequence[Size], most: int, weights: Sequence[float] | None = None
) -> tuple[Size, ...]:
    """At most `most` sizes, ascending, so that every given size fits one with the least total padding.

    A size has one number per dimension (nodes, edges); `weights` are the costs of one more of each, 1 if not
    given. Batches are sorted by cost and cut into groups, each padded to its largest in every dimension. With
    one dimension this is optimal.
    """
    if not sizes or most < 1:
        return ()
    weights = (1.0,) * len(sizes[0]) if weights is None else weights
    ranked = sorted(sizes, key=lambda size: (_cost(size, weights), size))
    points = _joined(ranked)
    best: list[tuple[float, tuple[int, ...]]] = [
        (0.0, ())
    ]  # (padded cost of the first j points, where groups end)
    best += [_run(points, 0, j, weights) for j in range(1, len(points) + 1)]
    for _ in range(1, most):
        best = [best[0], *(_best_cut(points, best, j, weights) for j in range(1, len(points) + 1))]
    ends = best[-1][1]
    starts = (0, *ends[:-1])
    return tuple(sorted({_largest(points, i, j) for i, j in zip(starts, ends, strict=True)}))


def fitting(size: Size, choices: Sequence[Size], weights: Sequence[float] | None = None) -> Size | None:
    """The cheapest of the choices that is not smaller in any dimension, or None."""
    weights = (1.0,) * len(size) if weights is None else weights
    able = [one for one in choices if all(a >= b for a, b in zip(one, size, strict=True))]
    return min(able, key=lambda one: _cost(one, weights), default=None)


def _cost(size: Size, weights: Sequence[float]) -> float:
    return sum(weight * count for weight, count in zip(weights, size, strict=True))


def _joined(ranked: Sequence[Size]) -> list[tuple[int, Size]]:
    """(batches, their largest size) of neighbours in the order of cost."""
    group = -(-len(ranked) // _MOST_POINTS)
    parts = [ranked[k : k + group] for k in range(0, len(ranked), group)]
    return [(len(part), tuple(map(max, zip(*part, strict=True)))) for part in parts]


def _largest(points: Sequence[tuple[int, Size]], first: int, last: int) -> Size:
    return tuple(map(max, zip(*(size for _, size in points[first:last]), strict=True)))


def _run(
    points: Sequence[tuple[int, Size]], first: int, last: int, weights: Sequence[float]
) -> tuple[float, tuple[int, ...]]:
    """(cost of the points [first, last) padded to their largest, where the group ends)."""
    count = sum(number for number, _ in points[first:last])
    return count * _cost(_largest(points, first, last), weights), (last,)


def _best_cut(
    points: Sequence[tuple[int, Size]],
    best: Sequence[tuple[float, tuple[int, ...]]],
    last: int,
    weights: Sequence[float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest way to pad the first `last` points with one group more than `best` has."""
    options = [best[last]]
    largest = [0.0] * len(weights)
    count = 0
    for first in range(last - 1, -1, -1):  # the last group grows from the right
        number, size = points[first]
        count += number
        largest = [max(a, b) for a, b in zip(largest, size, strict=True)]
        before, ends = best[first]
        cost = sum(weight * most for weight, most in zip(weights, largest, strict=True))
        options.append((before + count * cost, (*ends, last)))
    return min(options)
