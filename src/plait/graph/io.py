"""Graphs in files: plait's own npz format and the one of the shared real graphs; never a pickle.

plait's format (FORMAT in the field `format`): `indptr`, `indices` are the CSR by destination (row v lists the
sources of v), `num_sources`, `order` where the caller's edge order was another; any further arrays by name.

The shared format (no field `format`): `indptr`, `indices` list in row u the targets v of the edges u -> v,
so the graph by destination is its transpose. In both: features `x` dense, or `x_indptr`, `x_indices`,
`x_shape` and `x_data` (left out when all ones); labels `y`; `train_mask`, `val_mask`, `test_mask`;
`graph_ptr` for a disjoint union of graphs; `meta`, a JSON object as a string.

Edges as PyG lists them, `edge_index` [2, edges], are read too, in place of `indptr` and `indices`: what
`numpy.savez("graph.npz", edge_index=..., x=..., y=...)` writes. Nodes are counted by `num_nodes`, x or y.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from plait.errors import GraphError
from plait.graph.csr import Graph, follow

__all__ = ["FORMAT", "LoadedGraph", "SparseFeatures", "load", "load_arrays", "replacing", "save"]

Array = NDArray[Any]

FORMAT = "plait-graph-1"
STRUCTURE = ("format", "indptr", "indices", "num_sources", "order")
LISTED = ("edge_index", "num_nodes")  # in place of those
MASKS = ("train", "val", "test")
# What zipfile, zlib and numpy raise on truncated, encrypted or damaged archives (RuntimeError: encrypted;
# MemoryError: a damaged header that claims more entries than there is memory for).
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ValueError,
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    MemoryError,
)


@dataclass(frozen=True, slots=True, eq=False)
class SparseFeatures:
    """Node features as CSR: row v holds values[indptr[v]:indptr[v+1]] in columns indices[...]."""

    indptr: Array
    indices: Array
    values: Array
    shape: tuple[int, int]

    def to_dense(self) -> Array:
        """[nodes, width] float32; repeated entries add up."""
        dense = np.zeros(self.shape, np.float32)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))
        np.add.at(dense, (rows, self.indices), self.values)
        return dense


@dataclass(frozen=True, slots=True, eq=False)
class LoadedGraph:
    """A graph with what its file says about nodes and edges."""

    graph: Graph
    x: Array | SparseFeatures | None = None
    """Features, float32 [nodes, width]."""
    y: Array | None = None
    """Labels: int64 [nodes] (-1: none), or [nodes, labels] as stored."""
    masks: Mapping[str, Array] = field(default_factory=dict)
    """"train", "val", "test" -> bool [nodes] or [splits, nodes], those there are."""
    graph_ptr: Array | None = None
    """Graph g of a disjoint union owns the nodes graph_ptr[g] .. graph_ptr[g + 1] - 1."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    """Everything else by name; `edge_...` arrays of one entry per edge are in the graph's CSR order."""

    def dense_x(self) -> Array | None:
        """Features as a dense float32 array, or None."""
        return self.x.to_dense() if isinstance(self.x, SparseFeatures) else self.x


