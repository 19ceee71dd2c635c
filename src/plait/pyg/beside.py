"""What a model does outside its layers: torch's operations on rows of nodes, recorded in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.analysis.between import Beside, Passed
from plait.pyg.call import Call
from plait.pyg.compile import rehearse
from plait.runtime.session import Session

__all__ = ["beside"]

_PRODUCTS = {"linear", "mm", "matmul", "addmm", "__matmul__"}


def beside(model: nn.Module, call: Call, mode: str) -> Beside:
    """The operations that follow each layer, by its name, and how wide the model's result is."""
    session = Session()
    noted = _Noted(session, call.num_nodes, mode == "training")
    session.over_ranks = noted.in_layer
    out = rehearse(model, session, call, mode, noted)
    width = int(out.shape[1]) if isinstance(out, Tensor) and out.dim() == 2 else None
    return Beside(noted.found, width, tuple(noted.layers), noted.plan_seconds)


class _Noted(TorchFunctionMode):
    """Operations on as many rows as there are nodes, by the layer that was called before them."""

    def __init__(self, session: Session, nodes: int, is_training: bool) -> None:
        super().__init__()
        self.session, self.is_training = session, is_training
        self._least = nodes  # numbers of a result that counts
        self.found: dict[str, list[Passed]] = {}
        self.layers: list[str] = []
        self.plan_seconds = 0.0
        self._depth = 0

    def in_layer(
        self, module: Any, seats: Any, here: Any, names: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the layer as one process does; operations it leaves to torch count as following it."""
        self.layers.append(seats.of(module).name)
        self.session.plans.clear()
        self._depth += 1
        try:
            return here(args, kwargs)
        finally:
            self._depth -= 1
            self.plan_seconds += sum(plan.seconds for plan in self.session.plans.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._counts(out, args):
            self.found.setdefault(self.layers[-1] if self.layers else "", []).append(_passed(func, args, out))
        return out

    def _counts(self, out: Any, args: tuple[Any, ...]) -> bool:
        """Whether it computed rows; planned steps run without gradients and are priced elsewhere."""
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.numel() < self._least:
            return False
        if not (torch.is_grad_enabled() if self.is_training else self._depth == 0):
            return False
        return bool(_read(args)) and not any(_shares(out, arg) for arg in args if isinstance(arg, Tensor))


def _shares(out: Tensor, given: Tensor) -> bool:
    """Whether a result lies in the memory of an argument, and so was not written again."""
    return out.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


def _read(args: tuple[Any, ...]) -> int:
    """Bytes of the numbers read."""
    given = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    given += [
        part for arg in args if isinstance(arg, tuple | list) for part in arg if isinstance(part, Tensor)
    ]
    return sum(arg.numel() * arg.element_size() for arg in given)


def _passed(func: Any, args: tuple[Any, ...], out: Tensor) -> Passed:
    product, name = None, getattr(func, "__name__", "")
    if name in _PRODUCTS and out.dim() >= 2 and isinstance(args[0], Tensor):
        width = int(out.shape[-1])
        product = (out.numel() // max(1, width), width, int(args[0].shape[-1]))
    has_gradient = out.requires_grad
    return Passed(_read(args), out.numel() * out.element_size(), has_gradient, product, name)
