"""What a compiled model holds in a step, seen in one run of it, and each layer's share of its memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from plait.plan.dial import Allowance, Option, Stage, peak_of, turn
from plait.plan.fused import FusedPlan
from plait.plan.plan import LayerPlan
from plait.runtime.budget import bytes_in
from plait.runtime.executor import Run

if TYPE_CHECKING:
    from plait.runtime.session import Session

__all__ = ["Dial", "Trail", "follow"]

AnyPlan = LayerPlan | FusedPlan
_LEANEST = Allowance(0, 0)  # nothing fits it, and the leanest is taken then


@dataclass(frozen=True)
class Trail:
    """What one run showed: the planned calls in order, and what was alive beside what their plans hold."""

    calls: tuple[tuple[str, int], ...] = ()  # (layer, bytes that others saved for gradients up to then)
    given_bytes: int = 0  # parameters, their gradients, buffers, arguments
    output_bytes: int = 0  # of the model, where no layer's plan counts it
    place: str = "cpu"


def follow(outputs: Iterable[torch.Tensor], given: Iterable[torch.Tensor], place: str) -> Trail:
    """The trail of a run from what it gave: autograd's graph knows who saved what, in which order.

    Gradients are computed in the reverse order, so what was first saved after a layer is gone when that
    layer's turn comes.
    """
    outputs, given = list(outputs), list(given)
    known = {_key(tensor) for tensor in given}
    own: set[int] = set()  # memory that plans count
    saved: dict[int, tuple[int, int]] = {}  # by memory: when it was first saved, its bytes
    calls: list[tuple[int, str]] = []
    for order, node in sorted(_nodes(outputs), key=lambda found: found[0]):
        run = getattr(node, "run", None)
        values = _saved_by(node)
        if isinstance(run, Run):
            calls.append((order, run.plan.layer))
            count = len(node.layout.saved)
            own |= {_key(tensor) for tensor in (*values[count:], *_output_kept(node))}
            shapes = _copied_shapes(node)
            values = tuple(tensor for tensor in values[:count] if tensor.shape not in shapes)
        for tensor in values:
            saved.setdefault(_key(tensor), (order, tensor.untyped_storage().nbytes()))
    others = [pair for key, pair in saved.items() if key not in known | own]
    before = tuple((layer, sum(size for when, size in others if when <= order)) for order, layer in calls)
    apart = known | own | set(saved)
    left = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in outputs if _key(tensor) not in apart}
    return Trail(before, _given_bytes(given), sum(left.values()), place)


def _given_bytes(given: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors and of the gradients that those which want one will get; each storage once."""
    sizes = {}
    for tensor in given:
        size = tensor.untyped_storage().nbytes()
        sizes[_key(tensor)] = size + (tensor.nbytes if tensor.requires_grad and tensor.is_leaf else 0)
    return sum(sizes.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nodes(outputs: Iterable[torch.Tensor]) -> Iterator[tuple[int, Any]]:
    """(when it was made, node) of autograd's graph behind these tensors; leaves have no place in time."""
    left: list[Any] = [tensor.grad_fn for tensor in outputs]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left.extend(before for before, _ in node.next_functions)
        if node.next_functions:
            yield node._sequence_nr(), node


def _saved_by(node: Any) -> tuple[torch.Tensor, ...]:
    """The tensors a node holds for its gradient."""
    try:
        if hasattr(node, "saved_tensors"):
            return tuple(tensor for tensor in node.saved_tensors if tensor is not None)
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    except RuntimeError:  # freed already, or changed since
        return ()
    lists = [value if isinstance(value, tuple | list) else (value,) for value in values]
    return tuple(value for found in lists for value in found if isinstance(value, torch.Tensor))


def _copied_shapes(node: Any) -> set[torch.Size]:
    """Shapes of inputs that are copies of a result which the node before saved itself.

    A layer's input is copied until its first backward pass has shown that nobody writes to it
    (pyg/overwritten.py): such copies are no part of a later step.
    """
    copies = [before for before, _ in node.next_functions if before is not None]
    copies = [before for before in copies if before.name() == "CloneBackward0"]
    makers = [maker for copy in copies for maker, _ in copy.next_functions]
    return {maker._saved_result.shape for maker in makers if hasattr(maker, "_saved_result")}


def _output_kept(node: Any) -> tuple[torch.Tensor, ...]:
    rest = getattr(node, "rest", None)
    return () if rest is None or rest.output is None else (rest.output,)


@dataclass
class Dial:
    """The trails of a model's modes, and what each layer may hold for the whole to stay within the limit."""

    limit: int | None
    trails: dict[str, Trail] = field(default_factory=dict)
    shares: dict[tuple[str, str], Allowance] = field(default_factory=dict)
    is_paused: bool = False  # somebody else looks at every run
    _version: int = -1  # of the plans that were looked at last

    def share(self, layer: str, is_training: bool) -> Allowance | None:
        """What a layer may hold; None without a limit. Until the whole model is known it runs leanest."""
        if self.limit is None:
            return None
        return self.shares.get((_mode(is_training), layer), _LEANEST)

    def room(self, layer: str, is_training: bool) -> int | None:
        """The same as one number of bytes, for layers whose plans have no parts."""
        share = self.share(layer, is_training)
        return None if share is None else share.peak_bytes

    def turn(self, session: Session, mode: str) -> bool:
        """Choose anew from what the latest run showed; True where layers are to be planned again.

        PlanError where the limit cannot be met.
        """
        if self.limit is None:
            return False
        stages = self._stages(session, mode)
        chosen = turn(stages, self.limit)
        session.buffers.limit_to(self.limit - max((stage.other_bytes for stage in stages), default=0))
        is_changed = False
        for stage, option in zip(stages, chosen.options, strict=True):
            share = Allowance(option.kept_bytes, option.kept_bytes + option.transient_bytes)
            times = self._times(mode, stage.layer)
            share = Allowance(share.kept_bytes // times, share.peak_bytes - (times - 1) * share.kept_bytes // times)
            if self.shares.get((mode, stage.layer)) != share:
                self.shares[mode, stage.layer] = share
                session.forget(stage.layer)
                is_changed = True
        return is_changed

    def settle(self, session: Session, model: torch.nn.Module, arguments: Iterable[Any]) -> None:
        """Look at the plans of a call that has just been made, where they are new; later calls follow."""
        if self.limit is None or self.is_paused or self._version == session.plans.version:
            return
        self._version, mode = session.plans.version, session.plans.mode
        plans = session.plans.of(mode)
        if mode not in self.trails:
            given = [*model.parameters(), *model.buffers(), *arguments]
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            place = next((tensor.device.type for tensor in tensors), "cpu")
            self.trails[mode] = Trail((), _given_bytes(tensors), 0, place)
        if not all(map(self._admits, plans)) or self.peak_bytes(session, mode) > self.limit:
            self.turn(session, mode)

    def _admits(self, plan: AnyPlan) -> bool:
        """Whether a plan is one that its share was made for; the leanest is taken where none is."""
        share = self.share(plan.layer, plan.mode == "training")
        return share is None or share.admits(getattr(plan, "kept_bytes", 0), plan.peak_bytes)

    def peak_bytes(self, session: Session, mode: str) -> int:
        """Most bytes a step of the model holds by its present plans."""
        stages = self._stages(session, mode)
        held = self._held_bytes(session, mode)
        return max(held, peak_of(stages, [stage.options[0] for stage in stages]))

    def _stages(self, session: Session, mode: str) -> list[Stage]:
        """The layers in order, the present plan of each first among its options."""
        plans = {plan.layer: plan for plan in session.plans.of(mode)}
        trail = self.trails.get(mode, Trail())
        held = self._held_bytes(session, mode)
        before = {layer: size for layer, size in trail.calls}  # of the last call of each
        order = [*dict.fromkeys(layer for layer, _ in trail.calls if layer in plans)]
        order += [layer for layer in plans if layer not in before]
        stages, saved = [], 0
        for layer in order:
            saved = before.get(layer, saved if trail.calls else saved + _input_bytes(plans[layer], saved == 0))
            others = saved + held + trail.output_bytes
            times = self._times(mode, layer)
            options = tuple(_options(plans[layer], bool(trail.calls), times))
            stages.append(Stage(layer, options, others))
        return stages

    def _times(self, mode: str, layer: str) -> int:
        """How often a step calls a layer; it keeps as often."""
        calls = self.trails.get(mode, Trail()).calls
        return max(1, sum(name == layer for name, _ in calls))

    def _held_bytes(self, session: Session, mode: str) -> int:
        """Bytes that are there whatever the plans: what was given, graphs and their constants, views."""
        trail = self.trails.get(mode, Trail())
        runs = [run for edges in session.edges.values() for run in edges.runs.values()]
        hoisted = [value for run in runs for name, value in run.hoisted.items() if name != "X"]
        cached = bytes_in(list(session.edges.values()), session.watched.views(), place=trail.place)
        return trail.given_bytes + max(0, cached - bytes_in(hoisted, place=trail.place))


def _mode(is_training: bool) -> str:
    return "training" if is_training else "inference"


def _options(plan: AnyPlan, is_followed: bool, times: int) -> Iterator[Option]:
    """The plan and the candidates it was chosen from.

    What a layer with passes of its own keeps is not told apart: a trail has it, else all of it counts as kept.
    """
    priced = [(plan.seconds, plan.peak_bytes, getattr(plan, "kept_bytes", None))]
    priced += [(r.seconds, r.peak_bytes or 0, r.kept_bytes) for r in plan.rejected if r.seconds is not None]
    for seconds, peak, known in priced:
        kept = known if known is not None else 0 if is_followed or plan.mode == "inference" else peak
        yield Option(seconds, times * kept, peak - kept)


def _input_bytes(plan: AnyPlan, is_first: bool) -> int:
    """Bytes of a layer's input, where no run showed who holds it; the first layer's was given."""
    if is_first or not isinstance(plan, LayerPlan) or "X" not in plan.forward.shapes:
        return 0
    rows, columns = plan.forward.shapes["X"]
    sizes = {**plan.sizes}
    return sizes.get(str(rows), 0) * (columns if isinstance(columns, int) else sizes.get(columns, 0)) * 4
