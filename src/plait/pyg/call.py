"""The arguments of a model, taken from the attributes of the user's data; wrong data is refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import torch.utils.data
from torch import Tensor, nn
from torch.fx import GraphModule
from torch_geometric.data import Batch, Data, Dataset, HeteroData
from torch_geometric.data.data import BaseData

from plait.errors import InputError
from plait.graph import Graph

__all__ = ["Call", "call_of"]

# other names for forward's parameters, and the attribute of Data they stand for
_ALIASES = {
    **dict.fromkeys(("input", "inputs", "feat", "feats", "features", "feature", "node_features", "h"), "x"),
    **dict.fromkeys(("adj", "edges", "edge", "edge_list", "ei", "graph", "g"), "edge_index"),
    **dict.fromkeys(("edge_weights", "weight", "weights", "w"), "edge_weight"),
    **dict.fromkeys(("edge_features", "edge_feats", "edge_feat", "e"), "edge_attr"),
}
_WANTED = "pass a PyG Data with x and edge_index"


@dataclass(frozen=True)
class Call:
    """A model's arguments; calling it with a model calls the model with them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_guessed: bool = False  # by position: the names are not used

    def __call__(self, model: nn.Module) -> Any:
        return model(*map(_shallow, self.args), **{k: _shallow(v) for k, v in self.kwargs.items()})

    def apart(self) -> Call:
        """The call with copies of computed tensors: a write to one enters its history for good."""
        return replace(
            self, args=tuple(map(_apart, self.args)), kwargs={k: _apart(v) for k, v in self.kwargs.items()}
        )

    @property
    def features(self) -> Tensor | None:
        """The node features: x of a Data, or the first matrix of numbers."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2:
                return value
            x = getattr(value, "x", None) if isinstance(value, Data) else None
            if isinstance(x, Tensor):
                return x
        return None

    @property
    def num_nodes(self) -> int:
        """How many rows the features have."""
        return 0 if self.features is None else int(self.features.shape[0])

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among the arguments; those of a Data too."""
        for value in (*self.args, *self.kwargs.values()):
            parts = value.to_dict().values() if isinstance(value, Data) else (value,)
            yield from (part for part in parts if isinstance(part, Tensor) and part.layout == torch.strided)


def _apart(value: Any) -> Any:
    if isinstance(value, Data):
        parts = {name: part for name, part in value.to_dict().items() if _is_computed(part)}
        made = copy.copy(value) if parts else value
        for name, part in parts.items():
            made[name] = _apart(part)
        return made
    if not _is_computed(value):
        return value
    with torch.inference_mode(False), torch.enable_grad():
        # a leaf may not be written to; nothing is saved, so that several backward passes go through it
        return value.detach().requires_grad_().clone()


def _is_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _shallow(value: Any) -> Any:
    """The same tensors in a container of its own: a model may write to what holds them (data.x = ...)."""
    return copy.copy(value) if isinstance(value, BaseData | dict | list) else value


def call_of(model: nn.Module, data: Any) -> Call | None:
    """The call of a model on data: attributes named like forward's parameters, or the data itself.

    None where the names are not found; InputError where `data` cannot be what was meant.
    """
    _check(data)
    names, keywords = _parameters(model)
    kind, by_type = type(model).__name__, isinstance(data, HeteroData) and _takes_dictionaries(model)
    found = {name: _attribute(data, name, by_type) for name in names}
    missing = [name for name, value in found.items() if value is None]
    if not missing:
        named = {name: found.pop(name) for name in keywords}
        return Call(tuple(found.values()), named)
    if len(names) == 1 and _ALIASES.get(names[0], names[0]) != "edge_index":
        return Call((data,))
    if isinstance(data, HeteroData):
        raise InputError(
            f"data: HeteroData, but {kind}.forward takes {', '.join(names)}; pass a Data for layers on one "
            "kind of node, or name the arguments x_dict and edge_index_dict (compile works without data too: "
            "the plan is then made at the first call; explain takes args=)"
        )
    if isinstance(data, Data) and data.x is None and any(_ALIASES.get(n, n) == "x" for n in missing):
        raise InputError(
            f"data: {data} has no x, which {kind}.forward takes; set data.x to the node features"
        )
    if _has_no_edges(data) and any(_ALIASES.get(n, n) == "edge_index" for n in missing):
        raise InputError(
            f"data: {data} has no edge_index, which {kind}.forward takes; set data.edge_index to the edges"
        )
    if len(names) == len(missing) == 2 and _attribute(data, "x") is not None:
        return Call((data.x, data.edge_index), is_guessed=True)
    return None


def _has_no_edges(data: Any) -> bool:
    return isinstance(data, Data) and data.edge_index is None and getattr(data, "adj_t", None) is None


def _takes_dictionaries(model: nn.Module) -> bool:
    """Whether to_hetero has been here: its modules keep the names of arguments that are now dictionaries."""
    return any(isinstance(module, GraphModule) for module in model.modules())


def _attribute(data: Any, name: str, by_type: bool = False) -> Any:
    known = _ALIASES.get(name, name)
    if by_type and not name.endswith("_dict"):
        return getattr(data, f"{known}_dict", None) or None
    value = getattr(data, name, None)
    return getattr(data, known, None) if value is None else value


def _parameters(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the arguments that forward must be given, and those of them that it takes by name only."""
    parameters = list(inspect.signature(model.__class__.forward).parameters.values())[1:]
    kinds = {p.kind for p in parameters}
    needed = [
        p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return [p.name for p in needed], [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
    # torch_geometric.nn.Sequential takes *args in the order of its description
    described = getattr(model, "signature", None)
    names = [p.name for p in described] if isinstance(described, list) else ["x", "edge_index"]
    return names, names if kinds == {inspect.Parameter.VAR_KEYWORD} else []


def _check(data: Any) -> None:
    """InputError for data that is certainly not a graph; the error says what to pass instead."""
    kind = type(data).__name__
    if data is None:
        raise InputError(f"data: missing; {_WANTED}, or args=(x, edge_index)")
    if isinstance(data, torch.utils.data.DataLoader):
        raise InputError(
            f"data: {kind} is a loader; pass one of its batches, or compile without data: the plan is then "
            "made at the first batch"
        )
    if isinstance(data, Dataset) and not isinstance(data, Data | Batch):
        raise InputError(f"data: {kind} is a dataset; pass one of its graphs, such as dataset[0]")
    if isinstance(data, str | bytes | PurePath):
        raise InputError(f"data: {data!r} is a {kind}; {_WANTED} (plait.graph.load_arrays reads npz files)")
    if isinstance(data, tuple | list):
        raise InputError(f"data: a {kind} of {len(data)}; {_WANTED}, or plait.explain(model, args=(x, ...))")
    if isinstance(data, Mapping):
        raise InputError(f"data: a {kind}; pass torch_geometric.data.Data(**data)")
    if isinstance(data, Tensor | np.ndarray | Graph | nn.Module | int | float | type):
        raise InputError(f"data: {kind}; {_WANTED}")
