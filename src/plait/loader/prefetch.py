"""Prepares the next results in threads while the caller works on the last one.

The caller's thread hands out the jobs and takes the results in order, so nothing is drawn from an iterator
or a random generator out of turn, and a caller who stops taking stops the threads: at most `depth` jobs are
begun or finished and not yet taken.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from plait.errors import InputError

__all__ = ["Prefetch", "usable_cores"]

Job = TypeVar("Job")
Result = TypeVar("Result")

_NAME = "plait-prefetch"


class Prefetch(Generic[Job, Result]):
    """An iterator over work(job) for every job, in order, up to `depth` of them ahead of the caller.

    An error in `work` is raised where its result would have been, with the traceback of the thread. `close`
    (also called by `with`, at the end, on an error and when the iterator is dropped) waits for the jobs that
    are running and drops the others; no thread is left. With `weigh` and `budget_bytes` as many are kept
    ahead as fit if all were as heavy as the heaviest so far, and always one.
    """

    def __init__(
        self,
        work: Callable[[Job], Result],
        jobs: Iterable[Job],
        depth: int,
        threads: int | None = None,
        *,
        weigh: Callable[[Result], int] | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise InputError(f"depth={depth!r}: give the number of jobs to run ahead, at least 1")
        if budget_bytes is not None and budget_bytes <= 0:
            raise InputError(f"budget_bytes={budget_bytes}: give a positive number of bytes")
        count = min(depth, usable_cores() if threads is None else threads)
        self._work, self._jobs, self.depth = work, iter(jobs), depth
        self._weigh, self._budget, self._heaviest = weigh, budget_bytes, 0
        self._ahead: deque[Future[Result]] = deque()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(max(1, count), _NAME)
        self.stalled_seconds = 0.0

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        try:
            self._top_up()
            if not self._ahead:
                raise StopIteration
            result = self._taken()
            self._top_up()
            return result
        except BaseException:  # also StopIteration and Ctrl-C: no thread is left behind
            self.close()
            raise

    def _taken(self) -> Result:
        """Waits for the oldest result and returns it."""
        oldest = self._ahead.popleft()
        if oldest.done():
            return self._weighed(oldest.result())
        begin = time.perf_counter()
        try:
            return self._weighed(oldest.result())
        finally:
            self.stalled_seconds += time.perf_counter() - begin

    def _weighed(self, result: Result) -> Result:
        if self._weigh is not None:
            self._heaviest = max(self._heaviest, self._weigh(result))
        return result

    def _top_up(self) -> None:
        while self._pool is not None and len(self._ahead) < self._allowed():
            try:
                job = next(self._jobs)
            except StopIteration:
                return
            self._ahead.append(self._pool.submit(self._work, job))

    def _allowed(self) -> int:
        if self._budget is None:
            return self.depth
        if self._heaviest == 0:  # nothing weighed yet
            return 1
        return max(1, min(self.depth, self._budget // self._heaviest))

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            # the collector may drop an iterator in one of its own threads, which cannot wait for itself
            is_own = threading.current_thread().name.startswith(_NAME)
            pool.shutdown(wait=not is_own, cancel_futures=True)
        self._ahead.clear()
        close_jobs = getattr(self._jobs, "close", None)  # a generator may hold threads of its own
        self._jobs = iter(())
        if close_jobs is not None:
            close_jobs()

    def __enter__(self) -> Prefetch[Job, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.close()


def usable_cores() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
