"""Calls on graphs seen only once: the layer's expression on listed edges (runtime/listed.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.graph.build import INT32_LIMIT
from plait.ir import Expr
from plait.kernels.listed import entries
from plait.pyg.edges import is_attached
from plait.pyg.layers.base import Apply, Call, Lowered
from plait.pyg.operators import Operator
from plait.pyg.recall import EDGES_PLACE, WEIGHT_PLACE, Layer
from plait.runtime.listed import Listed, program_of
from plait.runtime.session import Session

__all__ = ["How", "Once", "matrix_of", "once", "once_weighted"]

# Edges times columns up to which the pass over the list, which no second thread shares, takes no longer than
# sorting and a sum by rows: 120,000 edges and 32 columns are one and the other.
_MOST_SUMMED = 1 << 22
# Edges times columns from which on the entries are grouped by row. To list 30,000 edges between 4,096 nodes
# then took 61 us instead of 40, to sum 64 columns of them 86 instead of 148 (128: 162, not 332); a second
# thread halves the sum alone. One thread loses with half as many edges or columns, and on a power-law graph,
# whose hubs stay in cache, 4% of a step with 25,000 edges.
_LEAST_GROUPED = 7 << 18
_PAIR_BYTES = 8  # of an entry's row and column
_CALLS = {False: Call(), True: Call(is_weighted=True)}
_PLAIN = (Tensor, nn.Parameter)
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class How:
    """What a layer does on an edge list, found once: even a property or a hash at every call would cost."""

    lowered: Lowered
    operator: int  # its number: layers with equal operators share a matrix
    diagonals: frozenset[str] | None


@functools.cache
def _number(operator: Operator) -> int:
    return next(_numbers)


_numbers = itertools.count()


@dataclass(slots=True)
class Once:
    """A call on listed edges; `planned` gives what runs expressions that are not evaluated so."""

    known: Layer
    how: How
    matrix: Listed
    planned: Callable[[], Apply]

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        """The layer's output."""
        known, lowered = self.known, self.how.lowered
        given = known.given(lowered, module, x) if type(x) is Tensor else None
        if given is ...:
            return known.learn(lowered, module, self._apply, x)
        program = None if given is None else program_of(given[0].forms)
        if given is None or program is None or program.parts != self.how.diagonals:
            return lowered.run(module, self._apply, x, None)
        return program.recalled(*given, self.matrix)

    def _apply(self, forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
        program = program_of(forms)
        if program is None or program.parts != self.how.diagonals:
            self.known.may_be_listed = False
            return self.planned()(forms, inputs)
        return program.on_list(inputs, self.matrix)


def once(
    session: Session, known: Layer, module: Any, key: tuple[Any, ...], x: Any, edges: Tensor, weight: Any,
    planned: Callable[[], Apply],
) -> Once | None:  # fmt: skip
    """The call on listed edges, where its graph is small and seen only once; None: it is planned.

    `key` recognises the call (`call_key`), so `weight` needs no gradient.
    """
    how = _how(known, module, weight is not None)
    if how is None:
        return None
    matrix = matrix_of(session, known, how, x, edges, weight, key[EDGES_PLACE], key[WEIGHT_PLACE])
    return None if matrix is None else Once(known, how, matrix, planned)


def matrix_of(
    session: Session, known: Layer, how: How, x: Tensor, edges: Tensor, weight: Tensor | None,
    edges_key: tuple[Any, ...], weight_key: tuple[Any, ...] | None,
) -> Listed | None:  # fmt: skip
    """The layer's matrix on a graph that was not seen before, by the identities of edges and weights.

    None: the graph has to be planned for.
    """
    if not known.may_be_listed or not session.lists_edges() or not _fits(x, edges, weight):
        return None
    count = x.shape[0]
    graph = (*edges_key, count, count, False)
    if graph in session.edges or session.has_sparse_view(x):
        return None
    listing = session.listings.of(graph, edges, session.num_calls)
    if listing is None:
        return None
    place = (how.operator, x.dtype, weight_key)
    matrix = listing.matrix(place, lambda: _made(session, how.lowered.operator, edges, weight, x))
    if matrix is not None:
        session.say_listed()
    return matrix


def once_weighted(
    session: Session, known: Layer, module: Any, weight_key: tuple[Any, ...], x: Any, graph: Any,
    edges: Tensor, weight: Tensor, planned: Callable[[], Apply],
) -> Once | None:  # fmt: skip
    """The call on listed edges, where the graph stays and its weights, without gradient, are used once.

    `graph` is what the session knows of the edges; the same weights may come with another one.
    """
    if not known.may_be_listed or type(edges) is not Tensor or not _fits(x, edges, weight):
        return None
    how = _how(known, module, True)
    listing = session.listings.of(weight_key, weight, session.num_calls) if known.may_be_listed else None
    if how is None or listing is None:
        return None
    place = (how.operator, id(graph))
    operator, values = how.lowered.operator, weight.detach()
    matrix = listing.matrix(place, lambda: _made(session, operator, edges, values, x), graph)
    return None if matrix is None else Once(known, how, matrix, planned)


def _how(known: Layer, module: Any, is_weighted: bool) -> How | None:
    """What the layer does on an edge list; None where it was not planned yet or does not support it."""
    how: How | None = known.listed.get(is_weighted)
    if how is None:
        lowered = known.lowered.get(_CALLS[is_weighted])
        if lowered is None:
            return None
        how = known.listed[is_weighted] = How(lowered, _number(lowered.operator), lowered.operator.diagonals)
        known.may_be_listed = _is_listed(lowered, module)
    return how


def _fits(x: Any, edges: Tensor, weight: Any) -> bool:
    """Whether the kernels take such operands, and few enough of them."""
    return (
        type(x) in _PLAIN
        and x.is_cpu
        and x.dim() == 2
        and x.dtype in _FLOATS
        and edges.is_cpu
        and edges.layout is torch.strided
        and edges.dtype is torch.int64
        and edges.dim() == 2
        and edges.shape[0] == 2
        and edges.shape[1] * x.shape[1] <= _MOST_SUMMED
        and x.shape[0] < INT32_LIMIT
        and (weight is None or (weight.dtype is x.dtype and weight.shape == edges.shape[1:]))
        and not is_attached(edges)
    )


def _is_listed(lowered: Lowered, module: Any) -> bool:
    """Whether a layer's matrix is one of those that are made of listed edges."""
    is_known = lowered.operator.diagonals is not None
    return is_known and not lowered.keeps_graph and module.flow == "source_to_target"


def _made(
    session: Session, operator: Operator, edges: Tensor, weight: Tensor | None, x: Tensor
) -> Listed | None:
    """The operator's matrix on the edges; None where they are out of range, which planning will report."""
    count = x.shape[0]
    found = entries(
        edges.detach(), weight, (count, count), x, operator.loops, operator.fill, operator.normalise,
        is_grouped=edges.shape[1] * x.shape[1] >= _LEAST_GROUPED,
    )  # fmt: skip
    if found is None:
        return None
    size = x.element_size()
    session.grow(edges.shape[1] * (_PAIR_BYTES + size) + count * size)
    return Listed(found)
