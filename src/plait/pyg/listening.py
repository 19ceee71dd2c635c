"""Hooks on every module of the process: plait's own, and those of others.

Who hooks every module must see those inside a layer too, which only PyG's own run calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.nn.modules import module

__all__ = ["in_this_thread", "is_listened_to"]

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
    """Whether someone else than plait has a hook on every module."""
    return any(_EVERYWHERE) and any(
        not getattr(hook, "is_plaits", False) for hooks in _EVERYWHERE for hook in list(hooks.values())
    )
