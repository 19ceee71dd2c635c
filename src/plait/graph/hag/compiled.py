"""The one way the searches are compiled: serial, cached on disk, without the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["compiled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

if TYPE_CHECKING:

    def compiled(function: _Function) -> _Function:
        """`function` as type checkers see it: unchanged."""
        return function

else:
    from numba import njit

    compiled = njit(cache=True, nogil=True)
