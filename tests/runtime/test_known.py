"""Layers whose messages have a form against PyG; which of them a kernel makes, and which run in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import CGConv, FiLMConv, GENConv

from plait.kernels import messages as kernels
from plait.runtime import known
from tests.parity.harness import agree
from tests.parity.test_attention import WIDTH, N, drawn, edges, features

DRAWN, DIM = 600, 3
EDGES = edges(count=DRAWN).shape[1]  # without loops


def attr(width: int) -> torch.Tensor:
    return torch.randn(EDGES, width, generator=torch.Generator().manual_seed(3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], bool]] = {
    "film": (lambda: FiLMConv(WIDTH, 7), (), True),
    "film by relation": (lambda: FiLMConv(WIDTH, 7, 3), (torch.arange(EDGES) % 3,), True),
    "film tanh": (lambda: FiLMConv(WIDTH, 7, act=nn.Tanh()), (), False),
    "gen": (lambda: GENConv(WIDTH, 7, num_layers=1), (), True),
    "gen with edges": (lambda: GENConv(WIDTH, 7, edge_dim=DIM, num_layers=1), (attr(DIM),), True),
    "gen t": (lambda: GENConv(WIDTH, 7, t=0.3, num_layers=1), (), True),
    "crystal": (lambda: CGConv(WIDTH), (), True),
    "crystal with edges": (lambda: CGConv(WIDTH, dim=DIM), (attr(DIM),), False),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forms that kernels were asked for."""
    made: list[str] = []

    def sums(pattern: Any, form: str, *rest: Any) -> torch.Tensor:
        made.append(form)
        return kernels.sums(pattern, form, *rest)

    monkeypatch.setattr(known, "_sums", sums)
    return made


@pytest.mark.parametrize("name", CASES)
def test_layers_of_a_form_answer_like_pyg(name: str, calls: list[str]) -> None:
    build, more, is_known = CASES[name]
    agree(drawn(build()), features(), edges(count=DRAWN), *more, calls=2)
    assert bool(calls) is is_known


def test_a_learned_temperature_has_its_gradient_from_blocks(calls: list[str]) -> None:
    layer = drawn(GENConv(WIDTH, 7, learn_t=True, num_layers=1))
    agree(layer, features(), edges(count=DRAWN))
    compiled = agree(layer, features(), edges(count=DRAWN), wants_grad=False)
    assert not compiled.plan.not_planned


@pytest.mark.parametrize("name", ["film", "gen", "crystal"])
def test_hubs_no_edges_and_double_precision(name: str) -> None:
    x = features(dtype=torch.float64)
    hub = torch.stack([torch.randint(0, N, (500,)), torch.zeros(500, dtype=torch.int64)])
    for given in (hub, hub[:, :0], edges().repeat(1, 2)):
        agree(drawn(CASES[name][0](), torch.float64), x, given)
