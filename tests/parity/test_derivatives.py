"""What autograd offers beyond one backward pass, compiled against PyG: higher derivatives, modes, hooks."""

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
    ARMAConv,
    CGConv,
    ChebConv,
    EdgeConv,
    FAConv,
    FiLMConv,
    GATConv,
    GatedGraphConv,
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
    SGConv,
    SuperGATConv,
    TransformerConv,
)

import plait
from plait.cost import price
from tests.parity.chosen import only
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
    "edge sum": layer(lambda: EdgeConv(nn.Linear(2 * WIDTH, OUT), aggr="sum")),
    "edge sum|rectified again": layer(lambda: EdgeConv(edge_map(nn.ReLU(), nn.Linear(6, OUT)), aggr="sum")),
    "edge tanh": layer(lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, 6), nn.SiLU()), aggr="sum")),
    "edge max|blocks": layer(lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, OUT)), aggr="max")),
    "edge max|marked": layer(lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, OUT)), aggr="max")),
    "edge max|tiles": layer(lambda: EdgeConv(edge_map(nn.ReLU(), nn.Linear(6, OUT)), aggr="max")),
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
    "film relu": layer(lambda: FiLMConv(WIDTH, OUT)),
    "film linear": layer(lambda: FiLMConv(WIDTH, OUT, act=None)),
    "film relations": layer(lambda: FiLMConv(WIDTH, OUT, num_relations=3, act=nn.Tanh()), kinds()),
    "crystal": layer(lambda: CGConv(WIDTH, dim=3), attr()),
    "crystal alone": layer(lambda: CGConv(WIDTH)),
    "gated graph": layer(lambda: GatedGraphConv(WIDTH, 2)),
    "gated graph weighted": layer(lambda: GatedGraphConv(WIDTH, 2), attr(1).squeeze(1)),
}
KEPT = ("pna", "gen")  # drawn by hand, or with values that a random draw would move out of range


@pytest.fixture(autouse=True)
def _small_graphs_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs small enough for a test run an LSTM in PyG otherwise."""
    free = {"sequence": 0.0, "sequence_back": 0.0}
    monkeypatch.setattr(price, "_LENGTHS", price._LENGTHS | free)


def choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the candidate named after the bar alone."""
    _, _, choice = name.partition("|")
    if choice:
        only(choice, monkeypatch)


