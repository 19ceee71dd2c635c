"""A chain equals its products one after the other, whatever the widths, the graph and the threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.graph import Graph, generate
from plait.kernels import chain as kernel
from plait.kernels.chain import reference
from plait.kernels.spmm import Pattern
from plait.kernels.spmm import reference as sparse


def take(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, cols), float("nan"), dtype=dtype)


def graphs() -> dict[str, Graph]:
    star = Graph.from_edge_index(np.arange(1, 400), np.zeros(399, np.int64), 400)
    return {
        "rmat": generate.rmat(8, 1500, 1),
        "hub": star,
        "no edges": Graph.from_edge_index(np.zeros(0, np.int64), np.zeros(0, np.int64), 5),
        "no nodes": Graph.from_edge_index(np.zeros(0, np.int64), np.zeros(0, np.int64), 0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inner", "width"), [(1, 1), (7, 33), (64, 64), (130, 5), (16, 200)])
@pytest.mark.parametrize("name", list(graphs()))
def test_a_chain_equals_its_products_in_turn(name: str, inner: int, width: int, dtype: torch.dtype) -> None:
    graph = graphs()[name]
    pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
    n = graph.num_nodes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    x, w, v, beside, grad = draw(n, inner), draw(inner, width), draw(9, width), draw(n, 9), draw(n, width)
    source, target, bias, plus = draw(n), draw(n), draw(width), draw(n, width)
    block = sparse.spmm(
        pattern.indptr, pattern.indices, x.numpy(), source=source.numpy(), target=target.numpy(),
        addend=x.numpy(), addend_scale=source.numpy(),
    )  # fmt: skip
    for kept in (None, torch.full((n, inner), float("nan"), dtype=dtype)):
        gathered = kernel.Gathered(pattern, inner, source=source, target=target, is_kept=kept is not None)
        out = torch.full((n, width), float("nan"), dtype=dtype)
        sides = [(None, width), (width, None), (1, width)]
        chain = kernel.Chain(n, dtype, gathered, [9, None], width, sides)
        made = chain.run(
            take, [beside, None], [v, w], [(None, grad), (grad, None), (kernel.ones(n, dtype), grad)],
            x=x, addend=x, addend_scale=source, kept=kept, out=out, plus=plus, bias=bias,
        )  # fmt: skip
        ones = np.ones((n, 1), grad.numpy().dtype)
        wanted, sums = reference.chain(
            block, [(beside.numpy(), v.numpy()), (None, w.numpy())],
            [(None, grad.numpy()), (grad.numpy(), None), (ones, grad.numpy())], plus.numpy(), bias.numpy(),
        )  # fmt: skip
        assert wanted is not None
        close(out, wanted)
        for value, expected in zip(made, sums, strict=True):
            close(value, expected)
        if kept is not None:
            close(kept, block)


def test_rows_need_no_graph() -> None:
    x, grad, w = torch.randn(300, 12), torch.randn(300, 40), torch.randn(40, 12)
    out = torch.empty(300, 12)
    chain = kernel.Chain(300, x.dtype, None, [40], 12, [(12, 40)])
    (made,) = chain.run(take, [grad], [w], [(x, grad)], out=out)
    close(out, (grad @ w).numpy())
    close(made, (x.t() @ grad).numpy())


def test_threads_do_not_change_a_bit() -> None:
    graph = generate.rmat(12, 32000, 2)
    pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
    x, w, left = torch.randn(4096, 48), torch.randn(48, 24), torch.randn(4096, 20)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty(4096, 24)
        chain = kernel.Chain(4096, x.dtype, kernel.Gathered(pattern, 48), [None], 24, [(20, None)])
        made = chain.run(take, [None], [w], [(left, None)], x=x, out=out)
        results.append((out, made[0]))
    torch.set_num_threads(before)
    for out, made in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(made, results[0][1])


def close(value: torch.Tensor, expected: np.ndarray) -> None:
    tolerance = 2e-5 if value.dtype == torch.float32 else 1e-11
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    assert value.shape == expected.shape
    assert float(np.abs(value.numpy() - expected).max(initial=0.0)) <= tolerance * scale
