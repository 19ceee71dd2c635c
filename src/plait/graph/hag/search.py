"""The front door of the searches: arguments checked, the right search called, a Hag returned."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError
from plait.graph.csr import require_graph
from plait.graph.hag.assemble import assemble, plain
from plait.graph.hag.fast import merge_components, merge_similar
from plait.graph.hag.hierarchy import ORDERS, Hag
from plait.graph.hag.merge import UNLIMITED, Limits
from plait.graph.hag.overlap import merge_overlapping
from plait.graph.hag.rows import working_rows

if TYPE_CHECKING:
    from plait.graph.csr import Graph

__all__ = ["MODES", "search"]

Ints = NDArray[Any]

MODES = ("exact", "fast")


def search(
    graph: Graph,
    capacity: float | None = None,
    max_depth: int | None = None,
    order: str = "set",
    min_count: int = 3,
    time_budget: float | None = None,
    mode: str = "exact",
    inline: bool = True,
) -> Hag:
    """A hierarchy that computes the same aggregation of `graph` with fewer additions.

    capacity: most merges; an int counts them, a float is a fraction of the nodes, None sets no limit.
    max_depth: longest chain of merges (before inlining).
    order: "set" for sums, "idempotent" for max and min.
    min_count: a merge that fewer rows share is not made; 3 saves traffic, 2 saves additions only.
    time_budget: seconds, after which the best so far is returned.
    mode: "exact" greedy, or "fast" for graphs above 10 M edges or with hubs.
    inline: dissolve partial sums that only one row reads.
    """
    require_graph(graph, "hag.search").require_int32("hag.search")
    _check_choices(order, mode, min_count, time_budget)
    deadline = math.inf if time_budget is None else time.perf_counter() + time_budget
    limits = Limits(_capacity(capacity, graph.num_nodes), _depth(max_depth), min_count, deadline)
    if limits.capacity == 0 or limits.max_depth == 0 or graph.num_edges == 0 or min_count > graph.num_nodes:
        return plain(graph, order)
    work = working_rows(graph.indptr, graph.indices, drop_repeats=order == "idempotent")
    merge = merge_components if mode == "exact" else merge_similar
    merged = merge(work.rows, graph.num_sources, limits)
    parts = np.column_stack((merged.left, merged.right)).reshape(-1)
    parts_start = 2 * np.arange(merged.left.size + 1, dtype=np.int64)
    hag = assemble(graph, work, parts_start, parts, order, inline, merged.is_complete, limits.capacity)
    return hag if order == "set" else merge_overlapping(hag, graph, limits, inline)


def _capacity(capacity: float | None, num_nodes: int) -> int:
    if capacity is None:
        return UNLIMITED
    if isinstance(capacity, bool) or not isinstance(capacity, (int, float, np.integer, np.floating)):
        raise InputError(
            f"capacity={capacity!r} is not a number; pass a count, a fraction of the nodes, or None"
        )
    if math.isnan(capacity) or capacity < 0:
        raise InputError(
            f"capacity={capacity} is negative or not a number; pass 0 for the plain graph or None"
        )
    if isinstance(capacity, (int, np.integer)):
        return min(int(capacity), UNLIMITED)
    share = float(capacity) * num_nodes
    return int(min(share, UNLIMITED))


def _depth(max_depth: int | None) -> int:
    if max_depth is None:
        return UNLIMITED
    if isinstance(max_depth, bool) or not isinstance(max_depth, (int, np.integer)) or max_depth < 0:
        raise InputError(f"max_depth={max_depth!r} is not a depth; pass 0 or more, or None for no limit")
    return min(int(max_depth), UNLIMITED)


def _check_choices(order: str, mode: str, min_count: int, time_budget: float | None) -> None:
    if order not in ORDERS:
        raise InputError(f"order={order!r} is unknown; choose one of {', '.join(ORDERS)}")
    if mode not in MODES:
        raise InputError(f"mode={mode!r} is unknown; choose one of {', '.join(MODES)}")
    if isinstance(min_count, bool) or not isinstance(min_count, (int, np.integer)) or min_count < 2:
        raise InputError(f"min_count={min_count!r} saves nothing; pass 2 (additions) or more (3: traffic)")
    if time_budget is not None and not (isinstance(time_budget, (int, float)) and time_budget >= 0):
        raise InputError(f"time_budget={time_budget!r} is not a time; pass seconds or None")
