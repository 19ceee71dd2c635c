"""Layers of a model whose nodes are spread over ranks: what is exchanged before or inside each of them.

A layer that is a matrix expression has its exchanges planned (plan/exchange.py). Any other layer
gets the rows of its halo before it runs, on a graph of this rank's nodes and their halo, and keeps the rows
of its own nodes; that is exact where a node's result depends on no more than its neighbours' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    AGNNConv,
    CGConv,
    EdgeConv,
    FiLMConv,
    GATConv,
    GATv2Conv,
    GENConv,
    GMMConv,
    MessagePassing,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    TransformerConv,
)

from plait.errors import InputError
from plait.graph import Graph
from plait.ir import Expr
from plait.plan.exchange import Choice, Link
from plait.pyg.active import Seat, Seats
from plait.pyg.layers.base import RULES, Call, Lowered, NotLowered
from plait.pyg.layers.fused import layer_of
from plait.pyg.lower import lower
from plait.pyg.operators import Operator, Propagation, propagate
from plait.runtime.constants import Constants
from plait.runtime.deferred import whole
from plait.runtime.spread import Peers, Position, RankConstants, Runs, extended

__all__ = ["OverRanks", "Share", "constants_by_rows", "constants_of", "halo_choice", "refused"]

# a node's result depends on its own row and those of its neighbours, whatever else they are neighbours of
_ONE_HOP = (
    AGNNConv, CGConv, EdgeConv, FiLMConv, GATConv, GATv2Conv, GENConv, GMMConv, PNAConv, ResGatedGraphConv,
    RGCNConv, TransformerConv,
)  # fmt: skip
_OVER_NODES = (nn.modules.batchnorm._NormBase,)


@dataclass(frozen=True)
class Share:
    """What the layers of one rank are called with, and how the whole graph is made, where they need it."""

    whole: Callable[[], Graph]  # by the numbers over ranks; `order` is that of the caller's edges
    edge_index: Tensor  # into this rank's nodes, which come first; sources of the halo behind them
    x: Tensor | None = None
    edge_weight: Tensor | None = None  # of this rank's edges, as it is handed to the model
    weight_of_all: Tensor | None = None  # of all edges


def refused(model: nn.Module) -> str | None:
    """Why a model cannot be spread over ranks: the first layer that cannot be, and the reason."""
    for path, module in model.named_modules():
        if isinstance(module, MessagePassing):
            reason = _refused(module)
            if reason is not None:
                return f"{path or 'model'}: {type(module).__name__}{reason}"
    return None


def _refused(module: Any) -> str | None:
    if module.flow != "source_to_target":
        return f"(flow={module.flow!r}) is not spread over ranks; turn the edges round instead"
    if layer_of(module) is None:
        is_known = any(cls in RULES for cls in type(module).__mro__)
        return None if is_known else " has no rule; its exactness over ranks is not known"
    if not isinstance(module, _ONE_HOP):
        return " looks further than one row of each neighbour, or at their order; run it on one rank"
    if any(isinstance(part, _OVER_NODES) for part in module.modules()):
        return " normalises over nodes inside; move the normalisation behind the layer"
    return None


def constants_of(share: Share, operator: Operator, is_weighted: bool, dtype: torch.dtype) -> Constants:
    """An operator's matrices for the whole graph."""
    with torch.no_grad():
        made = propagate(operator, share.whole(), share.weight_of_all if is_weighted else None, dtype)
    return Constants(made.graph, made.edge_weight, _diagonals(made), dtype)


def _diagonals(made: Propagation) -> dict[str, Tensor]:
    named = {name: getattr(made, name) for name in "plq"}
    return {name: value for name, value in {**named, **made.extra}.items() if value is not None}


def constants_by_rows(
    share: Share, peers: Peers, operator: Operator, is_weighted: bool, dtype: torch.dtype
) -> RankConstants:
    """An operator's matrices from the edges into a rank's own nodes; all ranks make them together.

    What is counted of a node's incoming edges its own rank knows; of the halo it is asked for, once. Whether
    all loops are one decides which plans there are, so it is agreed on.
    """
    source, target = share.edge_index.cpu().numpy()
    graph = Graph.from_edge_index(source, target, int(peers.columns.size), validate=False)
    weight = share.edge_weight.cpu() if is_weighted and share.edge_weight is not None else None
    with torch.no_grad():
        made = propagate(operator, graph, weight, dtype)
        diagonals, count = _diagonals(made), peers.num_rows
        if diagonals:
            stacked = peers.numbers(torch.stack([value[:count] for value in diagonals.values()], dim=1))
            diagonals = dict(zip(diagonals, stacked.unbind(1), strict=True))
            diagonals = {name: value.contiguous() for name, value in diagonals.items()}
    has_others = "l" not in diagonals or bool((diagonals["l"][:count] != 1).any())
    is_unit = peers.agree({"loops": float(has_others)})["loops"] == 0.0
    constants = Constants(made.graph, made.edge_weight, diagonals, dtype, unit_loops=is_unit)
    return RankConstants(constants, peers, lambda: constants_of(share, operator, is_weighted, dtype))


