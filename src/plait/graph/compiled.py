"""Functions compiled by numba: serial, without the interpreter lock, kept on disk where that is possible."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["compiled", "inlined"]

_Returned = TypeVar("_Returned")

if TYPE_CHECKING:

    def compiled(function: Callable[..., _Returned]) -> Callable[..., _Returned]:
        """`function` as type checkers see it: arguments are numba's to judge."""
        return function

    def inlined(function: Callable[..., _Returned]) -> Callable[..., _Returned]:
        """The same, put in place where another compiled function calls it."""
        return function

else:
    from numba import njit
    from numba.core.caching import FunctionCache

    class _Kept(FunctionCache):
        """Files of machine code; what a full disk does not take is compiled again by the next process."""

        def save_overload(self, sig, data):
            with contextlib.suppress(OSError):
                super().save_overload(sig, data)

    def compiled(function, **options):
        # not cache=True, which raises where no folder takes files, as for a container's user without a home
        dispatcher = njit(nogil=True, **options)(function)
        with contextlib.suppress(RuntimeError):
            dispatcher._cache = _Kept(function)
        return dispatcher

    inlined = functools.partial(compiled, inline="always")
