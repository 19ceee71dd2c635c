"""Programs of small graphs on a GPU: their launches replayed as one CUDA graph instead of issued one by one.

On the host of an H200 a step of a layer took 60 to 100 us to issue and less to run. A training loop hands a
program the same tensors at the same addresses again and again: torch's allocator sees to that. So a program
that saw the same addresses a few times is captured, and replayed when they recur. Its results then lie in
memory of the capture; like a buffer (runtime/buffers.py) it is overwritten only when nothing holds it any
more, otherwise the program runs normally. PLAIT_REPLAY=0 switches all of this off.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait.runtime.chain import Env, turned

__all__ = ["Captured", "Made", "Replayed", "at_address", "capture", "capture_call", "noted", "side_stream"]

_log = logging.getLogger("plait")
T = TypeVar("T")

_REPEATS = 3  # times the same addresses are met before a capture
_MOST_GRAPHS = 4  # of one program; addresses that vary more are not worth it
_MOST_SEEN = 32
_MOST_BYTES = 256 << 20  # of results: large ones take longer to compute than to issue
_FREE = 1  # uses of a storage that only its Python object holds

Capture = Callable[[Callable[[Env], None], Env], tuple[Callable[[], None], Env]]
"""(program, values) -> (a function that runs it again, the values after it)."""


@dataclass(frozen=True)
class Made:
    """Where a result lies."""

    name: str
    storage: torch.UntypedStorage
    dtype: torch.dtype
    device: torch.device
    place: tuple[int, torch.Size, tuple[int, ...]]

    @classmethod
    def of(cls, value: Tensor, kept: dict[int, torch.UntypedStorage], name: str = "") -> Made:
        """Where a tensor lies; `kept` has one Python object for each storage, because uses are counted."""
        storage = value.untyped_storage()
        storage = kept.setdefault(storage._cdata, storage)
        place = (int(value.storage_offset()), value.shape, value.stride())
        return cls(name, storage, value.dtype, value.device, place)

    def tensor(self) -> Tensor:
        """A tensor of this memory: by set_, because users may modify it in place, unlike a view of ours."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(self.storage, *self.place)


@dataclass(frozen=True)
class _Captured:
    replay: Callable[[], None]
    made: tuple[Made, ...]
    handles: tuple[int, ...]  # of the storages of the results

    def is_free(self) -> bool:
        """Whether no result of an earlier run is still held."""
        return all(torch._C._storage_Use_Count(handle) <= _FREE for handle in self.handles)


class Replayed:
    """A program that is replayed where its inputs lie where they lay before."""

    def __init__(self, run: Callable[[Env], None], capture: Capture):
        self._run, self._capture = run, capture
        self._graphs: dict[Any, _Captured] = {}
        self._seen: dict[Any, int] = {}
        self._is_off = os.environ.get("PLAIT_REPLAY", "") == "0"
        # a program may be called from several threads: results found free are taken before another one looks
        self._lock = threading.Lock()

    def run(self, env: Env, place: object = None) -> None:
        """Runs the program; `place` is what else must be the same: the stream."""
        key = None if self._is_off else _addresses(env)
        if key is None:
            return self._run(env)
        key = (place, *key)
        found = self._graphs.get(key)
        if found is None and self._is_due(key):
            found = self._captured(env, key)
        results = None if found is None else self._taken(found)
        if found is None or results is None:
            return self._run_and_look(env)
        env.update(results)
        found.replay()

    def _run_and_look(self, env: Env) -> None:
        """Run it as usual; where its results are large, that is how it runs from now on."""
        before = set(env)
        self._run(env)
        made = sum(v.nbytes for n, v in env.items() if n not in before and isinstance(v, Tensor))
        if made > _MOST_BYTES and not self._graphs:
            self._is_off = True

    def _is_due(self, key: Any) -> bool:
        """Whether these addresses came back often enough."""
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        count = self._seen[key] = self._seen.get(key, 0) + 1
        return count > _REPEATS

    def _taken(self, found: _Captured) -> dict[str, Tensor] | None:
        with self._lock:
            return {made.name: made.tensor() for made in found.made} if found.is_free() else None

    def _captured(self, env: Env, key: Any) -> _Captured | None:
        """The program on these addresses as a graph; None, now and later, where it cannot be one."""
        if len(self._graphs) >= _MOST_GRAPHS:
            self._is_off = True
            return None
        try:
            replay, after = self._capture(self._run, Env(env))
        except RuntimeError:
            self._is_off = True
            return None
        made = _results(env, after)
        del after
        if made is None:
            self._is_off = True
            return None
        handles = {one.storage._cdata: None for one in made}
        found = self._graphs[key] = _Captured(replay, made, tuple(handles))
        return found


def _addresses(env: Env) -> tuple[Any, ...] | None:
    """Where the values lie, and numbers of the host themselves; None for what is neither."""
    found: list[Any] = []
    for value in env.values():
        if value is None or (isinstance(value, Tensor) and value.is_meta):
            continue  # not there, or read for its shape alone
        if not isinstance(value, Tensor):
            return None
        is_number = value.is_cpu and not value.dim()
        found.append(value.item() if is_number else (value.data_ptr(), value.stride()))
    return tuple(found)


