"""Attention on a GPU against the reference: on one where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import InputError
from plait.graph import Graph, generate
from plait.kernels.attention import Dropout, Scores, reference
from tests.graph.hag.graphs import graph_of
from tests.kernels.interpreted import GRAPHS, skip_if_walked_alike

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.attention import gpu
from plait.kernels.csr.gpu import Rows, transposed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("gat", "leaky", "dot")
TINY = gpu.AttentionTiles(short=2, most=3, slots=2, lanes=4, warps=1)
"""Rows of three edges and more go in pieces of three: everything that is split or merged runs."""
SMALL = graph_of([[0, 1, 1, 2, 3, 4, 5], [], [2, 5], [0, 1, 2], [4]], 6)


def drawn(dropout: Dropout, num_edges: int, heads: int) -> np.ndarray[Any, Any]:
    """The factors of the dropout, by the definition in kernels/attention/softmax.py."""
    lanes = 1 << (heads - 1).bit_length()
    word = (1 << 32) - 1

    def mixed(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & word
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & word
        return h ^ (h >> 16)

    factors = np.zeros((num_edges, heads))
    for e in range(num_edges):
        for h in range(heads):
            counter = ((e * lanes + h) & word) ^ (dropout.seed & word)
            high = (dropout.seed >> 32) + ((e * lanes) >> 32) * 0x9E3779B9
            draw = mixed((mixed(counter) + high) & word)
            factors[e, h] = dropout.scale if draw < dropout.threshold else 0.0
    return factors


def inputs(graph: Graph, kind: str, heads: int, columns: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    width = (heads,) if kind == "gat" else (heads, columns)
    made = {
        "near": rng.standard_normal((graph.num_nodes, *width)),
        "far": rng.standard_normal((graph.num_sources, *width)),
        "value": rng.standard_normal((graph.num_sources, heads, columns)),
        "grad": rng.standard_normal((graph.num_nodes, heads, columns)),
        "att": rng.standard_normal((heads, columns)),
    }
    if kind == "leaky":
        made["value"] = made["far"]
    return made


def assert_equal(
    graph: Graph,
    kind: str,
    heads: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float64,
    edge: bool = False,
    dropout: Dropout | None = None,
    is_kept: bool = False,
    has_bias: bool = False,
    tiles: gpu.AttentionTiles | None = TINY,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> None:
    """Outputs and gradients are the reference's, whatever was in the outputs before."""
    arrays = inputs(graph, kind, heads, columns, seed)
    edges = np.random.default_rng(9).standard_normal((graph.num_edges, heads)) if edge else None
    factor = None if dropout is None else drawn(dropout, graph.num_edges, heads)
    options = {"edge": edges, "att": arrays["att"], "factor": factor}
    csr = (graph.indptr, graph.indices)
    names = [arrays[n] for n in ("near", "far", "value")]
    expected, _ = reference.attend(*csr, kind, *names, **options)
    wanted = reference.attend_backward(*csr, kind, *names, arrays["grad"], **options)
    if kind == "leaky":
        wanted["value"] = wanted["value"] + wanted["far"]

    def place(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.reshape(len(array), int(np.prod(array.shape[1:])))).to(DEVICE, dtype)

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=of, device=DEVICE)

    rows = Rows(*(torch.from_numpy(a).to(DEVICE) for a in csr), graph.num_sources)
    value = place(arrays["value"])
    scores = Scores(
        kind, place(arrays["far"]), place(arrays["near"]), None if edges is None else place(edges),
        place(arrays["att"]).flatten(), dropout=dropout,
    )  # fmt: skip
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    out, statistics = empty(graph.num_nodes, heads * columns), empty(graph.num_nodes, 2, heads, of=sums)
    added = np.random.default_rng(5).standard_normal((1, heads, columns)) if has_bias else None
    bias = None if added is None else place(added).flatten()
    gpu.attend(rows, scores, value, out, statistics, heads, tiles=tiles, bias=bias)
    got = {"near": empty(*scores.near.shape), "value": empty(*value.shape)}  # type: ignore[union-attr]
    got["far"] = empty(*scores.far.shape)
    kept = empty(graph.num_edges, 2, heads, of=sums) if is_kept else None
    got["edge"] = empty(graph.num_edges, heads)
    grad = place(arrays["grad"])
    att = gpu.attend_targets(
        rows, scores, value, out, grad, statistics, got["near"], heads,
        bias=bias, edge_grad=got["edge"] if edge else None, kept=kept, tiles=tiles,
    )  # fmt: skip
    turned = transposed(rows)
    other = gpu.attend_sources(
        turned, turned.order, scores, value, grad, statistics, got["value"],
        None if kind == "leaky" else got["far"], heads, kept=kept, tiles=tiles,
    )  # fmt: skip
    checks = {"near", "value"} | ({"far"} if kind != "leaky" else {"att"}) | ({"edge"} if edge else set())
    if kind == "leaky":
        assert att is not None
        assert other is not None
        got["att"] = att + other
    got["out"], wanted["out"] = out, expected if added is None else expected + added
    for name in sorted(checks | {"out"}):
        want = wanted[name].reshape(got[name].shape)
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(
            got[name].double().cpu().numpy(), want, atol=tolerance * scale, rtol=0, err_msg=name
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_odd_graphs_equal_the_reference(name: str, kind: str) -> None:
    skip_if_walked_alike(name, kind == "leaky")
    assert_equal(GRAPHS[name], kind, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "columns"), [(1, 1), (3, 5), (4, 8), (1, 17), (8, 4)])