@dataclass
class OverRanks:
    """Runs calls of layers on one rank's share; the value of `Session.over_ranks`."""

    share: Share
    peers: Peers
    runs: Runs
    choices: dict[tuple[str, str], Choice] = field(default_factory=dict)  # of layers with their own passes
    _constants: dict[tuple[Operator, bool, torch.dtype], RankConstants] = field(default_factory=dict)
    _known: Tensor | None = None  # the rows of share.x with their halo
    _version: int = 0

    def __post_init__(self) -> None:
        self._version = -1 if self.share.x is None else self.share.x._version

    def __call__(
        self,
        module: Any,
        seats: Seats,
        here: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The layer's result for this rank's nodes; `here` runs it on the rows it is given."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        seat = seats.of(module)
        self._check(seat.name, given)
        whole(given["x"])
        if layer_of(module) is None:
            return self._planned(module, seat, given)
        return self._with_halo(module, seat, here, given)

    def is_constant(self, x: Tensor) -> bool:
        """Whether x is the features the model was spread with: the same answer on every rank."""
        return x is self.share.x and x._version == self._version and not x.requires_grad

    def _check(self, name: str, given: Mapping[str, Any]) -> None:
        x, edges, own = given.get("x"), given.get("edge_index"), self.share.edge_index
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != self.peers.num_rows:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"{name}: x is {got}; over ranks a layer takes one row for each of this rank's "
                f"{self.peers.num_rows} nodes, as in sharded.data.x"
            )
        if not isinstance(edges, Tensor) or edges.data_ptr() != own.data_ptr() or edges.shape != own.shape:
            raise InputError(f"{name}: edge_index is not this rank's; pass sharded.data.edge_index unchanged")

    # Matrix expressions -----------------------------------------------------------------------

    def _planned(self, module: Any, seat: Seat, given: Mapping[str, Any]) -> Tensor:
        weight = given.get("edge_weight")
        if weight is not None and weight is not self.share.edge_weight:
            raise InputError(f"{seat.name}: edge_weight is not this rank's; pass sharded.data.edge_weight")
        unusual = [
            k for k, v in given.items() if v is not None and k not in ("x", "edge_index", "edge_weight")
        ]
        if unusual:
            raise InputError(f"{seat.name}: {', '.join(unusual)} over ranks is not planned; leave it out")
        lowered = self._lowered(module, seat, weight is not None)
        x: Tensor = given["x"]
        constants = self._constants_of(lowered.operator, weight is not None, x.dtype)
        count = 0

        def apply(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            nonlocal count
            label = seat.name if count == 0 else f"{seat.name}#{count}"
            count += 1
            rows = inputs["X"]
            assert rows is not None
            return self.runs.apply(label, constants, forms, inputs, self.is_constant(rows))

        return lowered.run(module, apply, x, None)

    def _lowered(self, module: Any, seat: Seat, is_weighted: bool) -> Lowered:
        """What the layer computes; remembered while nothing about it changes."""
        known = seat.look(module)
        call = Call(is_weighted=is_weighted)
        found = known.lowered.get(call)
        if found is None:
            found = known.lowered[call] = lower(module, call)
        if isinstance(found, NotLowered):
            raise InputError(f"{seat.name}: {found.reason}; over ranks only planned layers are exact")
        lowered: Lowered = found
        return lowered

    def _constants_of(self, operator: Operator, is_weighted: bool, dtype: torch.dtype) -> RankConstants:
        """The operator's matrices: of this rank's edges, or of all and cut where it takes those."""
        key = (operator, is_weighted, dtype)
        if key not in self._constants:
            if operator.is_by_rows:
                made = constants_by_rows(self.share, self.peers, *key)
            else:
                made = RankConstants(constants_of(self.share, *key), self.peers)
            self._constants[key] = made
        return self._constants[key]

    # Passes of their own ----------------------------------------------------------------------

    def _with_halo(
        self,
        module: Any,
        seat: Seat,
        here: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        given: dict[str, Any],
    ) -> Tensor:
        x = given.pop("x")
        rows, travelled = self._extended(x)
        self._note(seat.name, x, travelled)
        out = here((rows, given.pop("edge_index")), given)
        if not isinstance(out, Tensor):
            raise InputError(
                f"{seat.name}: attention weights are not gathered over ranks; do not ask for them"
            )
        return out[: self.peers.num_rows]

    def _extended(self, x: Tensor) -> tuple[Tensor, str]:
        """The rows with their halo, and when it is sent: at each call, once now, or earlier."""
        if not self.is_constant(x):
            return extended(x, self.peers), "each"
        if self._known is not None:
            return self._known, "before"
        self._known = self.peers.fetch(x.detach())
        return self._known, "once"

    def _note(self, name: str, x: Tensor, travelled: str) -> None:
        """Record what the layer exchanges."""
        mode = "training" if torch.is_grad_enabled() else "inference"
        if (name, mode) in self.choices:
            return
        self.choices[name, mode] = halo_choice(name, x, travelled, self.peers, self.runs.link)


def halo_choice(name: str, x: Tensor, travelled: str, place: Position, link: Link) -> Choice:
    """What a rank exchanges for a layer that is not a matrix expression, given x followed by its halo."""
    with_grad = torch.is_grad_enabled()
    width, size = x.shape[1], x.element_size()
    each: tuple[int, ...] = ()
    once = 0
    ahead = place.num_shared * width * size
    back = (place.columns.size - place.num_rows) * width * size
    said = f"fwd halo x {width}"
    if travelled != "each":
        said, once = f"once halo x {width}", ahead if travelled == "once" else 0
    elif with_grad and x.requires_grad:
        said, each = f"{said}, bwd haloᵀ x {width}", (ahead, int(back))
    else:
        each = (ahead,)
    seconds = sum(link.seconds(max(ahead, back)) for _ in each)
    mode = "training" if with_grad else "inference"
    return Choice(name, mode, "by nodes", said, {said: seconds}, None, each, once)
