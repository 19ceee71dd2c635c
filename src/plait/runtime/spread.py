"""Planned expressions over ranks: the constants of one rank's rows, the kernels of exchanges, the runs.

Runs are kept as long as the model: whether a run is made again decides what is sent, and that has to happen
on all ranks in the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from plait.cost.price import Pricer
from plait.errors import InputError
from plait.graph import Graph
from plait.ir import Barrier, Dense, Expr, leaves
from plait.kernels import launch
from plait.ops.program import Step
from plait.ops.work import Matrix
from plait.plan.exchange import Choice, Link, choose_over_ranks
from plait.plan.halves import Halves, halves
from plait.plan.search import Problem
from plait.runtime import executor
from plait.runtime.adjoint import mapped
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.buffers import Buffers
from plait.runtime.chain import Env
from plait.runtime.constants import Constants, SparseValue
from plait.runtime.deferred import can_defer
from plait.runtime.halves import Cut, ahead
from plait.runtime.machine import machine_in_use
from plait.runtime.problems import with_identity_loops

__all__ = ["Peers", "Position", "RankConstants", "Runs", "extended", "problem_of", "wanted"]


class Position(Protocol):
    """A rank's position among the others, as the planner sees it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def begin(self) -> int:
        """The first of this rank's nodes, which are contiguous."""
        ...

    @property
    def columns(self) -> Any:
        """The nodes whose rows a product here reads: this rank's own, then its halo, by number."""
        ...

    @property
    def num_rows(self) -> int: ...
    @property
    def num_shared(self) -> int:
        """Rows that other ranks need of this one, counted once for each of them."""
        ...

    @property
    def num_nodes(self) -> int:
        """Nodes of all ranks."""
        ...

    def share_of(self, width: int) -> int:
        """How many of this many columns are this rank's."""
        ...


class Peers(Position, Protocol):
    """The other ranks, as layers see them."""

    def fetch(self, x: Tensor) -> Tensor:
        """The rows of this rank with those of its halo behind them."""
        ...

    def give_back(self, grad: Tensor) -> Tensor:
        """Its transpose: rows of the halo go to their owners, who add them to their own."""
        ...

    def pick(self, x: Tensor) -> Tensor:
        """The rows that others need, rank by rank."""
        ...

    def send(self, x: Tensor, is_back: bool) -> Any:
        """Start sending rows that were picked for others, or gradients of the halo; does not wait."""
        ...

    def receive(self, sent: Any) -> Tensor:
        """The rows of the halo."""
        ...

    def let_go(self, values: Iterable[Any]) -> None:
        """What was sent among these values is not received by its sender; it has to arrive all the same."""
        ...

    def receive_back(self, sent: Any, out: Tensor) -> Tensor:
        """`out` with the gradients that other ranks computed for rows of this one added."""
        ...

    def numbers(self, values: Tensor) -> Tensor:
        """Numbers of this rank's nodes with those of its halo behind them; for constants, once."""
        ...

    def to_columns(self, x: Tensor) -> Tensor:
        """This rank's columns of the rows of all nodes."""
        ...

    def to_rows(self, x: Tensor, width: int) -> Tensor:
        """Its inverse."""
        ...

    def agree(self, prices: Mapping[str, float]) -> Mapping[str, float]:
        """The largest price of each group that every rank has a price for."""
        ...


# Constants ------------------------------------------------------------------------------------------------


