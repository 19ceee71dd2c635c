"""Calls seen before: the layer as it was lowered, its arguments, and how the call was run.

Lowering a layer looks at its options, hooks and submodules and takes longer than a small product. Here the
same is found by comparing identities: everything that was looked at is still the same object.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from plait.ir import Expr
from plait.pyg.layers.base import Apply, Lowered, Numbers, bound_to_torch
from plait.runtime.identity import identity
from plait.runtime.recipe import Recipe, recipe_of
from plait.runtime.written import Unwritten

__all__ = ["EDGES_PLACE", "WEIGHT_PLACE", "Layer", "call_key", "lie_with"]

EDGES_PLACE, WEIGHT_PLACE = 5, 6  # where a call's key has the identities of edges and weights

_tokens = itertools.count()
# what a class computes; a subclass or a patch may bring its own
_MEANING = ("message", "message_and_aggregate", "aggregate", "update", "edge_update", "propagate")
_PYGS = "torch_geometric.nn.conv."
_MAKING = ("__init__", "__repr__", "reset_parameters")
_NO_NUMBERS: Numbers = "", {}
_NUMBERS = (int, float)
_MATRICES = (torch.sparse_csr, torch.sparse_coo)
_place = operator.attrgetter("is_cpu", "is_cuda", "dtype")
_is_on_cpu = operator.attrgetter("is_cpu")
_is_on_gpu = operator.attrgetter("is_cuda")
# types of options that may be edited where they are; a module's dictionaries hold hooks and parts
_EDITABLE = (list, set, bytearray)
_NOT_LOOKED_AT = ("aggr_module",)  # its class and its hooks say all, and another class is another object


class Layer:
    """A layer as it looked when it was lowered: `is_as_it_was` while nothing it consists of was replaced."""

    def __init__(self, module: nn.Module):
        self.token = next(_tokens)  # another one for every layer and every state of it
        self.lowered: dict[Any, Any] = {}  # what it computes, by what a call looks like
        self.may_be_listed = True  # on graphs seen only once; see pyg/once.py
        self.listed: dict[bool, Any] = {}  # what is known of that with and without edge weights
        self._default = torch.get_default_dtype()  # ClusterGCNConv counts neighbours in it
        # (what it was lowered to, what that gives to its expression) for features of a width and type
        self.recipes: dict[tuple[int, int, torch.dtype, str], tuple[Lowered, Recipe | None]] = {}
        self.scheduled: frozenset[str] | None = None  # options that may change; None: not lowered yet
        self.num_scheduled = 0  # how often they did
        parts = [*_parts(module)]
        self._parts = parts[1:]  # a record must not keep its layer alive
        self._types = [*map(type, parts)]
        self._read = _reader(module.__class__)
        self._meaning = self._read(module.__class__)
        inside = [vars(part) for part in self._parts]
        self._dicts = [*inside, *(d for part in parts for d in (part._parameters, part._modules))]
        self._values = [*self._inside()]
        self._own_names, self._own = [*vars(module)], [*vars(module).values()]
        everything = [*self._own, *(value for d in inside for value in d.values())]
        # hooks are kept in dictionaries that stay and fill; of the aggregation they are all that counts
        hooks = [d for part in _unread(module) for d in vars(part).values()]
        sized = [*self._dicts, *(value for value in (*everything, *hooks) if isinstance(value, dict))]
        self._empty = [d for d in sized if not d]  # most are, and to look whether any is not takes little
        self._sized = [d for d in sized if d]
        self._sizes = [*map(len, self._sized)]
        # lists stay and are edited, as MixHopConv's powers
        edited = [value for value in everything if isinstance(value, _EDITABLE)]
        self._named = [value for value in edited if _holds_names(value)]
        self._names = [*map(copy.copy, self._named)]
        self._edited = [value for value in edited if not _holds_names(value)]
        self._contents = [*map(_contents, self._edited)]
        self.parameters: list[nn.Parameter] = [*module.parameters()]
        self._plain = [value for value in everything if isinstance(value, Tensor)]
        self._buffers = [part._buffers for part in module.modules() if part._buffers]
        named = ((part._parameters, name, p) for part in parts for name, p in part._parameters.items())
        self._first = next((entry for entry in named if entry[2] is not None), None)
        looked_at = {id(d): d for d in (vars(module), *self._dicts, *sized)}
        self._unwritten = Unwritten([*looked_at.values()])
        self._vars = vars(module)

    def given(
        self, lowered: Lowered, module: nn.Module, x: Tensor
    ) -> tuple[Recipe, list[Tensor]] | EllipsisType | None:
        """What the layer gives to its expression; None: no recipe describes it, ...: it is not known yet."""
        if not lowered.is_steady or self._is_lent():
            return None
        read = _NO_NUMBERS if lowered.numbers is None else lowered.numbers(module, x)
        if read is None:
            return None
        which, numbers = read
        found = self.recipes.get((id(lowered), x.shape[1], x.dtype, which))
        if found is None or found[0] is not lowered:
            return ...
        recipe = found[1]
        return None if recipe is None else (recipe, recipe.values(x, numbers))

    def has_recipe(self, lowered: Lowered, module: nn.Module, x: Any) -> bool:
        """Whether the next call on such features can be given what this one is."""
        return type(x) is Tensor and self.given(lowered, module, x) is not None

    def others(self) -> list[Tensor]:
        """The tensors of the layer beside its parameters, as they are now.

        A network that makes the weights of another one sets them as plain attributes or buffers.
        """
        buffers = itertools.chain.from_iterable(map(dict.values, self._buffers))
        return [*self._plain, *(buffer for buffer in buffers if buffer is not None)]

    def _is_lent(self) -> bool:
        """Whether the layer has other parameters during this call, as while a CUDA graph is recorded."""
        if self._first is None:
            return False
        owner, name, parameter = self._first
        return owner.get(name) is not parameter

    def learn(self, lowered: Lowered, module: nn.Module, apply: Apply, x: Tensor) -> Tensor:
        """The layer's output; what it gave to its expression is noted for the next call."""
        calls: list[tuple[Tensor, Recipe | None]] = []
        which, numbers = (lowered.numbers and lowered.numbers(module, x)) or _NO_NUMBERS

        def noted(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            out = apply(forms, inputs)
            calls.append((out, recipe_of(forms, inputs, x, self.parameters, numbers)))
            return out

        out = lowered.run(module, noted, x, None)
        is_all = len(calls) == 1 and calls[0][0] is out
        self.recipes[id(lowered), x.shape[1], x.dtype, which] = lowered, calls[0][1] if is_all else None
        return out

    def note(self, lowered: Lowered) -> None:
        """Note what the layer was lowered to."""
        known = self.scheduled
        self.scheduled = lowered.scheduled if known is None else known & lowered.scheduled

    def _inside(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._dicts))

    def is_as_it_was(self, module: nn.Module) -> bool:
        """True while the layer, its linear maps, parameters, options and hooks are the very same objects."""
        own = vars(module)
        return (
            torch.get_default_dtype() is self._default
            and ((own is self._vars and bool(self._unwritten)) or self._holds_the_same(own))
            and self._named == self._names
            and [*map(_contents, self._edited)] == self._contents
            and [type(module), *map(type, self._parts)] == self._types
            and self._read(module.__class__) == self._meaning
        )

    def _holds_the_same(self, own: Mapping[str, Any]) -> bool:
        """Whether its dictionaries hold what they held, though somebody may have written to them."""
        now = Unwritten(self._unwritten.dicts)  # before they are looked at
        is_same = (
            len(own) == len(self._own)
            and not any(self._empty)
            and [*map(len, self._sized)] == self._sizes
            and (all(map(operator.is_, self._own, own.values())) or self._is_scheduled(own))
            and all(map(operator.is_, self._values, self._inside()))
        )
        if is_same:
            self._unwritten = now
        return is_same

    def _is_scheduled(self, own: Mapping[str, Any]) -> bool:
        """Whether only options that may change differ, one plain number from another; they are taken over."""
        if not self.scheduled or [*own] != self._own_names:
            return False
        for (name, value), before in zip(own.items(), self._own, strict=True):
            is_number = type(value) in _NUMBERS and type(before) in _NUMBERS
            if value is not before and not (is_number and name in self.scheduled):
                return False
        self._own, self.num_scheduled = [*own.values()], self.num_scheduled + 1
        return True

    def lies_with(self, x: Any) -> bool:
        """True while every parameter is on x's device and of its type: `.to` may move them in place."""
        return lie_with(self.parameters, x)


