"""What a compiled model holds in a step, observed in one run, and each layer's share of its memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from plait.errors import PlanError
from plait.ops.work import size_of
from plait.plan.dial import Allowance, Option, Stage, peak_of, refusal, turn
from plait.plan.plan import LayerPlan
from plait.runtime.budget import bytes_in
from plait.runtime.executor import Run

if TYPE_CHECKING:
    from plait.runtime.session import Session

__all__ = ["Dial", "Trail", "follow"]

_LEANEST = Allowance(0, 0)  # nothing fits it, and the leanest is taken then


@dataclass(frozen=True)
class Trail:
    """What one run showed: the planned calls in order, and what was alive besides what their plans hold."""

    calls: tuple[tuple[str, int], ...] = ()  # (layer, bytes that others saved for gradients up to then)
    given_bytes: int = 0  # parameters, their gradients, buffers, arguments
    output_bytes: int = 0  # of the model's output, where no layer's plan counts it
    last: frozenset[str] = frozenset()  # layers whose output is the model's
    place: str = "cpu"
    float_bytes: int = 4


def follow(outputs: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> Trail:
    """The trail of a run, from its output: autograd's graph knows which node saved what, in which order.

    Gradients are computed in the reverse order, so what was first saved after a layer is gone when that
    layer's turn comes.
    """
    outputs, given = list(filter(_has_memory, outputs)), list(filter(_has_memory, given))
    known = {_key(tensor) for tensor in given}
    given_out = {_key(tensor) for tensor in outputs}
    own: set[int] = set()  # memory that plans count
    saved: dict[int, tuple[int, int]] = {}  # by memory: when it was first saved, its bytes
    calls: list[tuple[int, str]] = []
    for order, node in sorted(_nodes(outputs), key=lambda found: found[0]):
        run = getattr(node, "run", None)
        values = tuple(filter(_has_memory, _saved_by(node)))
        if isinstance(run, Run):
            calls.append((order, run.plan.layer))
            count = len(node.layout.saved)
            own |= {_key(tensor) for tensor in (*values[count:], *_output_kept(node))} - given_out
            shapes = _copied_shapes(node)
            values = tuple(tensor for tensor in values[:count] if tensor.shape not in shapes)
        for tensor in values:
            saved.setdefault(_key(tensor), (order, tensor.untyped_storage().nbytes()))
    others = [pair for key, pair in saved.items() if key not in known | own]
    before = tuple((layer, sum(size for when, size in others if when <= order)) for order, layer in calls)
    apart = known | own | set(saved)
    left = {
        _key(tensor): tensor.untyped_storage().nbytes() for tensor in outputs if _key(tensor) not in apart
    }
    runs = [getattr(tensor.grad_fn, "run", None) for tensor in outputs]
    last = frozenset(run.plan.layer for run in runs if isinstance(run, Run))
    place = next((tensor.device.type for tensor in outputs), "cpu")
    float_bytes = max((tensor.element_size() for tensor in outputs if tensor.is_floating_point()), default=4)
    return Trail(before, _given_bytes(given), sum(left.values()), last, place, float_bytes)


def _given_bytes(given: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors and of the gradients that those which want one will get; each storage once."""
    sizes = {}
    for tensor in given:
        size = tensor.untyped_storage().nbytes()
        sizes[_key(tensor)] = size + (tensor.nbytes if tensor.requires_grad and tensor.is_leaf else 0)
    return sum(sizes.values())


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for wrappers, PyG's EdgeIndex among them: what they wrap has the memory."""
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


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
    (pyg/overwritten.py): such copies are not part of a later step.
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
    is_paused: bool = False  # every run is observed elsewhere
    _version: int = -1  # of the plans that were looked at last
    _leanest: dict[str, int] = field(default_factory=dict)  # peak of the leanest, by mode
    _is_leanest: set[str] = field(default_factory=set)  # modes that are left at that
    _awaited: WeakSet[Any] = field(default_factory=WeakSet)  # checkpoints that will run their layers again
    is_late: bool = False  # a call ended while one was awaited, and its plans were not looked at

    def wait_for(self, checkpoint: Any) -> None:
        """Keep all choices while the checkpoint lives: its second run must save what its first one did."""
        if self.limit is not None:
            self._awaited.add(checkpoint)

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
        """Choose again from what the latest run showed; True where layers are to be planned again.

        PlanError where the limit cannot be met.
        """
        if self.limit is None or mode in self._is_leanest:
            return False
        layers = self._layers(session, mode)
        stages = [layer.stage for layer in layers]
        if not any((mode, stage.layer) in self.shares for stage in stages):
            self._leanest[mode] = peak_of(stages, [stage.options[0] for stage in stages])
        session.buffers.limit_to(self.limit - max((layer.not_pooled for layer in layers), default=0))
        try:
            chosen = turn(stages, self.limit).options
        except PlanError:
            return self._fall_back(session, mode)
        picked = zip(layers, chosen, strict=True)
        return self._set(session, mode, {
            layer.stage.layer: layer.shares[layer.stage.options.index(option)] for layer, option in picked
        })  # fmt: skip

    def _fall_back(self, session: Session, mode: str) -> bool:
        """Run the leanest again where it fits, though what a faster choice needs of the graph does not."""
        assert self.limit is not None
        if self._leanest[mode] > self.limit:
            raise refusal(self.limit, self._leanest[mode])
        for edges in session.edges.values():
            vars(edges).pop("orders", None)  # made again, only what is asked for
        layers = [layer for own, layer in self.shares if own == mode]
        self._is_leanest.add(mode)
        return self._set(session, mode, dict.fromkeys(layers, _LEANEST))

    def _set(self, session: Session, mode: str, shares: dict[str, Allowance]) -> bool:
        changed = [layer for layer, share in shares.items() if self.shares.get((mode, layer)) != share]
        for layer in changed:
            self.shares[mode, layer] = shares[layer]
            session.forget(layer)
        return bool(changed)

    def settle(self, session: Session, model: torch.nn.Module, arguments: Iterable[Any]) -> None:
        """Look at the plans of the latest call, where they are new; later calls follow."""
        if self.limit is None or self.is_paused or self._version == session.plans.version:
            return
        self.is_late = bool(self._awaited)
        if self.is_late:
            return
        self._version, mode = session.plans.version, session.plans.mode
        plans = session.plans.of(mode)
        if mode not in self.trails:
            given = [*model.parameters(), *model.buffers(), *arguments]
            tensors = [value for value in given if isinstance(value, torch.Tensor) and _has_memory(value)]
            place = next((tensor.device.type for tensor in tensors), "cpu")
            self.trails[mode] = Trail(given_bytes=_given_bytes(tensors), place=place)
        if not all(map(self._admits, plans)) or self.peak_bytes(session, mode) > self.limit:
            self.turn(session, mode)

    def _admits(self, plan: LayerPlan) -> bool:
        """Whether a plan is one that its share was made for; the leanest is taken where none is."""
        share = self.share(plan.layer, plan.mode == "training")
        return share is None or share.admits(getattr(plan, "kept_bytes", 0), plan.peak_bytes)

    def peak_bytes(self, session: Session, mode: str) -> int:
        """Most bytes a step of the model holds by its present plans."""
        stages = [layer.stage for layer in self._layers(session, mode)]
        held = self._held_bytes(session, mode)
        return max(held, peak_of(stages, [stage.options[0] for stage in stages]))

    def _layers(self, session: Session, mode: str) -> list[_Layer]:
        """The layers in order, the present plan of each first among its options."""
        plans = {plan.layer: plan for plan in session.plans.of(mode)}
        trail = self.trails.get(mode, Trail())
        always = self._held_bytes(session, mode) + trail.output_bytes
        before = dict(trail.calls)  # of the last call of each
        order = [*dict.fromkeys(layer for layer, _ in trail.calls if layer in plans)]
        order += [layer for layer in plans if layer not in before]
        layers: list[_Layer] = []
        saved = 0
        for name in order:
            if name in before:
                saved = before[name]
            elif layers and not trail.calls:
                given = _value_bytes(plans[name], "X", trail)
                saved = saved + given if mode == "training" else given
            layers.append(_layer(plans[name], trail, saved + always))
        return layers

    def _held_bytes(self, session: Session, mode: str) -> int:
        """Bytes that are there whatever the plans: what was given, graphs and their constants, views."""
        trail = self.trails.get(mode, Trail())
        runs = [run for edges in session.edges.values() for run in edges.runs.values()]
        hoisted = [value for run in runs for name, value in run.hoisted.items() if name != "X"]
        cached = bytes_in(list(session.edges.values()), session.watched.views(), place=trail.place)
        return trail.given_bytes + max(0, cached - bytes_in(hoisted, place=trail.place))