def built(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    module, rest = FUSED[name]()
    torch.manual_seed(2)
    return (module.to(DOUBLE) if name.split()[0].split("|")[0] in KEPT else drawn(module)), rest


def both(module: nn.Module) -> tuple[nn.Module, Any]:
    return copy.deepcopy(module), plait.compile(module)


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


def agree_twice(
    module: nn.Module, x: Tensor, rest: tuple[Any, ...], wants_input: bool = True, calls: int = 1
) -> Any:
    """The compiled module, after derivatives of every order agreed with PyG's."""
    theirs, ours = both(module)

    def fresh() -> tuple[Tensor, tuple[Any, ...]]:
        more = [
            part.clone().requires_grad_() if isinstance(part, Tensor) and part.is_floating_point() else part
            for part in rest
        ]
        return x.clone().requires_grad_(wants_input), tuple(more)

    expected, given = twice(theirs, *fresh()), fresh()
    for _ in range(calls):
        result = twice(ours, *given)
    assert ours.plan.layers, ours.plan.not_planned
    assert len(result) == len(expected)
    for order, (own, other) in enumerate(zip(result, expected, strict=True), 1):
        scale = max(
            (float(part.abs().max()) for part in other if part is not None and part.numel()), default=0.0
        )
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
    # the first call of a layer that keeps its normalised edges is PyG's
    calls = 2 if getattr(module, "cached", False) and hasattr(module, "_cached_edge_index") else 1
    agree_twice(module, values(NODES, WIDTH), (edges(),), calls=calls)


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


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_derivatives_by_weights_while_products_of_the_input_are_kept(case: Case) -> None:
    module = drawn(case.make()).eval()
    x = values(NODES, WIDTH)
    if any(p.requires_grad for p in module.parameters()) and getattr(module, "K", None) != 0:
        agree_twice(module, x * (x > 0.8), (edges(),), wants_input=False, calls=3)


@pytest.mark.parametrize("case", CASES[1::3], ids=str)
def test_derivatives_with_frozen_weights(case: Case) -> None:
    module = drawn(case.make()).eval().requires_grad_(False)
    if getattr(module, "K", None) != 0:
        agree_twice(module, values(NODES, WIDTH), (edges(),))


@pytest.mark.parametrize("layer_of", [GATConv, GATv2Conv], ids=lambda cls: cls.__name__)
def test_derivatives_of_attention_that_drops_weights(layer_of: Any) -> None:
    """Its draws are not PyG's: the recomputed function must be the one whose first gradient it was."""
    model: Any = plait.compile(drawn(layer_of(WIDTH, OUT, heads=3, dropout=0.4)))
    x, given = values(NODES, WIDTH).requires_grad_(), edges()
    torch.manual_seed(0)
    out = model(x, given)
    by = (x, *model.parameters())
    plain = torch.autograd.grad(out.square().sum(), by, retain_graph=True)
    recorded = torch.autograd.grad(out.square().sum(), by, create_graph=True)
    for mine, other in zip(recorded, plain, strict=True):
        close(mine.detach(), other, 1e-10, "gradient that can be differentiated")


def two_ends(shape: str) -> tuple[Tensor, int]:
    listed = {
        "no edges": torch.zeros((2, 0), dtype=torch.int64),
        "one node": torch.zeros((2, 3), dtype=torch.int64),
        "hub": torch.stack([torch.arange(20) % NODES, torch.zeros(20, dtype=torch.int64)]),
    }[shape]
    return listed, 1 if shape == "one node" else NODES


@pytest.mark.parametrize("shape", ["no edges", "one node", "hub"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: GCNConv(WIDTH, 1),
        lambda: SAGEConv(WIDTH, OUT, aggr="max"),
        lambda: GATConv(WIDTH, OUT, heads=3),
        lambda: TransformerConv(WIDTH, OUT, heads=3),
        lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, OUT)), aggr="max"),
        lambda: ResGatedGraphConv(WIDTH, 1),
        lambda: GENConv(WIDTH, OUT, norm="layer"),
    ],
)
def test_derivatives_on_odd_graphs(make: Callable[[], nn.Module], shape: str) -> None:
    listed, count = two_ends(shape)
    agree_twice(make().to(DOUBLE), values(count, WIDTH), (listed,))


def test_tied_extremes_share_higher_derivatives_as_in_pyg() -> None:
    x = torch.randint(0, 3, (NODES, WIDTH), generator=torch.Generator().manual_seed(1)).to(DOUBLE)
    agree_twice(drawn(SAGEConv(WIDTH, OUT, aggr="max")), x, (edges(),))
    agree_twice(drawn(GINConv(nn.Linear(WIDTH, OUT), aggr="min")), x, (edges(),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GCNConv(WIDTH, OUT),
        lambda: GATConv(WIDTH, OUT, heads=2),
        lambda: ResGatedGraphConv(WIDTH, OUT),
    ],
    ids=["gcn", "gat", "gated"],
)
def test_second_derivatives_are_what_differences_say(make: Callable[[], nn.Module]) -> None:
    model: Any = plait.compile(drawn(make()))
    x, given = values(NODES, WIDTH)[:6].requires_grad_(), edges() % 6
    assert torch.autograd.gradgradcheck(lambda y: model(y, given), (x,), fast_mode=True)


# Everything else autograd does: one layer of each kind of pass ------------------------------------------

