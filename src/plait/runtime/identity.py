"""What identifies a tensor: its object, memory and version, and a sample of its elements.

torch counts the writes to a tensor, but not all of them: none to a tensor made under `inference_mode`, none
through `x.data`, `x.numpy()` or another library that shares the memory. Therefore

- memory is identified by its storage, not by its address: code that keeps something for a tensor keeps a
  `Hold`, and while it does, the same identity never means another storage;
- tensors without a version counter are compared with a copy, one pass over them;
- of the others `SAMPLES` words spread over the tensor are part of the identity. A write that no counter sees
  and that changes none of these words is missed: to see every write, each call would have to read all its
  inputs. After such a write make a new tensor, or call `x.add_(0)`, which counts.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from plait.graph.compiled import compiled

__all__ = ["SAMPLES", "Hold", "counts_writes", "identity", "is_identical", "storage_bytes", "word_at"]

# Of features with 1% non-zeros 64 words would miss a scaling of all of them in one case of four, 256 in one
# of 170.
SAMPLES = 256
_FEW_SAMPLES = 64
_PLACES = 32
_WORD = 8
_MOST_COPIES = 8


def identity(tensor: Tensor, samples: int = _FEW_SAMPLES) -> tuple[Any, ...]:
    """A value that differs for another tensor, other memory, and other contents as far as can be detected."""
    if tensor.layout is not torch.strided:
        # the parts are other objects each time they are asked for
        parts = [part for entry in _parts(tensor) for part in identity(entry)[1:]]
        return (id(tensor), tensor.shape, *parts)
    try:
        version = tensor._version
    except RuntimeError:  # made under inference_mode
        version = _copied_version(_memory(tensor))
    is_plain = tensor.is_cpu and tensor.is_contiguous()
    address, words = tensor.data_ptr(), tensor.nbytes // _WORD if is_plain else _words(tensor)
    rest = tensor.nbytes % _WORD if is_plain and address else 0  # an odd number of edges: half a word
    seen: Any = _sampled(address, words, samples) if words and address else 0
    if rest:
        seen = (seen, ctypes.string_at(address + words * _WORD, rest))
    if not address and (memory := _memory(tensor)) is not tensor:
        inside = identity(memory, samples)
        return (id(tensor), *inside[1:3], (version, inside[3]), *inside[4:])
    return (
        id(tensor), tensor.untyped_storage()._cdata, address, version, tensor.shape, tensor.stride(),
        seen,
    )  # fmt: skip


def is_identical(tensor: Tensor, known: tuple[Any, ...], samples: int = _FEW_SAMPLES) -> bool:
    """identity(tensor, samples) == known, of the very tensor that `known` is of."""
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference():
        address, size = tensor.data_ptr(), tensor.nbytes
        if address and not size % _WORD and tensor.is_cpu and tensor.is_contiguous():
            return bool(
                address == known[2]
                and tensor._version == known[3]
                and tensor.shape == known[4]
                and tensor.stride() == known[5]
                and tensor.untyped_storage()._cdata == known[1]
                and (_sampled(address, size // _WORD, samples) if size else 0) == known[6]
            )
    elif type(tensor) is Tensor and tensor.layout is torch.sparse_csr and tensor.is_cpu:
        return _is_identical_csr(tensor, known, samples)
    return identity(tensor, samples) == known


def _is_identical_csr(tensor: Tensor, known: tuple[Any, ...], samples: int) -> bool:
    """The same of a CSR matrix on a CPU: its parts are compared one by one, without their identities made."""
    if tensor.shape != known[1]:
        return False
    at = 2
    for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
        address, size = part.data_ptr(), part.nbytes
        if not address or not size or not part.is_contiguous() or part.is_inference():
            return identity(tensor, samples) == known
        if (
            address != known[at + 1]
            or part._version != known[at + 2]
            or part.shape != known[at + 3]
            or part.stride() != known[at + 4]
            or part.untyped_storage()._cdata != known[at]
        ):
            return False
        seen: Any = _sampled(address, size // _WORD, samples) if size >= _WORD else 0
        if rest := size % _WORD:
            seen = (seen, ctypes.string_at(address + size - rest, rest))
        if seen != known[at + 5]:
            return False
        at += 6
    return True


def counts_writes(tensor: Tensor) -> bool:
    """Whether torch counts the writes to a tensor: not if it was made under inference_mode.

    `x.data = y` on such a tensor leaves one without a counter that no longer says it is an inference tensor;
    `x.detach()` has a counter that never advances.
    """
    if tensor.is_inference():
        return False
    try:
        tensor._version  # noqa: B018  asking is all there is to it
    except RuntimeError:
        return False
    return True


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (_memory(tensor),) if tensor.layout is torch.strided else ()


def _memory(tensor: Tensor) -> Tensor:
    """The tensor that has the memory: PyG's EdgeIndex wraps one and has none of its own."""
    inside = tensor if type(tensor) is Tensor else getattr(tensor, "_data", tensor)
    return inside if isinstance(inside, Tensor) else tensor


