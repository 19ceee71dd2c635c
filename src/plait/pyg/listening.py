"""Whether something observes the inside of a layer, which then has to run in PyG.

Hooks on every module of the process (plait's own apart), modes of torch functions, tensors of other classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils._device import DeviceContext

from plait.runtime.deferred import Deferred

__all__ = ["in_this_thread", "is_followed", "is_listened_to", "is_watched", "sees_functions"]

_PLAIN = (Tensor, nn.Parameter, nn.UninitializedParameter, Deferred)
_num_modes: Callable[[], int] = torch._C._len_torch_function_stack
_NO_FUNCTION, _NO_DISPATCH = torch._C._disabled_torch_function_impl, torch._C._disabled_torch_dispatch_impl

_EVERYWHERE: tuple[dict[int, Any], ...] = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
)


def in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook of plait's for calls of this thread; a global module hook is called for other threads too."""
    own = threading.get_ident()

    def listen(*args: Any) -> None:
        if threading.get_ident() == own:
            hook(*args)

    listen.is_plaits = True  # type: ignore[attr-defined]
    return listen


def is_listened_to() -> bool:
    """Whether anyone but plait has a hook on every module."""
    return any(_EVERYWHERE) and any(
        not getattr(hook, "is_plaits", False) for hooks in _EVERYWHERE for hook in list(hooks.values())
    )


def is_watched() -> bool:
    """Whether there are hooks on every module or modes of torch functions, whosever they are."""
    return _num_modes() > 0 or any(_EVERYWHERE)


def sees_functions(cls: type) -> bool:
    """Whether a tensor class overrides __torch_function__; PyG's own index classes do not count."""
    if cls in _PLAIN or not issubclass(cls, Tensor) or cls.__module__.startswith("torch_geometric."):
        return False
    return cls.__torch_function__ is not _NO_FUNCTION or cls.__torch_dispatch__ is not _NO_DISPATCH


def is_followed(*arguments: Any) -> bool:
    """Whether a mode, or the class of an argument, intercepts every function of torch.

    A default device other than that of the features is such a mode: plait's own new tensors would go there.
    """
    if _num_modes() and not _only_gives_their_device(arguments):
        return True
    for value in arguments:  # a loop, not any(): this runs at every call of a layer
        cls = type(value)
        if cls is not Tensor and (is_followed(*value) if cls in (tuple, list) else sees_functions(cls)):
            return True
    return False


def _only_gives_their_device(arguments: Iterable[Any]) -> bool:
    """Whether the modes that are on are those of `torch.set_default_device`, and new tensors lie with x."""
    modes = [torch._C._get_function_stack_at(k) for k in range(_num_modes())]
    if not all(isinstance(mode, DeviceContext) for mode in modes):
        return False
    of_x = next((value.device.type for value in arguments if isinstance(value, Tensor)), None)
    return of_x is None or all(mode.device.type == of_x for mode in modes)