class RankConstants(Constants):
    """Constants of the whole graph as one rank's rows see them: those rows, over its own nodes and its halo.

    Of a diagonal d `halo(d)` has its numbers for the halo too and `border(d)` those of the halo alone; of a
    matrix `own(A)` has the columns of this rank's nodes and `remote(A)` those of its halo; `all(c)` is a
    constant of the whole graph. With `make_all`, which makes those when they are asked for, `whole` are of
    this rank's nodes and its halo alone, in that order.
    """

    def __init__(
        self, whole: Constants, peers: Position, make_all: Callable[[], Constants] | None = None
    ) -> None:
        self.whole, self.peers, self._make_all = whole, peers, make_all
        self._everything: Constants | None = None
        begin, count = peers.begin, peers.num_nodes
        self._reads = peers.columns  # the numbers in `whole` of the nodes that products here read
        if make_all is not None:
            begin, count = 0, peers.columns.size
            self._reads = np.arange(count)
        self._own = slice(begin, begin + peers.num_rows)
        self._place = np.full(count, -1, np.int64)
        self._place[self._reads] = np.arange(self._reads.size)
        own = self._rows(SparseValue(whole.graph, whole.weight))
        diagonals = {name: value[self._own] for name, value in whole.diagonals.items()}
        super().__init__(own.graph, own.weight, diagonals, whole.dtype)

    def _rows(self, value: SparseValue) -> SparseValue:
        """This rank's rows of a matrix of the whole graph."""
        graph, weight = value.graph, value.weight
        pointer = graph.indptr[self._own.start : self._own.stop + 1].astype(np.int64)
        edges = slice(int(pointer[0]), int(pointer[-1]))
        targets = np.repeat(np.arange(self.peers.num_rows), np.diff(pointer))
        sources = self._place[graph.indices[edges]]
        rows = Graph.from_edge_index(
            sources, targets, self.peers.num_rows, self.peers.columns.size, validate=False
        )
        if weight is not None:
            weight = weight[edges]
            if rows.order is not None:
                weight = weight[torch.from_numpy(np.asarray(rows.order, np.int64))]
        return SparseValue(rows.with_order(None), weight)

    def _evaluate(self, expr: Expr) -> Any:
        match expr:
            case Barrier("halo", body):
                return self.whole.vector(body)[torch.from_numpy(self._reads)]
            case Barrier("border", body):
                return self.value(Barrier("halo", body))[self.peers.num_rows :]
            case Barrier("own" | "remote" as name, body):
                return self._columns(self.matrix(body), name == "own")
            case Barrier("all", body):
                return self._all().value(body)
        value = self.whole.value(expr)
        return value[self._own] if isinstance(value, Tensor) else self._rows(value)

    def _all(self) -> Constants:
        """The constants of the whole graph."""
        if self._make_all is None:
            return self.whole
        if self._everything is None:
            self._everything = self._make_all()
        return self._everything

    def _columns(self, value: SparseValue, is_own: bool) -> SparseValue:
        """The columns of this rank's nodes, or of its halo; rows keep their order of columns."""
        graph, count = value.graph, self.peers.num_rows
        is_chosen = (graph.indices < count) == is_own
        pointer = np.concatenate(([0], np.cumsum(is_chosen)))[graph.indptr]
        sources = graph.indices[is_chosen] - (0 if is_own else count)
        width = count if is_own else graph.num_sources - count
        chosen = Graph.from_csr(pointer, sources, width, validate=False)
        weight = None if value.weight is None else value.weight[torch.from_numpy(is_chosen)]
        return SparseValue(chosen, weight)

    def _cost_matrix(self, expr: Expr) -> Matrix:
        match expr:
            case Barrier("all", body):
                return self._all().cost_matrix(body)
            case Barrier("own" | "remote", body):
                value, whole = self.matrix(expr), self.cost_matrix(body)
                graph = value.graph
                return replace(
                    whole, rows=graph.num_nodes, columns=graph.num_sources, edges=graph.num_edges,
                    loops=whole.loops if expr.name == "own" else 0, locality=graph.stats,
                    locality_transposed=graph.transpose.stats,
                )  # fmt: skip
        return super()._cost_matrix(expr)


# Kernels --------------------------------------------------------------------------------------------------


def _peers(b: Binding) -> Peers:
    constants = b.run.constants
    assert isinstance(constants, RankConstants)
    peers: Any = constants.peers  # of a rank that runs, not only plans
    return peers  # type: ignore[no-any-return]