def _storages(values: Iterable[Any]) -> set[int]:
    return {v.untyped_storage()._cdata for v in values if isinstance(v, Tensor) and not v.is_meta}


def _results(before: Env, after: Env) -> tuple[Made, ...] | None:
    """The results among the values after a program; None where one of them is in an input's memory."""
    # an input the other way round is made again when it is asked for
    new = {n: v for n, v in after.items() if n not in before and turned(n) not in before}
    results = {n: v for n, v in new.items() if isinstance(v, Tensor)}
    if len(results) < len(new) or _storages(results.values()) & _storages(before.values()):
        return None
    kept: dict[int, torch.UntypedStorage] = {}
    return tuple(Made.of(value, kept, name) for name, value in results.items())


class _Streams(threading.local):
    """A stream to capture on for every stream of this thread.

    cuBLAS has a workspace for each thread and stream it was called on: graphs that run side by side must not
    share one, and it must not come from the memory of the first graph.
    """

    def __init__(self) -> None:
        self._made: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
        self._warm: set[torch.cuda.Stream] = set()

    def beside(self, current: torch.cuda.Stream) -> torch.cuda.Stream:
        """The one to capture on what will be replayed on `current`."""
        if current not in self._made:
            self._made[current] = torch.cuda.Stream(current.device)  # type: ignore[no-untyped-call]
        return self.warm(self._made[current])

    def warm(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """The stream, on which cuBLAS was called in this thread."""
        if stream not in self._warm:
            self._warm.add(stream)
            with torch.cuda.stream(stream):
                small = torch.ones(16, 16, device=stream.device)
                torch.addmm(small[0], small, torch.mm(small, small))
        return stream


_streams = _Streams()


class _Noted(threading.local):
    """The programs that run while a whole call is captured in this thread."""

    runs: list[Any] | None = None


noted = _Noted()


class Captured:
    """A call as a graph: `replay` computes its results again, where `made` says they lie."""

    def __init__(self, results: Sequence[Tensor | None], replay: Callable[[], None]):
        kept: dict[int, torch.UntypedStorage] = {}
        self.made = tuple(None if value is None else Made.of(value, kept) for value in results)
        self.replay = replay
        self._uses = dict.fromkeys(kept, _FREE)

    def is_apart_from(self, tensors: Iterable[Tensor]) -> bool:
        """Whether no result is in the memory of one of these."""
        return self._uses.keys().isdisjoint(_storages(tensors))

    def settle(self) -> None:
        """Count the holders of the results now: any further one means that a result is in use."""
        self._uses = {handle: torch._C._storage_Use_Count(handle) for handle in self._uses}

    def is_free(self) -> bool:
        """Whether no result of an earlier replay is still held."""
        return all(torch._C._storage_Use_Count(handle) <= uses for handle, uses in self._uses.items())


class _Bytes:
    """Memory of a GPU as other libraries hand it over: torch reads it and does not own it."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (count,), "typestr": "|u1", "version": 2,
        }  # fmt: skip


def at_address(value: Tensor) -> Tensor:
    """A tensor of the same memory that does not hold it, as a captured graph does."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    count = (last + 1) * value.element_size() if value.numel() else 0
    whole = torch.as_tensor(_Bytes(value.data_ptr(), count), device=value.device).view(value.dtype)
    return whole.as_strided(value.shape, value.stride())


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to capture on what this thread will replay on its current one."""
    return _streams.beside(torch.cuda.current_stream(device))


def capture_call(
    body: Callable[[], Sequence[Tensor | None]], stream: torch.cuda.Stream
) -> tuple[Captured, list[Any]]:
    """(what `body` does as a CUDA graph, the programs it ran); nothing is computed yet."""
    before, noted.runs = noted.runs, []
    try:
        graph, results = _as_graph(body, _streams.warm(stream))
        return Captured(results, graph.replay), noted.runs
    finally:
        noted.runs = before


def _as_graph(body: Callable[[], T], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, T]:
    """(the work that `body` gives to the stream, what it returned)."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # an older graph that is taken down meanwhile would end the capture
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
    except BaseException as error:
        _log.debug("not captured: %s", error)
        _leave_capture(stream.device)
        raise
    finally:
        if collects:
            gc.enable()
    current.wait_stream(stream)
    return graph, result


def _leave_capture(device: torch.device) -> None:
    """Restore torch's random state, which a failed capture leaves waiting for its end for ever."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def capture(program: Callable[[Env], None], env: Env) -> tuple[Callable[[], None], Env]:
    """The program as a CUDA graph, and the values it makes; nothing is computed yet."""
    device = next(v.device for v in env.values() if isinstance(v, Tensor) and v.is_cuda)
    graph, _ = _as_graph(lambda: program(env), side_stream(device))
    return graph.replay, env
