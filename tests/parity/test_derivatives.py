"""Everything autograd offers beyond one backward pass, compiled against PyG: higher derivatives, modes, hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    AGNNConv,
    CGConv,
    DynamicEdgeConv,
    EdgeConv,
    FAConv,
    FiLMConv,
    GatedGraphConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINConv,
    GMMConv,
    LGConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    SuperGATConv,
    TransformerConv,
)

import plait
from plait.plan import attention as attention_plan
from plait.plan import edgewise as edgewise_plan
from plait.plan import pna as pna_plan
from plait.plan import relational as relational_plan
from plait.pyg.layers import lstm
from tests.parity.harness import close
from tests.pyg.cases import CASES, Case

NODES, WIDTH, OUT = 9, 5, 4
HISTOGRAM = torch.tensor([1, 3, 4, 2, 1])
DOUBLE = torch.float64


def edges() -> Tensor:
    """By target, with a loop, a repeated edge and nodes without any; some nodes have many."""
    listed = torch.randint(0, NODES, (2, 26), generator=torch.Generator().manual_seed(3))
    listed = torch.cat([listed, torch.tensor([[0, 0, 2], [1, 1, 2]])], 1)
    listed = listed[:, listed[1] != 7]
    return listed[:, listed[1].argsort(stable=True)]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def drawn(module: nn.Module) -> nn.Module:
    """The module in double precision, no parameter where mistakes do not show."""
    torch.manual_seed(1)
    for parameter in module.to(DOUBLE).parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def kinds() -> Tensor:
    return torch.arange(edges().shape[1]) % 3


def attr(width: int = 3) -> Tensor:
    return values(edges().shape[1], width, seed=5)


def edge_map(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2 * WIDTH, 6), *layers)


Make = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def layer(make: Callable[[], nn.Module], *more: Any) -> Make:
    return lambda: (make(), (edges(), *more))


def pna(**options: Any) -> nn.Module:
    names = options.pop("aggregators", ["mean", "max", "std"])
    module = drawn(PNAConv(WIDTH, OUT, names, ["identity", "attenuation"], HISTOGRAM, **options))
    module.aggr_module.reset_parameters()  # type: ignore[operator, union-attr]
    return module


# name -> (module, arguments after x); a plan chosen by hand after the bar
FUSED: dict[str, Make] = {
    "gat": layer(lambda: GATConv(WIDTH, OUT, heads=3)),
    "gat residual": layer(lambda: GATConv(WIDTH, OUT, heads=2, residual=True, concat=False)),
    "gat edge": layer(lambda: GATConv(WIDTH, OUT, heads=3, edge_dim=3), attr()),
    **{
        f"gat|{choice}": layer(lambda: GATConv(WIDTH, OUT, heads=3))
        for choice in ("gat", "gat folded", "recompute", "gat lean", "recompute lean")
    },
    "gatv2": layer(lambda: GATv2Conv(WIDTH, OUT, heads=3)),
    "gatv2 shared": layer(lambda: GATv2Conv(WIDTH, OUT, heads=2, share_weights=True, residual=True)),
    "gatv2 edge": layer(lambda: GATv2Conv(WIDTH, OUT, heads=3, edge_dim=3), attr()),
    "transformer": layer(lambda: TransformerConv(WIDTH, OUT, heads=3)),
    "transformer beta": layer(lambda: TransformerConv(WIDTH, OUT, heads=2, beta=True, concat=False)),
    "transformer edge": layer(lambda: TransformerConv(WIDTH, OUT, heads=3, edge_dim=3), attr()),
    "transformer wide": layer(lambda: TransformerConv(WIDTH, 33, heads=2)),
    "res gated": layer(lambda: ResGatedGraphConv(WIDTH, OUT)),
    "res gated edge": layer(lambda: ResGatedGraphConv(WIDTH, OUT, edge_dim=3), attr()),
    **{
        f"rgcn|{choice}": layer(lambda: RGCNConv(WIDTH, OUT, 3), kinds())
        for choice in ("aggregate", "transform", "aggregate pairs", "transform pairs")
    },
    "rgcn|bases": layer(lambda: RGCNConv(WIDTH, OUT, 3, num_bases=2), kinds()),
    "rgcn blocks": layer(lambda: RGCNConv(WIDTH, 10, 3, num_blocks=5, aggr="sum"), kinds()),
    "pna|after": layer(pna),
    "pna|before": layer(functools.partial(pna, towers=2, train_norm=True, aggregators=["sum", "var", "min"])),
    "pna edge": layer(functools.partial(pna, edge_dim=3), attr()),
    "edge linear": layer(lambda: EdgeConv(nn.Linear(2 * WIDTH, OUT), aggr="max")),
    "edge rectified": layer(lambda: EdgeConv(edge_map(nn.ReLU(), nn.Linear(6, OUT)), aggr="mean")),
    "edge tanh": layer(lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, 6), nn.SiLU()), aggr="sum")),
    "edge max|blocks": layer(lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, OUT)), aggr="max")),
    "edge max|marked": layer(lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, OUT)), aggr="max")),
    "sage lstm": layer(lambda: SAGEConv(WIDTH, OUT, aggr="lstm")),
    "agnn": layer(AGNNConv),
    "super gat": layer(lambda: SuperGATConv(WIDTH, OUT, heads=3).eval()),
    "super gat SD": layer(lambda: SuperGATConv(WIDTH, OUT, heads=2, attention_type="SD").eval()),
    "fa": lambda: (FAConv(WIDTH), (values(NODES, WIDTH, seed=8), edges())),
    "gmm": layer(lambda: GMMConv(WIDTH, OUT, dim=3, kernel_size=2), attr()),
    "gen": layer(lambda: GENConv(WIDTH, OUT, norm="layer", learn_t=True)),
    "gen power": layer(lambda: GENConv(WIDTH, OUT, norm="layer", aggr="power", learn_p=True, p=2.0)),
    "gen edge": layer(lambda: GENConv(WIDTH, OUT, norm="layer", edge_dim=3), attr()),
    "film": layer(lambda: FiLMConv(WIDTH, OUT, act=nn.Tanh())),
    "film linear": layer(lambda: FiLMConv(WIDTH, OUT, act=None)),
    "film relations": layer(lambda: FiLMConv(WIDTH, OUT, num_relations=3, act=nn.Tanh()), kinds()),
    "crystal": layer(lambda: CGConv(WIDTH, dim=3), attr()),
    "gated graph": layer(lambda: GatedGraphConv(WIDTH, 2)),
    "gated graph weighted": layer(lambda: GatedGraphConv(WIDTH, 2), attr(1).squeeze(1)),
}
KEPT = ("pna", "gen")  # drawn by hand, or with values that a random draw would move out of range
CHOOSERS = {"gat": attention_plan, "pna": pna_plan, "rgcn": relational_plan, "edge": edgewise_plan}


@pytest.fixture(autouse=True)
def _small_graphs_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs small enough for a test run an LSTM in PyG otherwise."""
    monkeypatch.setattr(lstm, "_SECONDS", {"fwd": 0.0, "bwd": 0.0})


def choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the candidate named after the bar alone."""
    family, _, choice = name.partition("|")
    plan: Any = CHOOSERS.get(family.split()[0])
    if not choice:
        return
    found = plan.candidates
    if plan is attention_plan:
        monkeypatch.setattr(plan, "candidates", lambda problem: {choice: found(problem)[choice]})
    else:
        monkeypatch.setattr(plan, "candidates", lambda p: [c for c in found(p) if c.name == choice])


def built(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    module, rest = FUSED[name]()
    torch.manual_seed(2)
    return (module.to(DOUBLE) if name.split()[0].split("|")[0] in KEPT else drawn(module)), rest


def both(module: nn.Module) -> tuple[nn.Module, Any]:
    return copy.deepcopy(module), plait.compile(module)


def leaves(module: nn.Module, rest: tuple[Any, ...], wants_input: bool = True) -> list[Tensor]:
    """What a second derivative is taken by: parameters, the features last, edge features where there are."""
    found = [p for p in module.parameters() if p.requires_grad]
    found += [part for part in rest if isinstance(part, Tensor) and part.requires_grad]
    return found


def twice(model: nn.Module, x: Tensor, rest: tuple[Any, ...]) -> list[list[Tensor | None]]:
    """First, second and third derivatives of a random functional of the output by everything."""
    by = [p for p in model.parameters() if p.requires_grad]
    by += [part for part in (x, *rest) if isinstance(part, Tensor) and part.requires_grad]
    torch.manual_seed(0)
    out = model(x, *rest)
    total = (out * values(*out.shape, seed=1)).sum() + 0.5 * (out * out).sum()
    found: list[list[Tensor | None]] = []
    for order in range(3):
        if not total.requires_grad:
            break
        got = torch.autograd.grad(total, by, create_graph=order < 2, allow_unused=True)
        found.append([None if part is None else part.detach() for part in got])
        total = sum(  # type: ignore[assignment]
            (part * values(*part.shape, seed=7 + k)).sum() for k, part in enumerate(got) if part is not None
        )
    return found


def agree_twice(module: nn.Module, x: Tensor, rest: tuple[Any, ...], wants_input: bool = True) -> Any:
    """The compiled module, after derivatives of every order agreed with PyG's."""
    theirs, ours = both(module)

    def fresh() -> tuple[Tensor, tuple[Any, ...]]:
        more = [
            part.clone().requires_grad_() if isinstance(part, Tensor) and part.is_floating_point() else part
            for part in rest
        ]
        return x.clone().requires_grad_(wants_input), tuple(more)

    expected, result = twice(theirs, *fresh()), twice(ours, *fresh())
    assert ours.plan.layers, ours.plan.not_planned
    assert len(result) == len(expected)
    for order, (own, other) in enumerate(zip(result, expected, strict=True), 1):
        scale = max((float(part.abs().max()) for part in other if part is not None and part.numel()), default=0.0)
        for k, (mine, part) in enumerate(zip(own, other, strict=True)):
            what = f"derivative {order} by input {k}"
            if mine is None or part is None:  # one that does not depend on it may say so or be zero
                rest_of = mine if part is None else part
                assert rest_of is None or float(rest_of.abs().max()) <= 1e-9 * max(1.0, scale), what
            else:
                close(mine, part, 1e-8, what, scale)
    return ours


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivatives_of_linear_layers(case: Case) -> None:
    module = drawn(case.make()).eval()
    if getattr(module, "K", None) == 0:
        pytest.skip("nothing to plan")
    agree_twice(module, values(NODES, WIDTH), (edges(),))


@pytest.mark.parametrize("case", [case for case in CASES if case.takes_weights][::4], ids=str)
def test_derivatives_of_linear_layers_with_weights(case: Case) -> None:
    weight = torch.rand(edges().shape[1], dtype=DOUBLE)
    module = drawn(case.make()).eval()

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = module

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.layer(x, edge_index, weight)
            return out

    if getattr(module, "K", None) != 0:
        agree_twice(Weighted(), values(NODES, WIDTH), (edges(),))


@pytest.mark.parametrize("name", FUSED)
def test_derivatives_of_fused_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(name, monkeypatch)
    module, rest = built(name)
    compiled = agree_twice(module, values(NODES, WIDTH), rest)
    choice = name.partition("|")[2]
    assert not choice or compiled.plan.layers[0].choice == choice