@functools.cache
def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return operator.attrgetter(*names)


def _reader(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """The methods of a class that its forward may call: those of every layer, and what PyG's class adds."""
    names = dict.fromkeys(_MEANING)
    for base in cls.__mro__:
        if base.__module__.startswith(_PYGS) and base.__name__ != "MessagePassing":
            own = (name for name, value in vars(base).items() if isinstance(value, FunctionType))
            names.update(dict.fromkeys(name for name in own if name not in _MAKING))
    return _getter(tuple(names))


def lie_with(parameters: Iterable[Tensor], x: Any) -> bool:
    """True where all of them are on the device of x, and of its type unless x are row numbers."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        is_here = _is_on_gpu if isinstance(x, Tensor) and x.is_cuda else _is_on_cpu
        return all(map(is_here, parameters))
    here = not x.is_cuda, x.is_cuda, x.dtype
    return all(place == here for place in map(_place, parameters))


def _holds_names(value: Any) -> bool:
    """Whether a container holds strings alone, as most of PyG's own do: `==` then says all."""
    return isinstance(value, list | set) and all(type(part) is str for part in value)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for name, child in module._modules.items():
        if child is not None and name not in _NOT_LOOKED_AT:
            yield from _parts(child)


def _unread(module: nn.Module) -> list[nn.Module]:
    """The modules whose class says all, but for the hooks on them."""
    found = (module._modules.get(name) for name in _NOT_LOOKED_AT)
    return [child for child in found if child is not None]


def call_key(token: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What recognises a call that may be answered as before; None for one that must be looked at closely.

    Only calls with features (or a pair of them), an edge list and perhaps edge weights, or a sparse matrix on
    a CPU are recognised. The number and type of the features count, the edges as objects: same tensor, same
    version, same memory.
    """
    if len(args) == 2 and not kwargs:
        weight = None
    elif len(args) == 2 and len(kwargs) == 1:
        weight = kwargs.get("edge_weight", kwargs)  # a key does not cover other arguments
    elif len(args) == 3 and not kwargs:
        weight = args[2]
    else:
        return None
    x, edges = args[0], args[1]
    root = None
    if type(x) is tuple and len(x) == 2:
        x, root = x
        if root is not None and not _is_plain(root):
            return None
    if type(edges) is not Tensor or not _is_plain(x):
        return None
    if edges.layout is not torch.strided and (weight is not None or not _is_plain_matrix(edges)):
        return None
    if bound_to_torch() is not None:
        return None
    if weight is not None:
        if type(weight) is not Tensor or weight.requires_grad or not _is_plain(weight):
            return None
        weight = (weight.dtype, *identity(weight))
    own = None if root is None else root.shape
    pair = type(args[0]) is tuple
    return (
        token, pair, x.shape, x.dtype, own,
        identity(edges), weight,
    )  # fmt: skip


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_cpu or value.is_cuda) and value.layout is torch.strided


def _is_plain_matrix(edges: Tensor) -> bool:
    """Whether edges are a sparse matrix whose parts have identities and whose values are not learned."""
    return edges.layout in _MATRICES and edges.is_cpu and not edges.requires_grad


def _contents(value: Any) -> Any:
    """A value that is equal as long as a container holds the same: plain values, or the very objects."""
    if isinstance(value, list | tuple):
        return (type(value), *map(_contents, value))
    if isinstance(value, dict):
        return (dict, *((key, _contents(part)) for key, part in value.items()))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(value))
    if isinstance(value, bytearray):
        return bytes(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), value
    return id(value)
