"""bench/ops/inputs: drawn graphs have the law, order and types that were asked for."""

from __future__ import annotations

import torch

from plait.bench.ops.case import with_graph_sizes
from plait.bench.ops.catalogue import make_case
from plait.bench.ops.inputs import Draw, Inputs


def edges(**sizes: object) -> tuple[torch.Tensor, torch.Tensor]:
    case = make_case("spmm", edges=4000, degree=8.0, **sizes)
    return Draw(case).edges()


def degrees(**sizes: object) -> torch.Tensor:
    return torch.bincount(edges(**sizes)[1], minlength=500)


def test_the_same_case_gives_the_same_edges() -> None:
    assert all(torch.equal(a, b) for a, b in zip(edges(), edges(), strict=True))


def test_laws_differ_in_their_largest_degree() -> None:
    largest = [int(degrees(law=law).max()) for law in ("regular", "uniform", "powerlaw")]
    assert largest[0] == 8
    assert 8 < largest[1] < 40 < largest[2]
    steep, flat = (int(degrees(law="powerlaw", exponent=e).max()) for e in (2.2, 4.0))
    assert steep > flat


def test_sorted_and_clustered_edges_go_by_target_and_random_ones_do_not() -> None:
    for order in ("sorted", "clustered"):
        assert bool((edges(order=order)[1].diff() >= 0).all())
    assert not bool((edges(order="random")[1].diff() >= 0).all())


def test_clustered_sources_lie_near_their_targets() -> None:
    source, target = edges(order="clustered")
    away = (source - target).abs()
    assert int(torch.minimum(away, 500 - away).max()) <= 128


def test_square_matrices_have_their_density_and_no_repeats() -> None:
    case = make_case("spmm", nodes=200, sparsity=0.9)
    source, target = Draw(case).edges()
    assert abs(source.numel() / 200**2 - 0.1) < 0.01
    assert torch.unique(source * 200 + target).numel() == source.numel()


def test_values_hold_the_asked_share_of_zeros_and_indices_their_type() -> None:
    case = make_case("scatter_add", edges=4000, value_sparsity=0.9, index_dtype="int32")
    draw = Draw(case)
    assert abs(float((draw.normal(100, 100) == 0).float().mean()) - 0.9) < 0.02
    assert draw.edges()[1].dtype == torch.int32


def test_reduction_folds_targets() -> None:
    case = make_case("scatter_add", edges=4000, degree=8.0, reduction=4)
    assert case.rows_out == 125
    assert int(Draw(case).edges()[1].max()) < 125


def test_a_graph_file_or_generator_is_drawn_as_it_is() -> None:
    case = with_graph_sizes(make_case("spmm", graph="grid:rows=3,cols=3"), 9, 24)
    source, target = Draw(case).edges()
    assert source.numel() == target.numel() == 24


def test_csr_and_coo_are_the_same_matrix() -> None:
    case = make_case("spmm", edges=300, degree=3.0, width=4)
    source, target = Draw(case).edges()
    tensors = {"source": source, "target": target, "value": torch.rand(300), "x": torch.rand(100, 4)}
    inputs = Inputs(case, tensors, ("x",))
    dense = torch.zeros(100, 100).index_put_((target, source), tensors["value"], accumulate=True)
    assert torch.allclose(inputs.coo().to_dense(), dense)
    assert torch.allclose(inputs.csr() @ torch.eye(100), dense)


def test_matrices_for_mkl_are_sorted_and_have_every_entry_once() -> None:
    case = make_case("spspmm", edges=300, degree=30.0, order="random")
    from plait.bench.ops.catalogue import find

    inputs = Inputs(case, find("spspmm").draw(case, Draw(case)), ())
    for index_dtype in (None, torch.int32):
        matrix = inputs.csr(index_dtype)
        parts = matrix.crow_indices(), matrix.col_indices(), matrix.values()
        whole = torch.sparse_csr_tensor(*parts, matrix.shape, check_invariants=True)
        assert torch.allclose(whole.to_dense(), inputs.coo().to_dense())
    assert inputs.edges_csr().values().numel() == inputs["source"].numel() > matrix.values().numel()