def save(path: str | os.PathLike[str], graph: Graph, compress: bool = False, **arrays: Any) -> None:
    """Write `graph` and named arrays (x, y, train_mask, ...; meta as a dict) to `path`, all or nothing.

    x may be a SparseFeatures. One `edge_...` entry per edge is assumed to be in the graph's CSR order.
    """
    content: dict[str, Any] = {
        "format": np.array(FORMAT),
        "indptr": graph.indptr,
        "indices": graph.indices,
        "num_sources": np.int64(graph.num_sources),
    }
    if graph.order is not None:
        content["order"] = graph.order
    for name, value in arrays.items():
        if name in STRUCTURE:
            raise GraphError(f"save: the name {name!r} belongs to the format; store the array under another")
        content |= _encoded(name, value)
    write = np.savez_compressed if compress else np.savez
    with replacing(Path(path)) as file:  # a file, because savez adds .npz to a name
        write(file, **content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place once it is written; nothing is left where that fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Graph:
    """The graph in `path`: plait's own format, the shared one, or an edge_index."""
    content = _read(path, STRUCTURE)
    return _graph(content if "indptr" in content else _read(path, None), path)


def load_arrays(path: str | os.PathLike[str]) -> LoadedGraph:
    """The graph in `path` with its features, labels, masks and whatever else is stored."""
    content = _read(path, None)
    graph = _graph(content, path)
    try:
        return _assemble(graph, content)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise GraphError(f"{path}: its arrays do not fit together ({error}); make the file again") from error


def _encoded(name: str, value: Any) -> dict[str, Array]:
    """The arrays that store `value` under `name`."""
    if name == "meta":
        return {"meta": np.array(json.dumps(dict(value)))}
    if isinstance(value, SparseFeatures):
        parts = {"indptr": value.indptr, "indices": value.indices, "data": value.values}
        stored = {f"{name}_{part}": array for part, array in parts.items()}
        return stored | {f"{name}_shape": np.asarray(value.shape, np.int64)}
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise GraphError(f"save: {name} has dtype {array.dtype}; only plain numbers and strings are stored")
    return {name: array}


def _read(path: str | os.PathLike[str], names: tuple[str, ...] | None) -> dict[str, Array]:
    """The named arrays (all when None) of an npz file; whatever is wrong with it is a GraphError."""
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise GraphError(f"{path}: holds one array, not a graph; write it with plait.graph.save")
            return {name: archive[name] for name in archive.files if names is None or name in names}
    except FileNotFoundError:
        raise GraphError(f"{path}: no such file; check the path") from None
    except GraphError:
        raise
    except UNREADABLE as error:
        raise GraphError(
            f"{path}: not a readable npz file ({_fault(error)}); fetch or write it again"
        ) from error


def _fault(error: BaseException) -> str:
    """What is wrong with a file; numpy's own words may advise to load pickled objects, which run code."""
    text = str(error)
    return "no zip archive of plain arrays: other content, truncated or damaged" if "pickle" in text else text


def _graph(content: dict[str, Array], path: str | os.PathLike[str]) -> Graph:
    is_listed = "indptr" not in content and "edge_index" in content
    if not is_listed and ("indptr" not in content or "indices" not in content):
        raise GraphError(
            f"{path}: has no indptr and indices, and no edge_index, so no graph; write it with "
            "numpy.savez(path, edge_index=..., x=..., y=...) or plait.graph.save"
        )
    kind = str(content["format"]) if "format" in content else None
    try:
        if is_listed:
            return _listed_graph(content)
        if kind is None:
            return _shared_graph(content)
        if kind == FORMAT:
            return _own_graph(content)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
    raise GraphError(
        f"{path}: its format is {kind!r}, not {FORMAT!r}; read it with the program that wrote it "
        "(a scipy file: scipy.sparse.load_npz), then use Graph.from_any"
    )


def _own_graph(content: dict[str, Array]) -> Graph:
    sources, order = content.get("num_sources"), content.get("order")
    if sources is None or sources.shape or sources.dtype.kind not in "iu":
        raise GraphError("num_sources is not a whole number; the file is damaged, write it again")
    graph = Graph.from_csr(content["indptr"], content["indices"], int(sources))
    if graph.order is not None:
        raise GraphError("its rows are not sorted; the file is damaged, write it again")
    if order is None:
        return graph
    if order.dtype.kind != "i" or order.shape != graph.indices.shape:
        raise GraphError("order does not have one number per edge; the file is damaged, write it again")
    return graph.with_order(order)


def _shared_graph(content: dict[str, Array]) -> Graph:
    stored = Graph.from_csr(content["indptr"], content["indices"])
    if not stored.is_symmetric:
        graph = stored.transpose
        vars(graph)["transpose"] = stored
        return graph
    # The same CSR either way round, but row u of the file holds the edges out of u, ours those into u.
    return stored.with_order(lambda: follow(stored.order, stored.transpose_order))


def _listed_graph(content: dict[str, Array]) -> Graph:
    """The graph of an edge_index; its nodes are counted by num_nodes, x or y, else by the largest number."""
    count = content.get("num_nodes")
    if count is not None and (count.size != 1 or count.dtype.kind not in "iu"):
        raise GraphError("num_nodes is not a whole number; store the number of nodes, or leave it out")
    rows = content["x_shape"][:1] if "x_shape" in content else None
    sizes = [content[name].shape[0] for name in ("x", "y") if name in content and content[name].ndim]
    num_nodes = next((int(n.reshape(-1)[0]) for n in (count, rows) if n is not None and n.size), None)
    if num_nodes is None and sizes:
        num_nodes = max(sizes)
    return Graph.from_edge_index(content["edge_index"], num_nodes=num_nodes)


def _assemble(graph: Graph, content: dict[str, Array]) -> LoadedGraph:
    structure = STRUCTURE if "indptr" in content else LISTED
    rest = {name: array for name, array in content.items() if name not in structure}
    masks = {name: rest.pop(f"{name}_mask") for name in MASKS if f"{name}_mask" in rest}
    y = rest.pop("y", None)
    if y is not None and y.ndim == 1 and y.dtype.kind in "iu":
        y = y.astype(np.int64)
    x, meta = _features(rest), json.loads(str(rest.pop("meta", "{}")))
    nodes = {"x": None if x is None else x.shape[0], "y": None if y is None else y.shape[0]}
    nodes |= {f"{name}_mask": mask.shape[-1] for name, mask in masks.items()}
    for name, size in nodes.items():
        if size is not None and size != graph.num_nodes:
            raise ValueError(f"{name} has {size} rows for {graph.num_nodes} nodes")
    if "format" not in content:
        rest = {name: _by_position(name, array, graph) for name, array in rest.items()}
    return LoadedGraph(graph, x, y, masks, rest.pop("graph_ptr", None), meta, rest)


def _features(rest: dict[str, Array]) -> Array | SparseFeatures | None:
    """Takes the arrays of x out of `rest`."""
    if "x_indptr" not in rest:
        dense = rest.pop("x", None)
        return None if dense is None else dense.astype(np.float32)
    indptr, indices = rest.pop("x_indptr"), rest.pop("x_indices").astype(np.int32)
    rows, columns = (int(size) for size in rest.pop("x_shape"))
    values = rest.pop("x_data", np.ones(indices.size, np.float32)).astype(np.float32)
    ends_fit = indptr.size == rows + 1 and indptr[0] == 0 and indptr[-1] == indices.size == values.size
    if not ends_fit or (np.diff(indptr.astype(np.int64)) < 0).any():
        raise ValueError("x_indptr, x_indices, x_data and x_shape disagree")
    if indices.size and not 0 <= indices.min() <= indices.max() < columns:
        raise ValueError(f"x_indices leave the {columns} columns of x_shape")
    return SparseFeatures(indptr.astype(np.int64), indices, values, (rows, columns))


def _by_position(name: str, array: Array, graph: Graph) -> Array:
    """An edge array of the shared format in CSR order; other arrays as they are."""
    if not name.startswith("edge_") or array.shape[:1] != (graph.num_edges,):
        return array
    return array if graph.order is None else array[graph.order]
