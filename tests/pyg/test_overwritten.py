"""h += conv(h): an input that is written to before the backward pass reads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, CGConv, EdgeConv, GENConv, GINConv, LGConv, PNAConv, SGConv

import plait

NODES, WIDTH = 9, 4
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
    "sgc": lambda: SGConv(WIDTH, WIDTH, K=2),
    "edge": lambda: EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())),
    "pna": lambda: PNAConv(WIDTH, WIDTH, ["mean", "max"], ["identity"], torch.tensor([0, 3, 4, 2])),
    "gen": lambda: GENConv(WIDTH, WIDTH, norm="layer"),
    "cg": lambda: CGConv(WIDTH),
    "appnp": lambda: APPNP(K=2, alpha=0.1),
    "lg": LGConv,
}


def edges() -> Tensor:
    return torch.randint(0, NODES, (2, 30), generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """h += conv(h), `times` in a row, on a hidden layer or on the features themselves."""

    def __init__(self, conv: nn.Module, has_encoder: bool, times: int = 2):
        super().__init__()
        self.conv, self.times = conv, times
        self.encoder = nn.Linear(WIDTH, WIDTH) if has_encoder else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x * 1 if self.encoder is None else self.encoder(x)
        for _ in range(self.times):
            h += self.conv(h, edge_index)
        return h


def gradients(model: Any, x: Tensor, edge_index: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    out = model(x, edge_index)
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("has_encoder", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_an_input_may_be_added_to_where_pyg_allows_it(name: str, has_encoder: bool) -> None:
    torch.manual_seed(0)
    plain = Residual(LAYERS[name](), has_encoder).double()
    model = plait.compile(copy.deepcopy(plain))
    x = torch.randn(NODES, WIDTH, dtype=torch.float64)
    for _ in range(4):
        for expected, found in zip(gradients(plain, x, edges()), gradients(model, x, edges()), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_a_layer_whose_input_stays_copies_it_in_its_first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = GINConv(nn.Linear(WIDTH, WIDTH))
    model: Any = plait.compile(conv)
    copies = []
    kept = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **_: copies.append(self.shape) or kept(self))
    edge_index = edges()
    counts = []
    for _ in range(3):
        h = torch.randn(NODES, WIDTH, requires_grad=True) * 2
        model(h, edge_index).sum().backward()
        counts.append(copies.count(h.shape))
    assert counts == [1, 1, 1]


def test_second_derivatives_go_through_the_copy() -> None:
    torch.manual_seed(0)
    plain = Residual(LAYERS["gin"](), True, times=1).double()
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for model in (plain, plait.compile(copy.deepcopy(plain))):
        by = [x, *model.parameters()]
        first = torch.autograd.grad(model(x, edges()).tanh().sum(), by, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), by, allow_unused=True))  # type: ignore[arg-type]
    torch.testing.assert_close(found[1], found[0])


# Tensors made in inference_mode ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("options", [{}, {"mode": "training"}, {"rows": torch.arange(3)}])
def test_a_model_in_training_is_compiled_inside_inference_mode(
    name: str, is_inside: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    conv, x, edge_index = LAYERS[name](), torch.randn(NODES, WIDTH), edges()
    expected = conv(x, edge_index)
    with torch.inference_mode():
        given, ends = (x.clone(), edge_index.clone()) if is_inside else (x, edge_index)
        model = plait.compile(conv, Data(x=given, edge_index=ends), **options)
        torch.testing.assert_close(model(given, ends), expected)
        plait.explain(conv, Data(x=given, edge_index=ends), analyze=True, **options)
    out = model(x, edge_index)
    torch.testing.assert_close(out, expected)
    if out.requires_grad:
        out.sum().backward()
        assert all(p.grad is not None for p in conv.parameters())


def test_what_is_made_inside_inference_mode_serves_training() -> None:
    from torch_geometric.nn import GraphSAGE

    torch.manual_seed(0)
    plain, x, edge_index = GraphSAGE(WIDTH, WIDTH, num_layers=2), torch.randn(NODES, WIDTH), edges()
    model = plait.compile(copy.deepcopy(plain))
    with torch.inference_mode():
        model(x, edge_index)
    for expected, found in zip(gradients(plain, x, edge_index), gradients(model, x, edge_index), strict=True):
        torch.testing.assert_close(found, expected)


def test_features_made_inside_inference_mode_are_trained_on_where_pyg_does() -> None:
    torch.manual_seed(0)
    plain, edge_index = LAYERS["pna"](), edges()
    model = plait.compile(copy.deepcopy(plain))
    with torch.inference_mode():
        x = torch.randn(NODES, WIDTH)
    for _ in range(2):
        for expected, found in zip(
            gradients(plain, x, edge_index), gradients(model, x, edge_index), strict=True
        ):
            torch.testing.assert_close(found, expected)


def test_edges_cut_from_an_edge_index_inside_inference_mode_are_taken_as_pyg_takes_them() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            mixing = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
            self.conv = EdgeConv(mixing)  # which stays PyG's: the norm mixes edges

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.conv(x, edge_index[:, torch.arange(edge_index.shape[1]) % 2 == 0])

    torch.manual_seed(0)
    plain, x = Half(), torch.randn(NODES, WIDTH)
    given = EdgeIndex(edges(), sparse_size=(NODES, NODES))
    with torch.inference_mode():
        expected = plain(x, given)
        torch.testing.assert_close(plait.compile(copy.deepcopy(plain))(x, given), expected)


@pytest.mark.parametrize("name", ["edge", "gin"])
def test_calls_without_a_backward_pass_do_not_hide_that_the_input_is_written_to(name: str) -> None:
    """The copies end after some dozens of such calls; by then the next call has seen the write."""
    torch.manual_seed(0)
    model = Residual(LAYERS[name](), True)
    x, edge_index = torch.randn(NODES, WIDTH), edges()
    compiled = plait.compile(model)
    for _ in range(40):
        compiled(x, edge_index)
    for expected, found in zip(
        gradients(model, x, edge_index), gradients(compiled, x, edge_index), strict=True
    ):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected)
