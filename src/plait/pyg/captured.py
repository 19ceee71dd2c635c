"""plait.compile(capture=True): a training step as a CUDA graph, on one graph or on mini-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import InputError
from plait.plan.padding import fitting, padded_sizes
from plait.pyg.slot import Slot, layout
from plait.runtime.capture import Replay, body_of, make_capturable, settings
from plait.runtime.placed import BOUNDED_EDGES

__all__ = ["TrainingStep", "training_step"]

Loss = Callable[[nn.Module, Any], Tensor]

_WARM = 3  # steps before a capture; of a size of batches two
_LOOKED_AT = 32  # batches whose sizes choose those that batches are padded to
_MOST_SIZES = 4
_MOST_CAPTURES = 8
_NODES, _EDGES = 128, 1024  # sizes are multiples of these
_ROOM = 1.02  # the largest size relative to the largest batch seen


class TrainingStep:
    """One training step: loss(model, data), its backward pass and the optimiser, replayed as a CUDA graph.

    `step()` runs it on the data given to compile, `step(batch)` on a mini-batch. Both return the loss, a
    tensor that the next step of the same size overwrites: read it with .item() occasionally, not every step.
    On a CPU, and where a batch fits no captured size, the same step runs without a capture.
    """

    def __init__(self, model: nn.Module, data: Any, loss: Loss, optimizer: torch.optim.Optimizer | None):
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self._data = data
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise InputError("model: no parameter requires a gradient; a training step needs one")
        self.is_captured = all(p.is_cuda for p in parameters)
        if self.is_captured and optimizer is not None:
            make_capturable(optimizer)
        session = getattr(model, "_plait_plan_session", None)
        if self.is_captured and session is not None:
            session.aside.is_off = True  # PyG can only save Python, which does not matter in a replay
        self._stream: Any = None
        if self.is_captured:
            self._stream = torch.cuda.Stream(parameters[0].device)  # type: ignore[no-untyped-call]
        self._captures: OrderedDict[Any, Replay] = OrderedDict()
        self._seen: list[tuple[int, int]] = []
        self.sizes: tuple[tuple[int, int], ...] = ()
        self._slots: OrderedDict[Any, Slot] = OrderedDict()
        self._is_checked = False

    def __call__(self, batch: Any = None) -> Tensor:
        return self.step(batch)

    def step(self, batch: Any = None) -> Tensor:
        """The loss of one step on the data, or on a mini-batch."""
        if batch is None or batch is self._data:
            if self._data is None:
                raise InputError("batch: compile was given no data; pass the batch, step(batch)")
            return self._whole()
        return self._on_batch(batch)

    def expect(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Choose padded sizes from these (nodes, edges) of coming batches instead of from the first ones."""
        self._seen = [(int(nodes), int(edges)) for nodes, edges in sizes]
        self._choose()

    # One graph --------------------------------------------------------------------------------

    def _whole(self) -> Tensor:
        if not self.is_captured:
            return self._run(self._data)
        state = self._state()
        found = self._captures.get(state)
        if found is None:
            warm = 1 if self._captures else _WARM
            found = self._captures[state] = self._replay(self._data, warm)
            while len(self._captures) > _MOST_CAPTURES:
                self._captures.popitem(last=False)
        return found()

    def _parameters(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _replay(self, data: Any, warm: int, before: Callable[[], None] | None = None) -> Replay:
        def loss() -> Tensor:
            if before is not None:
                before()
            return self.loss(self.model, data)

        parameters = self._parameters()
        body = body_of(loss, parameters, self.optimizer)
        return Replay(body, self._stream, warm, parameters)

    def _run(self, data: Any) -> Tensor:
        """A step without a capture."""
        return body_of(lambda: self.loss(self.model, data), self._parameters(), self.optimizer)()

    def _state(self) -> tuple[Any, ...]:
        """Everything that a captured step treats as constant."""
        modes = tuple([module.training for module in self.model.modules()])
        places = tuple([(p.data_ptr(), p.requires_grad) for p in self.model.parameters()])
        return modes, places, settings(self.optimizer)

    # Mini-batches -----------------------------------------------------------------------------

    def _on_batch(self, batch: Any) -> Tensor:
        if not self.is_captured:
            return self._run(batch)
        size = (int(batch.num_nodes), int(batch.num_edges))
        slot = self._slot(batch, size)
        if slot is None:
            return self._run(batch.to(self._stream.device, non_blocking=True))
        slot.fill(batch, size)
        if not self._is_checked:
            self._check_padding(slot, batch, size)
        return slot.replay()

    def _slot(self, batch: Any, size: tuple[int, int]) -> Slot | None:
        """The slot this batch is copied to; None where it runs without one."""
        if len(self._seen) < _LOOKED_AT:
            self._seen.append(size)
            if len(self._seen) == _LOOKED_AT:
                self._choose()
            return None
        padded = fitting((size[0] + 1, size[1]), self.sizes)
        if padded is None:
            return None
        key = (padded, layout(batch, size), self._state())
        slot = self._slots.get(key)
        if slot is None:
            slot = Slot(batch, size, (padded[0], padded[1]), self._stream.device)
            slot.replay = self._replay(slot.batch, 2, slot.ready)
            self._slots[key] = slot
            while len(self._slots) > _MOST_CAPTURES:
                self._slots.popitem(last=False)
        return slot

    def _choose(self) -> None:
        """The padded sizes for the batches seen, with a node more than they have, where padding edges end."""
        able = [size for size in self._seen if size[1] <= BOUNDED_EDGES]
        most = [_ROOM * max((size[k] for size in able), default=0) for k in range(2)]
        largest = [(int(most[0]), int(most[1]))] if able else []
        wanted = [(nodes + 1, edges) for nodes, edges in able + largest]
        rounded = [(_up(nodes, _NODES), min(_up(edges, _EDGES), BOUNDED_EDGES)) for nodes, edges in wanted]
        self.sizes = tuple((n, e) for n, e in padded_sizes(rounded, _MOST_SIZES))

    def _check_padding(self, slot: Slot, batch: Any, size: tuple[int, int]) -> None:
        """InputError where the loss depends on the padding, because something in the model mixes rows."""
        reason = _mixes_rows(self.model)
        if reason is None:
            kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
            losses = []
            with torch.no_grad(), torch.random.fork_rng(devices=[self._stream.device]):
                for is_other in (False, True):
                    if is_other:
                        slot.disturb(size)
                    slot.ready()
                    torch.manual_seed(0)
                    losses.append(self.loss(self.model, slot.batch).detach().clone())
                for buffer, value in kept:
                    buffer.copy_(value)
            slot.fill(batch, size)
            if not torch.allclose(losses[0], losses[1], rtol=1e-4, atol=1e-6, equal_nan=True):
                reason = "the loss changes with the padding rows"
        if reason is not None:
            raise InputError(
                f"capture: batches are padded to a few sizes, and {reason}; read the rows of the seeds "
                "alone, out[:batch.batch_size], and use norms of single rows, or compile without capture=True"
            )
        self._is_checked = True


def _up(count: int, step: int) -> int:
    return -(-max(1, count) // step) * step


def _mixes_rows(model: nn.Module) -> str | None:
    """A module whose result for one row depends on the others, by its name."""
    for name, module in model.named_modules():
        kind, home = type(module).__name__, type(module).__module__
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) or kind in (
            "BatchNorm", "HeteroBatchNorm", "GraphNorm", "GraphSizeNorm", "PairNorm", "DiffGroupNorm",
            "InstanceNorm",
        )  # fmt: skip
        is_graph_wide = kind == "LayerNorm" and getattr(module, "mode", "") == "graph"
        if is_norm or is_graph_wide or home.startswith("torch_geometric.nn.pool"):
            return f"{name} ({kind}) mixes the rows of a batch"
    return None


def training_step(model: nn.Module, data: Any, loss: Any, optimizer: Any) -> TrainingStep:
    """The step that compile(capture=True) returns; InputError for what cannot be one."""
    if not callable(loss):
        raise InputError(
            "loss: a captured step needs it; pass a function loss(model, data) that returns the loss, as "
            "lambda model, data: cross_entropy(model(data.x, data.edge_index)[rows], data.y[rows])"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("optimizer: LBFGS decides on the host how often to call the loss; use another one")
    return TrainingStep(model, data, loss, optimizer)