def _mode(is_training: bool) -> str:
    return "training" if is_training else "inference"


@dataclass(frozen=True)
class _Layer:
    """A layer as the dial sees it; to each of its options the share that admits it."""

    stage: Stage
    shares: tuple[Allowance, ...]
    not_pooled: int  # of what is alive while it works, bytes that are not the pool's


def _layer(plan: LayerPlan, trail: Trail, others: int) -> _Layer:
    """A layer with the options of its plan.

    Plans of program layers do not say what is kept: the trail does, otherwise everything counts as kept.
    """
    priced = [
        (plan.seconds, plan.peak_bytes, getattr(plan, "kept_bytes", None), getattr(plan, "kept_output", 0))
    ]
    priced += [
        (r.seconds, r.peak_bytes or 0, r.kept_bytes, r.kept_output)
        for r in plan.rejected
        if r.seconds is not None
    ]
    times = max(1, sum(name == plan.layer for name, _ in trail.calls))  # it keeps as often as it is called
    is_seen = bool(trail.calls) or plan.mode == "inference"
    options, shares = [], []
    for seconds, peak, known, output in priced:
        kept = known if known is not None else 0 if is_seen else peak
        counted = times * kept - (output if plan.layer in trail.last else 0)
        options.append(Option(seconds, counted, peak - kept))
        shares.append(Allowance(kept, peak))
    gradient = _value_bytes(plan, "", trail) if plan.mode == "training" else 0
    return _Layer(Stage(plan.layer, tuple(options), others), tuple(shares), others + gradient)


def _value_bytes(plan: LayerPlan, name: str, trail: Trail) -> int:
    """Bytes of an input, or of the output (no name); 0 where a plan states no steps."""
    shape = plan.forward.shapes.get(name or "".join(plan.forward.outputs[:1]))
    if shape is None:
        return 0
    return trail.float_bytes * size_of(shape[0], plan.sizes) * size_of(shape[1], plan.sizes)