@kernel("exchange", "any", "torch.distributed")
def _exchange(b: Binding, step: Step, owns: bool) -> Bound:
    peers, x = _peers(b), step["x"]
    if step.is_transposed:
        return lambda env: peers.give_back(env[x])
    return lambda env: peers.fetch(env[x])


@kernel("send", "any", "torch.distributed")
def _send(b: Binding, step: Step, owns: bool) -> Bound:
    peers, x, is_back = _peers(b), step["x"], step.is_transposed
    if is_back or step.option("is_picked", False):
        return lambda env: peers.send(env[x], is_back)
    return lambda env: peers.send(peers.pick(env[x]), False)


@kernel("pick", "any", "torch")
def _pick(b: Binding, step: Step, owns: bool) -> Bound:
    peers, x = _peers(b), step["x"]
    return lambda env: peers.pick(env[x])


@kernel("receive", "any", "torch.distributed")
def _receive(b: Binding, step: Step, owns: bool) -> Bound:
    peers, x, addend, scale = _peers(b), step["x"], step.get("addend"), step.get("addend_scale")
    if not step.is_transposed:
        return lambda env: peers.receive(env[x])
    scale_of = b.row_scale(step, "addend_scale", peers.num_rows)

    def run(env: Env) -> Tensor:
        if addend is None:
            return peers.receive_back(env[x], env[x].rows.new_zeros((peers.num_rows, env[x].rows.shape[1])))
        rows = env[addend]
        if scale is not None:
            rows = rows * scale_of(env).unsqueeze(1)  # type: ignore[union-attr]
        return peers.receive_back(env[x], rows if owns or scale is not None else rows.clone())

    return run


@kernel("to_columns", "any", "torch.distributed")
def _to_columns(b: Binding, step: Step, owns: bool) -> Bound:
    peers, x = _peers(b), step["x"]
    return lambda env: peers.to_columns(env[x])


@kernel("to_rows", "any", "torch.distributed")
def _to_rows(b: Binding, step: Step, owns: bool) -> Bound:
    peers, x = _peers(b), step["x"]
    width = str(b.program.shapes[step.out][1])
    sizes = b.run.plan.sizes

    def run(env: Env) -> Tensor:
        return peers.to_rows(env[x], sizes[width] if width in sizes else int(width))

    return run


def extended(x: Tensor, peers: Peers) -> Tensor:
    """The rows of this rank with those of its halo behind them; their gradients go back to their owners."""
    return mapped(x, peers.fetch, peers.give_back)


# Runs -----------------------------------------------------------------------------------------------------

_Planned = tuple[executor.Run, tuple[Halves, Cut] | None]


