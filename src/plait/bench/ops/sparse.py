"""Sparse matrices times dense and sparse ones, dot products per edge, and the softmax over edges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.bench.ops import own
from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.ops.operation import FORWARD, GRAPH, Operation, Unsupported, Variant, Work

__all__ = ["DENSE_LIMIT", "OPERATIONS"]

# A dense adjacency beyond this many nodes takes more than 256 MB of float32; a square of one beyond the
# other takes minutes on two cores.
DENSE_LIMIT = 8192
_GATHER_LIMIT = 2e8
_SQUARE_LIMIT = {"cpu": 2048, "cuda": DENSE_LIMIT}
_TAKES: Mapping[str, Any] = {**GRAPH, "sparsity": None, "value_sparsity": None}


# Sums, means and maxima over neighbours ----------------------------------------------------------------


def _weighted(case: Case, draw: Draw) -> dict[str, Tensor]:
    source, target = draw.edges()
    x = draw.normal(case.size("nodes"), case.size("width"))
    ones = torch.ones(source.numel(), dtype=x.dtype, device=x.device)
    value = draw.normal(source.numel()) if case.op == "spmm" else ones
    return {"source": source, "target": target, "x": x, "value": value}


def _matrix(case: Case, draw: Draw) -> dict[str, Tensor]:
    source, target = draw.edges()
    return {"source": source, "target": target, "value": draw.normal(source.numel())}


def _work(case: Case) -> Work:
    edges, nodes, width = case.size("edges"), case.size("nodes"), case.size("width")
    row, is_weighted = width * case.float_bytes, case.op == "spmm"
    per_edge = case.index_bytes + (case.float_bytes if is_weighted else 0)
    fixed = edges * per_edge + (nodes + 1) * case.index_bytes + nodes * row
    flops = float((2 if is_weighted else 1) * edges * width)
    return Work(flops, fixed + float(min(nodes, edges) * row), fixed + float(edges * row))


def _gathered(inputs: Inputs) -> Tensor:
    rows = inputs["x"].index_select(0, inputs["source"])
    return rows * inputs["value"].unsqueeze(1) if inputs.case.op == "spmm" else rows


def _gather_scatter(inputs: Inputs, reduce: str) -> Tensor:
    """Message passing in two steps: every edge's row in memory, then reduced at the targets."""
    x, target = inputs["x"], inputs["target"]
    out = torch.zeros((inputs.case.rows_out, x.shape[1]), dtype=x.dtype, device=x.device)
    rows = _gathered(inputs)
    if reduce == "sum":
        return out.index_add_(0, target, rows)
    index = target.long().unsqueeze(1).expand_as(rows)
    return out.scatter_reduce_(0, index, rows, {"mean": "mean", "max": "amax"}[reduce], include_self=False)