KINDS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(WIDTH, WIDTH),
    "lg": LGConv,
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH))),
    "sage max": lambda: SAGEConv(WIDTH, WIDTH, aggr="max"),
    "arma": lambda: ARMAConv(WIDTH, WIDTH),
    "gat": lambda: GATConv(WIDTH, WIDTH),
    "transformer": lambda: TransformerConv(WIDTH, WIDTH),
    "edge": lambda: EdgeConv(edge_map(nn.Tanh(), nn.Linear(6, WIDTH))),
    "res gated": lambda: ResGatedGraphConv(WIDTH, WIDTH),
    "gen": lambda: GENConv(WIDTH, WIDTH, norm="layer"),
    "pna": lambda: PNAConv(WIDTH, WIDTH, ["mean", "max"], ["identity"], HISTOGRAM),
    "film": lambda: FiLMConv(WIDTH, WIDTH),
    "agnn": AGNNConv,
    "cheb": lambda: ChebConv(WIDTH, WIDTH, 3),
    "sg": lambda: SGConv(WIDTH, WIDTH, K=2),
}
kinds_of_layers = pytest.mark.parametrize("kind", KINDS)


def flat(found: Any) -> list[Tensor | None]:
    if isinstance(found, tuple | list):
        return [part for entry in found for part in flat(entry)]
    return [found]


def same_as_pyg(kind: str, use: Callable[[nn.Module, Tensor], Any], is_frozen: bool = False) -> None:
    """`use` gives the same tensors, or raises the same kind of error, with the compiled layer and without."""
    torch.manual_seed(1)
    theirs, ours = both(KINDS[kind]().to(DOUBLE).requires_grad_(not is_frozen).eval())
    ours(values(NODES, WIDTH), edges())  # what is remembered of a plain call must not answer another
    expected, result = (flat(use(model, values(NODES, WIDTH).requires_grad_())) for model in (theirs, ours))
    for k, (mine, other) in enumerate(zip(result, expected, strict=True)):
        if mine is None or other is None:
            rest = mine if other is None else other
            assert rest is None or not rest.any()
        else:
            close(mine.detach(), other.detach(), 1e-9, f"{kind}: result {k}", 1.0)


def by_all(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [x, *(p for p in model.parameters() if p.requires_grad)]


@kinds_of_layers
def test_batched_gradients_and_functionals(kind: str) -> None:
    functional, given = torch.autograd.functional, edges()

    def use(model: nn.Module, x: Tensor) -> Any:
        def total(y: Tensor) -> Tensor:
            return model(y, given).tanh().sum()  # type: ignore[no-any-return]

        out = model(x, given)
        each = torch.eye(out.numel(), dtype=DOUBLE)[::5].view(-1, *out.shape)
        return [
            torch.autograd.grad(out, by_all(model, x), each, is_grads_batched=True, allow_unused=True),
            functional.jacobian(lambda y: model(y, given), x, vectorize=True),
            functional.hessian(total, x, vectorize=True),
            functional.hvp(total, x, values(NODES, WIDTH, seed=4)),
            functional.vjp(total, x, torch.tensor(2.0, dtype=DOUBLE)),
            functional.jvp(total, x, values(NODES, WIDTH, seed=4)),
        ]

    same_as_pyg(kind, use)


@kinds_of_layers
def test_transforms_of_torch_func(kind: str) -> None:
    given = edges()

    def use(model: nn.Module, x: Tensor) -> Any:
        def layer_of(y: Tensor) -> Tensor:
            return model(y, given)  # type: ignore[no-any-return]

        x = x.detach()
        return [
            torch.func.grad(lambda y: layer_of(y).tanh().sum())(x),
            torch.func.jacrev(layer_of)(x),
            torch.func.vmap(layer_of)(torch.stack([x, 2 * x])),
            torch.func.jvp(layer_of, (x,), (values(NODES, WIDTH, seed=4),)),
        ]

    same_as_pyg(kind, use)


@kinds_of_layers
@pytest.mark.parametrize("is_frozen", [False, True])
def test_forward_mode_carries_tangents(kind: str, is_frozen: bool) -> None:
    def use(model: nn.Module, x: Tensor) -> Any:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), values(NODES, WIDTH, seed=4))
            return [*forward_ad.unpack_dual(model(dual, edges()))]

    same_as_pyg(kind, use, is_frozen)


@kinds_of_layers
def test_a_step_of_maml(kind: str) -> None:
    def use(model: nn.Module, x: Tensor) -> Any:
        named = dict(model.named_parameters())
        if not named:
            return []
        call = torch.func.functional_call
        loss = call(model, named, (x, edges())).tanh().sum()
        grads = torch.autograd.grad(loss, [*named.values()], create_graph=True, materialize_grads=True)
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(named.items(), grads, strict=True)}
        again = call(model, fast, (x, edges())).tanh().sum()
        return torch.autograd.grad(again, [x, *named.values()], allow_unused=True)

    same_as_pyg(kind, use)