@dataclass
class Runs:
    """The planned expressions of one model over ranks."""

    peers: Peers
    link: Link
    split: str | None = None  # the only one that layers may be split by, where they can
    buffers: Buffers = field(default_factory=Buffers)
    choices: dict[tuple[str, str], Choice] = field(default_factory=dict)  # by layer and mode
    _runs: dict[Any, _Planned] = field(default_factory=dict)
    _cuts: dict[int, Cut] = field(default_factory=dict)  # by their number of rows

    def apply(
        self,
        layer: str,
        constants: RankConstants,
        forms: tuple[Expr, ...],
        inputs: Mapping[str, Tensor | None],
        is_constant: bool,
    ) -> Tensor:
        """The value of one planned expression for this rank's rows; `is_constant`: X is always the same."""
        given = {name: value for name, value in inputs.items() if value is not None}
        wrt = wanted(given)
        widths = tuple([value.shape[1:] for value in given.values()])
        key = (layer, forms, id(constants), wrt, is_constant, widths)
        found = self._runs.get(key)  # which holds the constants: their id stays theirs
        if found is None:
            found = self._runs[key] = self._planned(layer, constants, forms, given, wrt or None, is_constant)
        run, halves = found
        if halves is not None and can_defer():
            return ahead(run, *halves, given, self.peers.let_go)
        return executor.apply(run, given)

    def _planned(
        self,
        layer: str,
        constants: RankConstants,
        forms: tuple[Expr, ...],
        given: Mapping[str, Tensor],
        wrt: tuple[str, ...] | None,
        is_constant: bool,
    ) -> _Planned:
        problem = problem_of(layer, constants, forms, given, wrt, is_constant)
        plan, choice = choose_over_ranks(problem, self.link, self.peers.agree, self.split)
        run = executor.Run(plan, constants, self.buffers, place=given["X"].device)
        if plan.hoisted.steps:
            with torch.no_grad():
                run.hoisted = run.hoist(given)
        pricer = Pricer(problem.machine, problem.float_bytes, problem.threads)
        halved = self._halved(run, halves(plan, pricer.copy_seconds) if given["X"].is_cpu else None)
        self.choices[layer, plan.mode] = replace(choice, halves=None if halved is None else halved[0])
        return run, halved

    def _halved(self, run: executor.Run, found: Halves | None) -> tuple[Halves, Cut] | None:
        """Where the layer is cut in two: on all ranks or none, which send gradients in one order then."""
        if self.peers.size == 1 or run.plan.backward is None:
            return None
        cut, gain = None, 0.0
        if found is not None:
            cut = Cut.of(run.constants.matrix(run.plan.forward.constants[found.remote]))
            cut = self._cuts.setdefault(cut.count, cut)
            gain = found.gain(cut.count / max(1, cut.num_rows))
        # the slowest rank's: what one waits for, all do
        told = self.peers.agree({"lacks": float(found is None), "gains": gain})
        if found is None or cut is None or told["lacks"] or told["gains"] <= 0.0:
            return None
        return found, cut


_CALLS = 200  # over which work done once is spread


def problem_of(
    layer: str,
    constants: RankConstants,
    forms: tuple[Expr, ...],
    given: Mapping[str, Tensor],
    wrt: tuple[str, ...] | None,
    is_constant: bool,
) -> Problem:
    """What one rank has to plan of a layer; `is_constant`: X is always the same."""
    x = given["X"]
    expressions = with_identity_loops(forms, constants.whole)
    return Problem(
        forms=expressions,
        sizes=_sizes(expressions[0], given, constants.peers, layer),
        matrices=constants.cost_matrix,
        machine=machine_in_use(x.device),
        wrt=wrt,
        constant=frozenset({"X"} if is_constant else ()),
        float_bytes=x.element_size(),
        threads=launch.num_threads() if x.is_cpu else None,
        calls=_CALLS,
        layer=layer,
        may_chain=x.is_cpu,
    )


def wanted(given: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The inputs that need a gradient."""
    with_grad = torch.is_grad_enabled()
    return tuple(name for name, value in given.items() if with_grad and value.requires_grad)


def _sizes(expr: Expr, given: Mapping[str, Tensor], peers: Position, layer: str) -> dict[str, int]:
    """Numbers for the symbolic sizes of a program over ranks."""
    sizes = {
        "N": peers.num_rows, "H": int(peers.columns.size), "G": peers.num_nodes, "S": peers.num_shared,
        "B": int(peers.columns.size) - peers.num_rows,
    }  # fmt: skip
    for name, leaf in leaves(expr).items():
        if not isinstance(leaf, Dense):
            continue
        value = given[name].reshape(1, -1) if leaf.rows == 1 else given[name]
        for symbol, count in zip((leaf.rows, leaf.cols), value.shape, strict=True):
            if not isinstance(symbol, int) and sizes.setdefault(symbol, count) != count:
                raise InputError(
                    f"{layer}: {name} has {count} where {symbol} is {sizes[symbol]} elsewhere; check the "
                    "widths of x and the layer, and pass the rows of this rank: sharded.data.x"
                )
    widths = [symbol for symbol in sizes if symbol not in "NHGSB"]
    shares = {f"{symbol}/P": peers.share_of(sizes[symbol]) for symbol in widths}
    return {**sizes, **shares}