def _two_steps(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    elements = inputs["source"].numel() * inputs["x"].shape[1]
    if inputs.case.device == "cpu" and elements > _GATHER_LIMIT:
        raise Unsupported(f"{elements:.1e} gathered values take seconds a call (most: {_GATHER_LIMIT:.0e})")
    return lambda: _gather_scatter(inputs, reduce)


def _expected(inputs: Inputs, reduce: str) -> Tensor:
    """The two steps in float64; of a square matrix that is well filled, the dense product instead."""
    if reduce == "sum" and inputs.case.sparsity is not None and inputs.case.size("nodes") <= DENSE_LIMIT:
        return inputs.coo().to_dense() @ inputs["x"]
    return _gather_scatter(inputs, reduce)


def _pyg_scatter(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    from torch_geometric.utils import scatter

    rows, target = inputs.case.rows_out, inputs["target"]
    return lambda: scatter(_gathered(inputs), target, dim=0, dim_size=rows, reduce=reduce)


def _coo(inputs: Inputs) -> Callable[[], Tensor]:
    matrix, x = inputs.coo(), inputs["x"]
    return lambda: torch.sparse.mm(matrix, x)


def _csr(inputs: Inputs, index_dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    matrix, x = inputs.csr(index_dtype), inputs["x"]
    return lambda: torch.mm(matrix, x)


def _sparse_reduce(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    matrix, x = inputs.edges_csr(), inputs["x"]
    name = {"sum": "sum", "mean": "mean", "max": "amax"}[reduce]
    return lambda: torch.sparse.mm(matrix, x, name)


def _pyg_spmm(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    from torch_geometric.utils import spmm

    # a mean counts edges, so those that repeat stay; torch's own kernels compute it, sums go to MKL
    matrix, x = inputs.csr() if reduce == "sum" else inputs.edges_csr(), inputs["x"]
    return lambda: spmm(matrix, x, reduce=reduce)


def _pyg_edge_index(inputs: Inputs) -> Callable[[], Tensor]:
    from torch_geometric import EdgeIndex

    def make() -> Any:
        ends = torch.stack([inputs["target"], inputs["source"]])[:, inputs.by_target[0]]
        size = (inputs.case.rows_out, inputs.case.size("nodes"))
        return EdgeIndex(ends, sparse_size=size, sort_order="row").fill_cache_()

    edges, x = inputs.once("EdgeIndex", make), inputs["x"]
    weight = inputs["value"].detach()[inputs.by_target[0]] if inputs.case.op == "spmm" else None
    return lambda: edges.matmul(x, weight)


def _dgl_graph(inputs: Inputs) -> Any:
    import dgl

    def make() -> Any:
        ends = (inputs["source"].int(), inputs["target"].int())
        graph = dgl.graph(ends, num_nodes=inputs.case.size("nodes"))
        graph.create_formats_()
        return graph

    return inputs.once("dgl", make)


def _dgl(inputs: Inputs, reduce: str) -> Callable[[], Tensor]:
    from dgl import ops

    graph, x = _dgl_graph(inputs), inputs["x"]
    if inputs.case.op == "spmm":
        weight = inputs["value"].detach().unsqueeze(1)
        return lambda: ops.u_mul_e_sum(graph, x, weight)
    if reduce == "max" and bool((inputs.by_target[1].diff() == 0).any()):
        raise Unsupported("DGL's operator gives -inf to nodes without edges, PyG 0")
    call = getattr(ops, f"copy_u_{reduce}")
    return lambda: call(graph, x)


def _dense(inputs: Inputs) -> Callable[[], Tensor]:
    nodes, x = inputs.case.size("nodes"), inputs["x"]
    if nodes > DENSE_LIMIT:
        raise Unsupported(f"a dense adjacency of {nodes} nodes is not tried (most: {DENSE_LIMIT})")
    matrix = inputs.once("dense", lambda: inputs.coo().to_dense())
    return lambda: torch.mm(matrix, x)


def _own(reduce: str, is_weighted: bool = False) -> Variant:
    make = functools.partial(own.product, reduce=reduce, is_weighted=is_weighted)
    return Variant("plait", make, devices=("cpu",), why=own.WHY_CPU)


def _reduce_path(reduce: str) -> Variant:
    make = functools.partial(_sparse_reduce, reduce=reduce)
    return Variant("torch-reduce", make, devices=("cpu",), why="torch.sparse.mm with reduce runs on the CPU")


def _reduced(name: str, reduce: str, about: str, *more: Variant) -> Operation:
    return Operation(
        name=name,
        family="sparse",
        about=about,
        takes=_TAKES,
        draw=_weighted,
        variants=(
            Variant("gather-scatter", functools.partial(_two_steps, reduce=reduce)),
            *more,
            _reduce_path(reduce),
            Variant("pyg", functools.partial(_pyg_spmm, reduce=reduce), needs="torch_geometric"),
            Variant("dgl", functools.partial(_dgl, reduce=reduce), needs="dgl"),
            _own(reduce, is_weighted=name == "spmm"),
        ),
        work=_work,
        reference=functools.partial(_expected, reduce=reduce),
        leaves=("x",),
        has_sparse_path=True,
    )


_TORCH_FORMATS = (
    Variant("torch-coo", _coo),
    Variant("torch-csr", _csr),
    Variant("torch-csr32", functools.partial(_csr, index_dtype=torch.int32)),
)

# Sparse times sparse, and what lives on edges ----------------------------------------------------------


def _spspmm_work(case: Case) -> Work:
    edges, nodes = case.size("edges"), case.size("nodes")
    products = edges * (edges / nodes)  # of uniform graphs; hubs make more
    entry = case.index_bytes + case.float_bytes
    written = min(products, float(nodes) * nodes) * entry
    return Work(2.0 * products, 2.0 * edges * entry + written, products * entry + written)


def _two_products(out: Any, inputs: Inputs) -> tuple[Tensor, ...]:
    """A sparse matrix by what it does to fixed vectors from either side: small where the matrix is not."""
    if not isinstance(out, Tensor):  # scipy's
        entries = out.tocoo()
        ends = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
        out = torch.sparse_coo_tensor(ends, torch.from_numpy(entries.data), entries.shape)
    nodes = inputs.case.size("nodes")
    probe = torch.linspace(-1.0, 1.0, nodes, dtype=torch.float64, device=out.device).unsqueeze(1)
    if out.layout == torch.strided:
        wide = out.detach().double()
        return wide @ probe, wide.t() @ probe
    wide = (out.to_sparse_coo() if out.layout != torch.sparse_coo else out).detach().coalesce().double()
    return torch.sparse.mm(wide, probe), torch.sparse.mm(wide.t(), probe)


def _square(inputs: Inputs, layout: str) -> Callable[[], Tensor]:
    if layout == "dense":
        nodes, most = inputs.case.size("nodes"), _SQUARE_LIMIT[inputs.case.device]
        if nodes > most:
            raise Unsupported(f"the square of a dense adjacency of {nodes} nodes is not tried (most: {most})")
        matrix = inputs.once("dense", lambda: inputs.coo().to_dense())
    else:
        matrix = inputs.coo() if layout == "coo" else inputs.csr()
    return lambda: matrix @ matrix


def _scipy_square(inputs: Inputs) -> Callable[[], Any]:
    import scipy.sparse

    order, pointer = inputs.by_target
    parts = (inputs["value"][order], inputs["source"][order].int(), pointer.int())
    nodes = inputs.case.size("nodes")
    matrix = scipy.sparse.csr_matrix(tuple(part.numpy() for part in parts), shape=(nodes, nodes))
    matrix.sum_duplicates()
    return lambda: matrix @ matrix


def _pairs(case: Case, draw: Draw) -> dict[str, Tensor]:
    source, target = draw.edges()
    nodes, width = case.size("nodes"), case.size("width")
    value = torch.zeros(source.numel(), dtype=draw.dtype, device=draw.device)
    return {
        "source": source,
        "target": target,
        "x": draw.normal(nodes, width),
        "y": draw.normal(nodes, width),
        "value": value,
    }


def _pair_work(case: Case) -> Work:
    edges, nodes, row = case.size("edges"), case.size("nodes"), case.size("width") * case.float_bytes
    fixed = float(edges * (2 * case.index_bytes + case.float_bytes))
    return Work(2.0 * edges * case.size("width"), fixed + 2.0 * nodes * row, fixed + 2.0 * edges * row)


def _dots(inputs: Inputs) -> Tensor:
    """y[target] . x[source] for every edge, edges in the order of their targets."""
    order = inputs.by_target[0]
    source, target = inputs["source"][order], inputs["target"][order]
    return (inputs["y"].index_select(0, target) * inputs["x"].index_select(0, source)).sum(1)


def _sampled(inputs: Inputs) -> Callable[[], Tensor]:
    matrix, x, y = inputs.edges_csr(), inputs["x"], inputs["y"]
    other = x.t()
    return lambda: torch.sparse.sampled_addmm(matrix, y, other).values()


def _dgl_dots(inputs: Inputs) -> Callable[[], Tensor]:
    from dgl import ops

    graph, x, y = _dgl_graph(inputs), inputs["x"], inputs["y"]
    if inputs.case.order == "random":
        raise Unsupported("DGL returns dots in the order of its edges, which is not the sorted one here")
    return lambda: ops.u_dot_v(graph, x, y).squeeze(1)


def _logits(case: Case, draw: Draw) -> dict[str, Tensor]:
    source, target = draw.edges()
    return {"source": source, "target": target, "logit": draw.normal(source.numel(), case.size("heads"))}


def _softmax_work(case: Case) -> Work:
    edges, nodes, row = case.size("edges"), case.size("nodes"), case.size("heads") * case.float_bytes
    # read, write, and in three passes: maximum, sum, quotient
    least = float(edges * (2 * row + case.index_bytes))
    return Work(
        4.0 * edges * case.size("heads"), least, edges * (8.0 * row + 2 * case.index_bytes) + nodes * row
    )


def _softmax(inputs: Inputs) -> Tensor:
    """exp(l - max) / sum of the same over the edges of a target."""
    logit, target = inputs["logit"], inputs["target"]
    index = target.long().unsqueeze(1).expand_as(logit)
    shape = (inputs.case.size("nodes"), logit.shape[1])
    blank = torch.zeros(shape, dtype=logit.dtype, device=logit.device)
    largest = blank.clone().scatter_reduce_(0, index, logit.detach(), "amax", include_self=False)
    power = (logit - largest.index_select(0, target)).exp()
    total = blank.index_add_(0, target, power)
    return power / total.index_select(0, target)


def _pyg_softmax(inputs: Inputs) -> Callable[[], Tensor]:
    from torch_geometric.utils import softmax

    logit, target, nodes = inputs["logit"], inputs["target"], inputs.case.size("nodes")
    return lambda: softmax(logit, target, num_nodes=nodes)


def _dgl_softmax(inputs: Inputs) -> Callable[[], Tensor]:
    from dgl import ops

    graph, logit = _dgl_graph(inputs), inputs["logit"]
    return lambda: ops.edge_softmax(graph, logit.unsqueeze(2)).squeeze(2)


OPERATIONS = (
    _reduced(
        "spmm", "sum", "weighted sums of neighbours' rows: A @ x", *_TORCH_FORMATS, Variant("dense", _dense)
    ),
    _reduced(
        "gather_scatter",
        "sum",
        "unweighted sums: gather and scatter against one product",
        Variant("pyg-scatter", functools.partial(_pyg_scatter, reduce="sum"), needs="torch_geometric"),
        Variant("torch-csr", _csr),
        Variant("pyg-edgeindex", _pyg_edge_index, needs="torch_geometric"),
    ),
    _reduced("spmm_mean", "mean", "means of neighbours' rows"),
    _reduced("spmm_max", "max", "maxima of neighbours' rows"),
    Operation(
        name="spspmm",
        family="sparse",
        about="A @ A, both sparse",
        takes={k: v for k, v in _TAKES.items() if k != "width"} | {"edges": 50_000, "degree": 8.0},
        draw=_matrix,
        variants=(
            Variant("torch-csr", functools.partial(_square, layout="csr"), directions=FORWARD),
            Variant("torch-coo", functools.partial(_square, layout="coo"), directions=FORWARD),
            Variant("dense", functools.partial(_square, layout="dense"), directions=FORWARD),
            Variant("scipy", _scipy_square, needs="scipy", devices=("cpu",), directions=FORWARD),
        ),
        work=_spspmm_work,
        reference=lambda inputs: inputs.coo() @ inputs.coo(),
        answer=_two_products,
        has_sparse_path=True,
    ),
    Operation(
        name="sddmm",
        family="sparse",
        about="one dot product of two rows per edge (sampled_addmm)",
        takes={k: v for k, v in _TAKES.items() if k != "sparsity"},
        draw=_pairs,
        variants=(
            Variant("gather", lambda inputs: lambda: _dots(inputs)),
            Variant("torch-csr", _sampled, directions=FORWARD, why="CSR values have no gradient here"),
            Variant("dgl", _dgl_dots, needs="dgl"),
            own.forward_variant(own.sddmm),
        ),
        work=_pair_work,
        reference=_dots,
        leaves=("x", "y"),
        has_sparse_path=True,
    ),
    Operation(
        name="edge_softmax",
        family="sparse",
        about="the softmax of logits over every target's edges",
        takes={k: v for k, v in GRAPH.items() if k != "width"} | {"heads": 8},
        draw=_logits,
        variants=(
            Variant("torch", lambda inputs: lambda: _softmax(inputs)),
            Variant("pyg", _pyg_softmax, needs="torch_geometric"),
            Variant("dgl", _dgl_softmax, needs="dgl"),
        ),
        work=_softmax_work,
        reference=_softmax,
        leaves=("logit",),
        has_sparse_path=False,
    ),
)
