"""What a peer provides to be checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Runner", "SameAs", "Unavailable", "named_gradients"]


class Unavailable(Exception):  # noqa: N818  a signal, caught and shown, not a fault
    """This peer cannot run this problem; the text says why and becomes a line in the table."""


class SameAs(Exception):  # noqa: N818  as above
    """This peer would do exactly what another does here; its time is that one's."""


@dataclass(frozen=True)
class Runner:
    """A forward pass, the parameters it trains, and their gradients under PyG's names and shapes."""

    forward: Callable[[Tensor], Tensor]
    parameters: tuple[nn.Parameter, ...]
    gradients: Callable[[], Mapping[str, Tensor]]

    def inference(self, x: Tensor) -> Callable[[], object]:
        """The call that is timed for inference."""

        def call() -> Tensor:
            with torch.no_grad():
                return self.forward(x)

        return call

    def training(self, x: Tensor, cotangent: Tensor) -> Callable[[], object]:
        """The call that is timed for a training step: forward, then backward to the weights and to x."""

        def call() -> None:
            x.grad = None
            for parameter in self.parameters:
                parameter.grad = None
            torch.autograd.backward(self.forward(x), cotangent)

        return call


def named_gradients(layer: nn.Module) -> Callable[[], dict[str, Tensor]]:
    """The gradients of a layer that kept PyG's parameters, by name."""

    def gradients() -> dict[str, Tensor]:
        return {name: value.grad for name, value in layer.named_parameters() if value.grad is not None}

    return gradients