def test_every_shape_equals_the_reference(kind: str, heads: int, columns: int) -> None:
    if kind != "leaky" and heads < 3 and not torch.cuda.is_available():
        pytest.skip("one head is read alike for all kinds, and the interpreter is slow")
    assert_equal(SMALL, kind, heads, columns)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_kept_weights_equal_the_reference(kind: str, is_kept: bool) -> None:
    dropout = Dropout(seed=(7 << 32) + 12345, probability=0.4)
    assert_equal(SMALL, kind, 3, 4, dropout=dropout, is_kept=is_kept)
    if is_kept:  # without either it is a shape of the test above
        assert_equal(SMALL, kind, 2, 4, is_kept=is_kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added_to_every_row_and_is_no_part_of_the_gradients(kind: str) -> None:
    assert_equal(SMALL, kind, 3, 5, has_bias=True)


@pytest.mark.parametrize("is_kept", [False, True])
def test_edge_scores_of_gat_equal_the_reference(is_kept: bool) -> None:
    assert_equal(SMALL, "gat", 2, 3, edge=True, is_kept=is_kept)


@pytest.mark.parametrize("kind", KINDS)
def test_default_tiles_and_a_hub_equal_the_reference(kind: str) -> None:
    assert_equal(graph_of([list(range(1, 70)), [0]], 70), kind, 1, 4, tiles=None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_smaller_floats_equal_the_reference_within_their_precision(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    assert_equal(SMALL, kind, 2, 4, dtype=dtype, tolerance=tolerance)


def test_scores_far_from_zero_do_not_overflow() -> None:
    graph = generate.cliques(1, 6)
    x = torch.full((6, 4), 300.0, device=DEVICE)
    rows = Rows(*(torch.from_numpy(a).to(DEVICE) for a in (graph.indptr, graph.indices)), 6)
    out = torch.full_like(x, float("nan"))
    scores = Scores("dot", x, x)
    gpu.attend(rows, scores, x, out, gpu.statistics_of(rows, x, 1), 1, tiles=TINY)
    assert torch.equal(out, x)


def test_what_has_no_kernel_is_refused_with_the_next_step() -> None:
    rows = Rows(torch.tensor([0, 1]), torch.tensor([0]), 1)
    x = torch.ones((1, 4), device=DEVICE)
    with pytest.raises(InputError, match="known are gat"):
        gpu.attend(rows, Scores("cosine", x, x), x, x, x, 1)
    with pytest.raises(InputError, match="expand"):
        gpu.attend(rows, Scores("dot", x, x, is_shared=True), x, x, x, 1)
    with pytest.raises(InputError, match="multiple of heads"):
        gpu.attend(rows, Scores("dot", x, x), x, x, x, 3)
    with pytest.raises(InputError, match="order"):
        gpu.attend_sources(rows, None, Scores("dot", x, x), x, x, x, x, x, 1, kept=x)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("kind", ["leaky", "dot"])
def test_rows_of_edges_equal_autograd(kind: str, is_kept: bool) -> None:
    """Edge features: rows added to far, for dot to value too, as GATv2 and Transformer layers do."""
    heads, columns, graph = 2, 3, SMALL
    drawn_by = torch.Generator().manual_seed(3)
    shapes = {
        "near": (graph.num_nodes, heads * columns), "far": (graph.num_sources, heads * columns),
        "value": (graph.num_sources, heads * columns), "edge": (graph.num_edges, heads * columns),
        "att": (heads * columns,),
    }  # fmt: skip
    leaf = {
        n: torch.randn(s, dtype=torch.float64, generator=drawn_by).requires_grad_() for n, s in shapes.items()
    }
    if kind == "leaky":
        leaf["value"] = leaf["far"]
    source = torch.from_numpy(graph.indices).long()
    target = torch.repeat_interleave(torch.from_numpy(np.diff(graph.indptr)).long())
    far = leaf["far"][source] + leaf["edge"]
    message = leaf["value"][source] + (leaf["edge"] if kind == "dot" else 0.0)
    near = leaf["near"][target]
    bent = torch.nn.functional.leaky_relu(near + far, 0.2) * leaf["att"] if kind == "leaky" else near * far
    power = bent.view(-1, heads, columns).sum(2).exp()
    sums = torch.zeros(graph.num_nodes, heads, dtype=torch.float64).index_add(0, target, power)
    weighted = (power / sums[target])[:, :, None] * message.view(-1, heads, columns)
    zeros = torch.zeros(graph.num_nodes, heads, columns, dtype=torch.float64)
    expected = zeros.index_add(0, target, weighted).flatten(1)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=drawn_by)
    expected.backward(grad)

    on = {n: t.detach().to(DEVICE) for n, t in leaf.items()}
    rows = Rows(*(torch.from_numpy(a).to(DEVICE) for a in (graph.indptr, graph.indices)), graph.num_sources)
    turned = transposed(rows)
    scores = Scores(kind, on["far"], on["near"], on["edge"], on["att"])
    got = {n: torch.full_like(t, float("nan")) for n, t in on.items()}
    out, statistics = torch.full_like(on["near"], float("nan")), gpu.statistics_of(rows, on["value"], heads)
    kept = torch.empty((graph.num_edges, 2, heads), dtype=torch.float64, device=DEVICE) if is_kept else None
    gpu.attend(rows, scores, on["value"], out, statistics, heads, tiles=TINY)
    first = gpu.attend_targets(
        rows, scores, on["value"], out, grad.to(DEVICE), statistics, got["near"], heads,
        edge_grad=got["edge"], kept=kept, tiles=TINY,
    )  # fmt: skip
    second = gpu.attend_sources(
        turned, turned.order, scores, on["value"], grad.to(DEVICE), statistics, got["value"],
        got["far"] if kind == "dot" else None, heads, kept=kept, tiles=TINY,
    )  # fmt: skip
    names = {"near", "value", "edge"} | ({"far"} if kind == "dot" else {"att"})
    if first is not None and second is not None:
        got["att"] = first + second
    torch.testing.assert_close(out.cpu(), expected.detach(), atol=1e-10, rtol=0)
    for name in sorted(names):
        torch.testing.assert_close(got[name].cpu(), leaf[name].grad, atol=1e-10, rtol=0, msg=name)
