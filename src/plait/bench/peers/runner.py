"""What a peer provides to be checked and timed, and its line of a record where it provides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from plait.bench.trial import fate, in_short
from plait.errors import PlaitError

__all__ = ["Runner", "SameAs", "Unavailable", "named_gradients", "share_times", "tried"]

T = TypeVar("T")


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


def tried(
    call: Callable[[], T], trial: Callable[[], object] | None, clocked: str
) -> tuple[T | None, dict[str, object]]:
    """(what the call returns, a line with its seconds as `clocked`), or (None, a line that says why not).

    `trial` is made in a process of its own first: what kills that process is a line too.
    """
    killed = None if trial is None else fate(trial)
    if killed is not None:
        return None, {"status": "missing", "reason": killed}
    begun = time.perf_counter()
    try:
        found = call()
    except SameAs as other:
        return None, {"status": "same", "as": str(other)}
    except (Unavailable, PlaitError) as error:
        return None, {"status": "missing", "reason": str(error)}
    except Exception as error:  # a peer that breaks is its own line, not the run's end
        return None, {"status": "missing", "reason": in_short(error)}
    return found, {"status": "timed", clocked: time.perf_counter() - begun}


def share_times(lines: Mapping[str, dict[str, object]]) -> None:
    """Gives a peer that does what another does the seconds of that one."""
    for line in lines.values():
        twin = lines.get(str(line.get("as")), {}) if line["status"] == "same" else {}
        line |= {key: value for key, value in twin.items() if key.endswith("seconds") and key not in line}
