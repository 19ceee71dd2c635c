"""Runs of PyG that round otherwise: as far from the exact answer as PyG is, with ties and zeros kept."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.rounding import Reference, rounded
from tests.fuzz.worlds import UNTOUCHED, execute, seen, world_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCRIPT = """
model = Chain(GCNConv(4, 4), F.relu, GCNConv(-1, 4))
edge_index, edge_weight, edge_attr, edge_type = graph('cliques', 7, seed=0)
x = features(7, 4, seed=0)
model = model.half(); x = x.half()
original = model; model = plait.compile(model)
layer(model).reset_parameters()
out = trained(model, x, edge_index)
"""


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_at_most_one_rounding_off_and_equal_ones_alike(dtype: torch.dtype) -> None:
    value = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    found = rounded(value, 3)
    off = ((found.double() - value.double()) / value.double()).abs()
    assert 0.0 < off.max() <= 2 * torch.finfo(dtype).eps
    assert torch.equal(rounded(torch.cat([value, -2 * value]), 3), torch.cat([found, -2 * found]))
    assert not torch.equal(rounded(value, 4), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_degrees_and_infinities_stay(dtype: torch.dtype) -> None:
    value = torch.tensor([0.0, 1.0, 7.0, 0.125, -0.375, float("inf"), float("nan")], dtype=dtype)
    assert torch.equal(rounded(value, 1).nan_to_num(), value.nan_to_num())


def test_the_distance_of_pyg_from_the_exact_answer_is_that_of_its_type() -> None:
    lines = SCRIPT.strip().splitlines()
    own, reference = world_of(UNTOUCHED), Reference(lines)
    for number, line in enumerate(lines):
        assert not execute(line, number, own)
    known = reference.known(len(lines) - 1, seen(own))
    for name in (
        "out 0",
        "out 3",
        "state parts.0.lin.weight",
    ):  # lazy layers and resets draw the same numbers
        assert 0.0 < known.apart[name] < 0.1 * known.exact[name].abs().max()
    assert not known.overflows
    assert not known.meets_nan