def _words(tensor: Tensor) -> int:
    """Whole words from the first to the last element of a strided tensor; 0 where nothing can be read."""
    if not tensor.is_cpu:
        return 0
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() // _WORD


@intrinsic  # type: ignore[untyped-decorator]
def word_at(typing: Any, address: Any) -> Any:
    """The word at an address, which need not be a multiple of its size."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(types.int64), code


@compiled
def _sampled(address: int, words: int, samples: int) -> int:
    """A number made of `samples` words, a run of neighbours at each of _PLACES places spread evenly.

    A place is a page that is not in memory; its neighbours cost nothing more.
    """
    factor = np.uint64(0x9E3779B97F4A7C15)
    length = max(1, min(samples // _PLACES, words // _PLACES))
    digest = np.uint64(words)
    for k in range(_PLACES):
        start = k * (words - length) // (_PLACES - 1)
        own = np.uint64(k)
        for i in range(length):
            own = (own ^ word_at(address + 8 * (start + i))) * factor
            own ^= own >> np.uint64(29)
        digest += own * (factor + np.uint64(2 * k))
    return int(digest)


# Tensors without a version counter ----------------------------------------------------------------------


class _Copies:
    """Copies of the tensors without a version counter that were met last, and a counter for each."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Callable[[], Tensor | None], Tensor, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._next = 0

    def version(self, tensor: Tensor) -> int:
        """Another number whenever the contents are other ones; below zero: no counter of torch is."""
        with self._lock:
            reference, copy, version = self._kept.pop(id(tensor), (None, None, 0))
            is_known = reference is not None and reference() is tensor
            if not is_known or copy is None or not _are_same(copy, tensor):
                self._next -= 1
                copy, version = tensor.clone(), self._next
            self._kept[id(tensor)] = (weakref.ref(tensor), copy, version)
            for key in [key for key, (alive, _, _) in self._kept.items() if alive() is None]:
                del self._kept[key]
            while len(self._kept) > _MOST_COPIES:
                self._kept.popitem(last=False)
            return version


_copies = _Copies()
_copied_version = _copies.version
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _are_same(copy: Tensor, tensor: Tensor) -> bool:
    """Whether all bits agree: a NaN is the same NaN."""
    if copy.shape != tensor.shape or copy.dtype != tensor.dtype:
        return False
    bits = _BITS.get(tensor.element_size())
    return bits is not None and torch.equal(copy.view(bits), tensor.view(bits))


_weak: Callable[[torch.UntypedStorage], Any] = StorageWeakRef


# Keeping something for a tensor ---------------------------------------------------------------------------


class Hold:
    """Keeps a tensor's identity its own without keeping the tensor or its memory.

    When the tensor is gone, it cannot be passed again: `gone` is then added to `dead`, so that what was kept
    for it can be dropped.
    """

    __slots__ = ("_storages", "_tensor")

    def __init__(self, tensor: Tensor, dead: list[Any] | None = None, gone: Any = None) -> None:
        self._storages = [_weak(part.untyped_storage()) for part in _parts(tensor)]
        self._tensor = weakref.ref(tensor, None if dead is None else lambda _: dead.append(gone))

    def __call__(self) -> Tensor | None:
        """The tensor, or None when it is gone."""
        return self._tensor()


def storage_bytes(tensors: Any) -> int:
    """Bytes behind some tensors and arrays, each storage counted once; what is neither counts nothing."""
    found: dict[int, int] = {}
    for value in tensors:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, np.ndarray):
            base = value
            while isinstance(base.base, np.ndarray):
                base = base.base
            found[base.__array_interface__["data"][0]] = base.nbytes
    return sum(found.values())
