"""A training step as one CUDA graph: run normally a few times, captured once, replayed from then on.

The first calls are steps like any other: kernels are compiled, plans made and optimiser states created by
them, so nothing has to be undone before the capture, which computes nothing itself. torch moves its random
numbers on at every replay as an ordinary step would, so dropout draws the same as without a capture.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import InputError

__all__ = ["Replay", "body_of", "make_capturable", "settings"]

_OWN = Path(__file__).parents[1]
_READS = "reads a value of the device"


class Replay:
    """A function without arguments whose tensors stay where they are, as a CUDA graph.

    `warm` calls run it before one captures it; the last of them, where there are two or more, must not wait
    for the device. Returns what the function returned, in memory that the next call writes to.
    """

    def __init__(
        self, body: Callable[[], Tensor], stream: torch.cuda.Stream, warm: int, parameters: Sequence[Tensor]
    ):
        self._body, self._stream, self._parameters = body, stream, parameters
        self._warm, self._calls = warm, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None
        self._grads: list[Tensor | None] = []

    def __call__(self) -> Tensor:
        if self._graph is not None:
            self._graph.replay()
            self._hand_over()
            assert self._result is not None
            return self._result
        self._calls += 1
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                if self._calls <= self._warm:
                    is_last = self._calls == self._warm and self._warm > 1
                    with _no_waiting() if is_last else _as_usual():
                        return self._body()
                self._capture()
        except RuntimeError as error:
            raise _refused(error) from error
        finally:
            current.wait_stream(self._stream)
        return self()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # other threads may go on allocating: loaders pin memory
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._result = self._body()
        self._graph = graph
        self._grads = [parameter.grad for parameter in self._parameters]

    def _hand_over(self) -> None:
        """Put the gradients back where the caller looks for them, even if .grad was cleared."""
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad


@contextmanager
def _as_usual() -> Iterator[None]:
    yield


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device is an error at that line."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _refused(error: RuntimeError) -> Exception:
    """The error for the user, naming the line that cannot be captured; other errors unchanged."""
    text = str(error).partition("\n")[0]
    is_wait = "synchronizing CUDA operation" in text
    if isinstance(error, torch.OutOfMemoryError) or not (is_wait or "captur" in text):
        return error
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_the_users(f.filename)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return InputError(
        f"capture: the step{place} {_READS if is_wait else f'cannot be captured: {text}'}. A captured step "
        "must not use .item(), print a tensor, make tensors of host data or index by a boolean mask: use row "
        "numbers such as mask.nonzero().view(-1), made once before"
    )


def _is_the_users(filename: str) -> bool:
    """Whether a file is neither plait's nor a package's."""
    return not Path(filename).is_relative_to(_OWN) and "-packages" not in filename


def body_of(
    loss: Callable[[], Any], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer | None
) -> Callable[[], Tensor]:
    """One training step: gradients dropped, the loss, its backward pass, the optimiser where there is one."""

    def body() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(f"loss: returned {_words(value)}; return the loss, a tensor of one number")
        value.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
        return value.detach()

    return body


def _words(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser count its steps on the device; InputError for one that cannot."""
    if isinstance(optimizer, torch.optim.SGD):
        return
    if "capturable" not in optimizer.defaults:
        raise InputError(
            f"optimizer: {type(optimizer).__name__} keeps numbers on the host that a captured step would not "
            "change; pass one with a capturable option such as Adam, or leave optimizer= out and call "
            "its step() yourself"
        )
    optimizer.defaults["capturable"] = True
    for group in optimizer.param_groups:
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)


def settings(optimizer: torch.optim.Optimizer | None) -> tuple[Any, ...]:
    """What a captured optimiser step has treated as constant: a change needs another capture."""
    if optimizer is None:
        return ()
    return tuple(
        id(value) if isinstance(value, Tensor) else value
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and not isinstance(value, list)
    )
