"""What plait.shard would choose for every layer of a model, for all ranks of a division, in one process.

The model is called once with the whole graph. Each layer is planned as every rank would plan it, with that
rank's rows, halo and matrices, and the ranks agree as they do when they run (plan/exchange.py). Layers with
passes of their own are run on every rank's part, and planned by that. Of rows that leave a layer only the
width matters: they are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.cost.price import Pricer
from plait.errors import InputError
from plait.graph.division import Place, divide
from plait.ir import Dense, Expr, leaves
from plait.kernels import launch
from plait.ops.work import size_of
from plait.plan.exchange import Choice, Link, choices_of_ranks
from plait.plan.search import Problem
from plait.pyg.call import Call
from plait.pyg.compile import rehearse
from plait.pyg.operators import Operator
from plait.pyg.shard import OverRanks, Share, constants_of, halo_choice, refused
from plait.runtime.machine import machine_in_use
from plait.runtime.session import Session
from plait.runtime.spread import RankConstants, problem_of, wanted

__all__ = ["foresee"]

Layers = tuple[tuple[Choice, ...], ...]
"""What every rank chooses, by layer in the order of their calls."""


def foresee(
    model: nn.Module, call: Call, data: Any, part: Any, link: Link, splits: Sequence[str | None], mode: str
) -> dict[str | None, Layers]:
    """The choices of all ranks, by split; InputError where plait.shard would refuse the model."""
    reason = refused(model)
    if reason is not None:
        raise InputError(f"model: {reason}")
    source, target = data.edge_index.cpu().numpy()
    division = divide(source, target, part, link.peers + 1)
    weight = data.get("edge_weight")
    share = Share(lambda: division.graph, data.edge_index, data.get("x"), weight, weight)
    plans = _Plans(link, tuple(splits))
    session = Session()
    edges = [
        (torch.from_numpy(division.local_edges(rank)), torch.from_numpy(division.edges_of(rank)))
        for rank in range(division.size)
    ]
    session.over_ranks = _Foreseen(share, division.places, edges, plans, session)
    rehearse(model, session, call, mode)
    return {split: tuple(layers) for split, layers in plans.found.items()}


@dataclass
class _Plans:
    """Replaces `Runs`: plans expressions for all ranks and runs none."""

    link: Link
    splits: tuple[str | None, ...]
    found: dict[str | None, list[tuple[Choice, ...]]] = field(default_factory=dict)

    def note(self, choices: Mapping[str | None, tuple[Choice, ...]]) -> None:
        for split, of_ranks in choices.items():
            self.found.setdefault(split, []).append(of_ranks)

    def apply(
        self,
        layer: str,
        constants: Sequence[RankConstants],
        forms: tuple[Expr, ...],
        inputs: Mapping[str, Tensor | None],
        is_constant: bool,
    ) -> Tensor:
        """Zeros in the place of the layer's rows, for all nodes."""
        given = {name: value for name, value in inputs.items() if value is not None}
        wrt = wanted(given)

        def problem(rank: RankConstants) -> Problem:
            own = _rows_of(given, forms[0], rank.peers.num_rows)
            return problem_of(layer, rank, forms, own, wrt or None, is_constant)

        problems = [problem(rank) for rank in constants]
        choices = {split: choices_of_ranks(problems, self.link, split) for split in self.splits}
        self.note(choices)
        plan = next(iter(choices.values()))[0].plan
        assert plan is not None
        width = size_of(plan.forward.shapes[plan.forward.outputs[0]][1], plan.sizes)
        x = given["X"]
        return x.new_zeros((x.shape[0], width), requires_grad=bool(wrt))


def _rows_of(given: Mapping[str, Tensor], expr: Expr, count: int) -> dict[str, Tensor]:
    """The inputs as a rank with this many nodes has them."""
    by_node = [name for name, leaf in leaves(expr).items() if isinstance(leaf, Dense) and leaf.rows == "N"]
    return {name: value[:count] if name in by_node else value for name, value in given.items()}


class _Foreseen(OverRanks):
    """Layers called with the rows of all nodes, planned for every rank."""

    def __init__(
        self,
        share: Share,
        places: Sequence[Place],
        local_edges: Sequence[tuple[Tensor, Tensor]],
        plans: _Plans,
        session: Session,
    ) -> None:
        one: Any = places[0]
        runs: Any = plans
        super().__init__(share, one, runs)
        self.places, self.local_edges, self.plans, self.session = places, local_edges, plans, session
        self._of_ranks: dict[Any, tuple[RankConstants, ...]] = {}
        self._has_halo = False

    def _check(self, name: str, given: Mapping[str, Any]) -> None:
        if given.get("edge_index") is not self.share.edge_index:
            raise InputError(f"{name}: edge_index is not the graph's; over ranks layers take it unchanged")

    def _constants_of(self, operator: Operator, is_weighted: bool, dtype: torch.dtype) -> Any:
        key = (operator, is_weighted, dtype)
        if key not in self._of_ranks:
            whole = constants_of(self.share, *key)
            self._of_ranks[key] = tuple(RankConstants(whole, place) for place in self.places)
        return self._of_ranks[key]

    def _with_halo(self, module: Any, seat: Any, here: Any, given: dict[str, Any]) -> Tensor:
        x = given.pop("x")
        travelled = "each"
        if self.is_constant(x):
            travelled = "before" if self._has_halo else "once"
            self._has_halo = True
        del given["edge_index"]  # the whole graph's
        link = self.plans.link
        choices = []
        for place, (local, numbers) in zip(self.places, self.local_edges, strict=True):
            choice = halo_choice(seat.name, x, travelled, place, link)
            self.session.plans.clear()
            own = {name: self._of_edges(value, numbers) for name, value in given.items()}
            out: Tensor = here((x[: place.columns.size], local), own)
            seconds = sum(plan.seconds for plan in self.session.plans.values())
            seconds += _copy_seconds(x, out, place, travelled)
            choices.append(replace(choice, pass_seconds=seconds))
        self.plans.note(dict.fromkeys(self.plans.splits, tuple(choices)))
        width = int(out.shape[1])
        zeros: Tensor = x.new_zeros((x.shape[0], width), requires_grad=out.requires_grad)
        return zeros

    def _of_edges(self, value: Any, numbers: Tensor) -> Any:
        """What a rank has of an argument: of edge features, those of its own edges."""
        is_by_edge = (
            isinstance(value, Tensor) and value.dim() and len(value) == self.share.edge_index.shape[1]
        )
        return value[numbers] if is_by_edge else value


def _copy_seconds(x: Tensor, out: Tensor, place: Place, travelled: str) -> float:
    """To put rows and halo together and to take them apart again, and their gradients."""
    pricer = Pricer(machine_in_use(x.device), x.element_size(), launch.num_threads() if x.is_cpu else None)
    rows, every = place.num_rows, int(place.columns.size)
    seconds = 0.0
    if travelled == "each":
        seconds += pricer.copy_seconds(every * x.shape[1])
        if x.requires_grad:
            seconds += pricer.copy_seconds((rows + place.num_shared) * x.shape[1])
    if out.requires_grad:  # the gradient of rows cut off is zeros
        seconds += pricer.copy_seconds(every * out.shape[1])
    return seconds