@kinds_of_layers
def test_graphs_kept_checkpoints_and_hooks(kind: str) -> None:
    def use(model: nn.Module, x: Tensor) -> Any:
        def layer_of(y: Tensor) -> Tensor:
            return model(y, edges()).tanh()  # type: ignore[no-any-return]

        out, seen = layer_of(x).sum(), []
        out.backward(retain_graph=True)
        out.backward()
        for reentrant in (False, True):
            checkpoint(layer_of, x, use_reentrant=reentrant).sum().backward()
        with torch.autograd.graph.save_on_cpu():
            out = layer_of(x).sum()
        out.backward()
        with torch.autograd.detect_anomaly(check_nan=True):
            h = x * 1.0
            h.register_hook(lambda grad: 2 * grad)
            made = model(h, edges())
            made.retain_grad()
            made.register_hook(lambda grad: seen.append(grad.clone()))
            made.tanh().sum().backward()
        return [x.grad, made.grad, seen, [p.grad for p in model.parameters()]]

    with pytest.warns(UserWarning, match="Anomaly"):
        same_as_pyg(kind, use)


@kinds_of_layers
def test_results_may_be_changed_in_place(kind: str) -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda out: out.mul_(2.0),
        lambda out: nn.functional.relu(out, inplace=True),
        lambda out: nn.functional.dropout(out, 0.5, training=True, inplace=True),
    ]

    def use(model: nn.Module, x: Tensor) -> Any:
        found = []
        for change in changes:
            torch.manual_seed(0)
            out = change(model(x * 1.0, edges()))
            found.append(torch.autograd.grad((out * out).sum(), by_all(model, x), allow_unused=True))
        return found

    if kind == "edge":
        pytest.skip("PyG keeps the result of its maximum, and raises")
    same_as_pyg(kind, use)


@pytest.mark.parametrize("kind", ["lg", "gcn", "arma"])
def test_inputs_may_be_changed_in_place_where_no_gradient_needs_them(kind: str) -> None:
    def use(model: nn.Module, x: Tensor) -> Any:
        h = x * 1.0
        h += model(h, edges())
        return torch.autograd.grad((h * h).sum(), x)

    if kind != "arma":
        same_as_pyg(kind, use, is_frozen=True)
    if kind != "lg":
        model = plait.compile(KINDS[kind]().to(DOUBLE))
        x = values(NODES, WIDTH).requires_grad_()
        model(x * 1.0, edges()).sum().backward()  # a first step that leaves its input alone
        with pytest.raises(RuntimeError, match=r"h = h \+ conv\(h\)"):
            use(model, x)


@pytest.mark.parametrize("kind", ["gcn", "cheb", "sg"])
def test_weights_may_change_before_the_backward_pass_where_no_gradient_needs_them(kind: str) -> None:
    def use(model: nn.Module, x: Tensor) -> Any:
        out = model(x.detach(), edges())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        return torch.autograd.grad(out.sum(), [*model.parameters()])

    same_as_pyg(kind, use)


@pytest.mark.parametrize("aggr", ["max", "sum"])
def test_a_linear_map_used_twice_by_edges_has_its_gradient_once(aggr: str) -> None:
    shared = nn.Linear(6, 6)
    module = EdgeConv(edge_map(nn.Tanh(), shared, nn.ReLU(), shared, nn.Tanh()), aggr=aggr)
    agree_twice(drawn(module), values(NODES, WIDTH), (edges(),))


@pytest.mark.parametrize("aggr", ["max", "sum"])
def test_activations_in_place_between_edges(aggr: str) -> None:
    module = EdgeConv(
        edge_map(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.LayerNorm(6), nn.SiLU(inplace=True)), aggr=aggr
    )
    agree_twice(drawn(module), values(NODES, WIDTH), (edges(),))
    assert module.nn[1].inplace
