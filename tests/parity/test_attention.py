"""Attention layers compiled against PyG: outputs, gradients, options, and what stays in PyG."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import plait
from plait.cost.machine import default_profile
from plait.errors import PlanError
from plait.measure import peak_tensor_bytes
from plait.ops.work import Matrix, Uniform
from plait.plan.attention import Attention, ways
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem
from plait.plan.ways import choose
from tests.parity.chosen import only
from tests.parity.harness import agree, close, largest

N, WIDTH = 40, 12


def edges(seed: int = 0, count: int = 300) -> torch.Tensor:
    """Random edges with loops and repeats; nodes 7 and 8 receive nothing."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, N, (2, count), generator=generator)
    return found[:, (found[1] != 7) & (found[1] != 8)]


def features(rows: int = N, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)


def drawn(module: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    module = module.to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


GAT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"concat": False},
    {"add_self_loops": False, "bias": False},
    {"residual": True, "negative_slope": 0.0},
    {"residual": True, "concat": False},
]


@pytest.mark.parametrize("options", GAT_OPTIONS, ids=str)
def test_gat_answers_like_pyg(options: dict[str, Any]) -> None:
    agree(drawn(GATConv(WIDTH, 5, heads=3, **options)), features(), edges(), calls=2)


@pytest.mark.parametrize("options", [*GAT_OPTIONS, {"share_weights": True}], ids=str)
def test_gatv2_answers_like_pyg(options: dict[str, Any]) -> None:
    agree(drawn(GATv2Conv(WIDTH, 5, heads=3, **options)), features(), edges(), calls=2)


@pytest.mark.parametrize(
    "options", [{}, {"concat": False}, {"beta": True}, {"root_weight": False}, {"bias": False}], ids=str
)
def test_transformer_answers_like_pyg(options: dict[str, Any]) -> None:
    agree(drawn(TransformerConv(WIDTH, 5, heads=3, **options)), features(), edges(), calls=2)


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_double_precision_agrees_to_double_precision(layer: Any) -> None:
    agree(drawn(layer(WIDTH, 5, heads=3), torch.float64), features(dtype=torch.float64), edges())


@pytest.mark.parametrize(("heads", "width", "inner"), [(1, 33, 12), (8, 3, 40), (4, 40, 8)])
def test_gat_heads_and_widths(heads: int, width: int, inner: int) -> None:
    agree(drawn(GATConv(inner, width, heads=heads)), features(width=inner), edges())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "choice",
    [
        *("gat", "gat folded", "recompute", "gat lean", "gat folded lean", "recompute lean"),
        *("gat targets first", "gat folded targets first"),
    ],
)
def test_every_candidate_of_gat_computes_the_same(
    choice: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    # other heads are other kernels to compile: one number of them in float64
    for heads, width in ((3, 5), (1, 33), (8, 3))[: 3 if dtype == torch.float32 else 1]:
        module = drawn(GATConv(WIDTH, width, heads=heads, negative_slope=-0.1), dtype)
        compiled = agree(module, features(dtype=dtype), edges())
        assert compiled.plan.layers[0].choice == choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (GATv2Conv, {}),
        (GATv2Conv, {"share_weights": True, "residual": True}),
        (TransformerConv, {}),
        (TransformerConv, {"beta": True, "concat": False}),
    ],
    ids=str,
)
def test_lean_gradients_of_row_scores_are_pygs(
    layer: Any, options: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("leaky lean" if layer is GATv2Conv else "dot lean", monkeypatch)
    agree(drawn(layer(WIDTH, 5, heads=3, **options), dtype), features(dtype=dtype), edges(), calls=2)
    pair = features(30, dtype=dtype), features(N, 7, dtype)
    between = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    agree(
        drawn(
            layer((WIDTH, 7), 5, heads=3, **options | {"share_weights": False})
            if layer is GATv2Conv
            else layer((WIDTH, 7), 5, heads=3, **options),
            dtype,
        ),
        pair,
        between,
    )


@pytest.mark.parametrize("order", ["", " targets first"])
@pytest.mark.parametrize(
    ("layer", "choice"), [(GATConv, "gat folded"), (GATv2Conv, "leaky"), (TransformerConv, "dot")]
)
@pytest.mark.parametrize(("heads", "width"), [(3, 5), (4, 16)])
def test_the_backward_pass_may_begin_at_either_end(
    layer: Any, choice: str, heads: int, width: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice + order, monkeypatch)
    agree(drawn(layer(WIDTH, width, heads=heads)), features(), edges(), calls=2)
    pair = features(30), features(N, 7)
    between = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    agree(drawn(layer((WIDTH, 7), width, heads=heads, **_no_loops(layer))), pair, between)


def _no_loops(layer: Any) -> dict[str, bool]:
    return {} if layer is TransformerConv else {"add_self_loops": False}


@pytest.mark.parametrize("order", ["", " targets first"])
def test_gradients_of_edge_features_are_pygs_from_either_end(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(f"gat folded{order}", monkeypatch)
    given = edges()
    attr = torch.randn(given.shape[1], 4, generator=torch.Generator().manual_seed(5))
    agree(drawn(GATConv(WIDTH, 5, heads=3, edge_dim=4)), features(), given, attr)


DOTS = ["dot", "dot lean", "dot recompute", "dot recompute lean"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("choice", DOTS)
def test_every_candidate_of_transformer_computes_the_same(
    choice: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    shapes = [(3, 5, WIDTH), (3, 5, 1)]
    if dtype == torch.float32:  # other heads are other kernels to compile
        shapes += [(1, 33, 7), (8, 3, 1), *([(16, 2, 19)] if choice == "dot" else [])]
    for heads, width, inner in shapes:
        module = drawn(TransformerConv(inner, width, heads=heads), dtype)
        compiled = agree(module, features(width=inner, dtype=dtype), edges(), calls=2)
        assert compiled.plan.layers[0].choice == choice


@pytest.mark.parametrize("choice", DOTS)
@pytest.mark.parametrize(
    "options", [{"concat": False}, {"beta": True}, {"root_weight": False}, {"bias": False}], ids=str
)
def test_every_candidate_of_transformer_with_options(
    choice: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    agree(drawn(TransformerConv(WIDTH, 5, heads=3, **options)), features(), edges(), calls=2)
    between = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N - 5, (200,))])
    agree(drawn(TransformerConv((WIDTH, 7), 5, heads=3, **options)), (features(30), features(N, 7)), between)


@pytest.mark.parametrize("choice", DOTS)
@pytest.mark.parametrize("graph", ["no edges", "one hub", "repeated edges", "loops only"])
def test_every_candidate_of_transformer_on_odd_graphs(
    choice: str, graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    hub = torch.stack([torch.randint(0, N, (10000,)), torch.zeros(10000, dtype=torch.int64)])
    given = {
        "no edges": torch.zeros((2, 0), dtype=torch.int64), "one hub": torch.cat([hub, edges(count=50)], 1),
        "repeated edges": edges(count=30).repeat(1, 5), "loops only": torch.arange(N).repeat(2, 1),
    }[graph]  # fmt: skip
    # PyG's gradient of the key's bias is rounding alone, and a hub's is above the bar: not in float32
    agree(drawn(TransformerConv(WIDTH, 5, heads=3, bias=False)), features(), given)
    exact = features(dtype=torch.float64)
    agree(drawn(TransformerConv(WIDTH, 5, heads=3), torch.float64), exact, given)


@pytest.mark.parametrize("choice", DOTS)
def test_large_scores_of_transformer_stay_finite_and_equal(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    agree(
        drawn(TransformerConv(WIDTH, 5, heads=3), torch.float64), 30 * features(dtype=torch.float64), edges()
    )
    compiled = plait.compile(drawn(TransformerConv(WIDTH, 5, heads=3)))
    x = (1000 * features()).requires_grad_()
    compiled(x, edges()).sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


def test_without_an_input_gradient_transformer_asks_nothing_of_the_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only("dot recompute lean", monkeypatch)
    compiled = agree(drawn(TransformerConv(WIDTH, 5, heads=3)), features(), edges(), wants_grad=False)
    assert not any(step.step.op == "attend_sources" for step in compiled.plan.layers[0].steps)


def test_the_bias_of_the_keys_gets_a_gradient_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    only("dot recompute", monkeypatch)
    compiled: Any = plait.compile(drawn(TransformerConv(WIDTH, 5, heads=3)))
    compiled(features().requires_grad_(), edges()).square().sum().backward()
    assert torch.equal(compiled.lin_key.bias.grad, torch.zeros(15))


def test_dropout_of_weights_is_no_case_for_raw_values() -> None:
    compiled = plait.compile(drawn(TransformerConv(2, 64, heads=3, dropout=0.4)))
    compiled(features(width=2), edges())
    plan = compiled.plan.layers[0]
    assert not any("recompute" in text for text in (plan.text, *(loser.candidate for loser in plan.rejected)))


@pytest.mark.parametrize("choice", DOTS)
def test_steps_of_transformer_are_timed_by_the_names_they_are_priced_by(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(choice, monkeypatch)
    compiled: Any = plait.compile(drawn(TransformerConv(WIDTH, 5, heads=3)))
    compiled._plait_plan_session.trace = trace = []
    compiled(features().requires_grad_(), edges()).sum().backward()
    seen = {name.partition("\0")[2] for name, _ in trace}
    assert seen == {step.step.out for step in compiled.plan.layers[0].steps}


@pytest.mark.parametrize(
    ("layer", "choice"), [(GATConv, "gat folded"), (GATv2Conv, "leaky"), (TransformerConv, "dot")]
)
def test_a_lean_step_drops_the_same_weights(layer: Any, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, given = drawn(layer(WIDTH, 5, heads=3, dropout=0.4)), features().requires_grad_(), edges()
    grads = []
    for name in (choice, f"{choice} lean"):
        with monkeypatch.context() as patched:
            only(name, patched)
            compiled = plait.compile(copy.deepcopy(module))
            torch.manual_seed(4)
            x.grad = None
            compiled(x, given).square().sum().backward()
        grads.append((x.grad, *[p.grad for p in compiled.parameters()]))
    scale = 0.01 * largest(*grads[0])  # that of the key's bias is 0 but for rounding
    for mine, other in zip(*grads, strict=True):
        close(mine, other, 1e-4, "gradient", scale=scale)


def test_gradients_of_bent_edge_features_are_streamed() -> None:
    count, columns = 40_000, 64
    given = torch.randint(0, 300, (2, count), generator=torch.Generator().manual_seed(6))
    x, attr = torch.randn(300, 8).requires_grad_(), torch.randn(count, 2)
    compiled = plait.compile(GATv2Conv(8, columns, edge_dim=2, add_self_loops=False))
    compiled(x, given, attr).sum().backward()
    assert peak_tensor_bytes(lambda: compiled(x, given, attr).sum().backward()) < count * columns * 4


def test_a_lean_step_holds_no_number_of_an_edge() -> None:
    count = 60_000
    given = torch.randint(0, 300, (2, count), generator=torch.Generator().manual_seed(5))
    x = torch.randn(300, 8).requires_grad_()
    module = GATConv(8, 2, heads=4)
    data = Data(x=x, edge_index=given)
    with pytest.raises(PlanError) as refusal:
        plait.compile(copy.deepcopy(module), data, memory_limit=1)
    limit = int(str(refusal.value).partition("needs ")[2].split()[0])
    compiled = plait.compile(module, data, memory_limit=limit)
    compiled(x, given).sum().backward()  # what belongs to the graph is made once
    kept_between_passes = count * 4 * 4
    assert peak_tensor_bytes(lambda: compiled(x, given).sum().backward()) < kept_between_passes / 4


@pytest.mark.parametrize("fill", ["mean", "add", 2.0])
@pytest.mark.parametrize("width", [None, 4])
def test_gat_edge_features(fill: Any, width: int | None) -> None:
    given = edges()
    attr = torch.randn(given.shape[1], *([width] if width else []))
    agree(drawn(GATConv(WIDTH, 5, heads=3, edge_dim=width or 1, fill_value=fill)), features(), given, attr)


class WithEdges(torch.nn.Module):
    """A layer with its edge features as a parameter, so that their gradient is compared too."""

    def __init__(self, layer: Any, attr: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.attr = layer, torch.nn.Parameter(attr)

    def forward(self, x: Any, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, edge_index, self.attr)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 4, 19])
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (GATConv, {}),
        (GATv2Conv, {"fill_value": "mean"}),
        (GATv2Conv, {"residual": True, "concat": False, "share_weights": True}),
        (TransformerConv, {}),
        (TransformerConv, {"beta": True, "bias": False}),
        (TransformerConv, {"concat": False, "root_weight": False}),
    ],
    ids=str,
)
def test_edge_features_and_their_gradient(layer: Any, options: Any, width: int, dtype: torch.dtype) -> None:
    given = edges()
    attr = torch.randn(given.shape[1], width, generator=torch.Generator().manual_seed(3))
    module = drawn(layer(WIDTH, 5, heads=3, edge_dim=width, **options), dtype)
    agree(WithEdges(module, attr.to(dtype)), features(dtype=dtype), given, calls=2)


@pytest.mark.parametrize("layer", [GATv2Conv, TransformerConv])
def test_edge_features_between_pairs(layer: Any) -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    # the mean feature of a loop is not defined between two node sets: PyG itself fails
    options = {"add_self_loops": False} if layer is GATv2Conv else {}
    module = drawn(layer((WIDTH, 7), 5, heads=3, edge_dim=3, **options))
    agree(WithEdges(module, torch.randn(200, 3)), (features(30), features(N, 7)), given)


@pytest.mark.parametrize("layer", [GATv2Conv, TransformerConv])
@pytest.mark.parametrize("width", [None, 2])
def test_weights_of_row_scores_are_those_of_pyg(layer: Any, width: int | None) -> None:
    module = drawn(layer(WIDTH, 5, heads=3, edge_dim=width))
    compiled, given = plait.compile(copy.deepcopy(module)), edges()
    attr = () if width is None else (torch.randn(given.shape[1], width),)
    found = []
    for model in (module, compiled):
        x = features().requires_grad_()
        out, (listed, weights) = model(x, given, *attr, return_attention_weights=True)
        (out.square().sum() + weights.square().sum()).backward()
        found.append((out, listed, weights, x.grad))
    assert not compiled.plan.not_planned
    assert torch.equal(found[0][1], found[1][1])
    for k, what in ((0, "output"), (2, "weights"), (3, "gradient of x")):
        close(found[1][k], found[0][k], 1e-4, what)


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("concat", [True, False])
def test_gradients_of_the_output_reach_the_weights_that_were_handed_out(layer: Any, concat: bool) -> None:
    module, given = drawn(layer(WIDTH, 5, heads=3, concat=concat)), edges()
    found = []
    for model in (module, plait.compile(module)):
        out, (_, weights) = model(features(), given, return_attention_weights=True)
        found.append(torch.autograd.grad(out.square().sum(), weights)[0])
    close(found[1], found[0], 1e-4, "gradient of the weights")


def test_gat_attention_weights_without_gradients_are_those_of_pyg() -> None:
    module, given = drawn(GATConv(WIDTH, 5, heads=3)), edges()
    with torch.no_grad():
        expected, (_, weights) = module(features(), given, return_attention_weights=True)
        result, (_, own) = plait.compile(module)(features(), given, return_attention_weights=True)
    close(result, expected, 1e-5, "output")
    close(own, weights, 1e-5, "weights")


@pytest.mark.parametrize("layer", [GATv2Conv, TransformerConv])
def test_dropout_with_edge_features_is_reproducible(layer: Any) -> None:
    given = edges()
    compiled = plait.compile(drawn(layer(WIDTH, 5, heads=3, edge_dim=2, dropout=0.5)))
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(compiled(features(), given, torch.ones(given.shape[1], 2)).detach().clone())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_pairs_of_features(layer: Any) -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    module = drawn(layer((WIDTH, 7), 5, heads=3))
    agree(module, (features(30), features(N, 7)), given)


def test_gat_attention_weights_are_those_of_pyg() -> None:
    module = drawn(GATConv(WIDTH, 5, heads=3, edge_dim=2))
    given = edges()
    attr = torch.randn(given.shape[1], 2)
    expected, (listed, weights) = module(features(), given, attr, return_attention_weights=True)
    result, (mine, own) = plait.compile(module)(features(), given, attr, return_attention_weights=True)
    close(result, expected, 1e-5, "output")
    assert torch.equal(mine, listed)
    close(own, weights, 1e-5, "weights")


def test_a_hub_of_ten_thousand_edges() -> None:
    rows = torch.cat([torch.zeros(10000, dtype=torch.int64), torch.randint(0, N, (200,))])
    given = torch.stack([torch.randint(0, N, (10200,)), rows])
    agree(drawn(GATConv(WIDTH, 5, heads=3)), features(), given)


def test_an_output_changed_in_place_does_not_change_the_gradients() -> None:
    module, given = drawn(GATConv(WIDTH, 5, heads=3)), edges()
    compiled = plait.compile(copy.deepcopy(module))
    grads = []
    for model in (module, compiled):
        x = features().requires_grad_()
        model(x, given).relu_().square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    close(grads[1], grads[0], 1e-4, "gradient of x")


def test_dropout_is_reproducible_and_keeps_the_mean() -> None:
    module, given = drawn(GATConv(WIDTH, 5, heads=3, dropout=0.5)), edges()
    compiled = plait.compile(module)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(compiled(features(), given).detach().clone())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    torch.manual_seed(2)
    mean = torch.stack([compiled(features(), given).detach() for _ in range(400)]).mean(0)
    close(mean, module.eval()(features(), given).detach(), 0.15, "mean")


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
@pytest.mark.parametrize("heads", [17, 32])
def test_more_heads_than_the_fused_passes_take(layer: Any, heads: int) -> None:
    agree(drawn(layer(WIDTH, 3, heads=heads)), features(), edges(), calls=2)
    given = edges()
    attr = torch.randn(given.shape[1], 2)
    agree(WithEdges(drawn(layer(WIDTH, 3, heads=heads, edge_dim=2, concat=False)), attr), features(), given)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_a_sparse_adj_t(layer: Any, layout: torch.layout) -> None:
    if (layer, layout) == (TransformerConv, torch.sparse_coo):
        pytest.skip("PyG's own backward pass fails on a COO matrix here")
    dense = torch.zeros(N, N)
    source, target = edges()
    dense[target, source] = 1.0
    adj_t = dense.to_sparse_csr() if layout == torch.sparse_csr else dense.to_sparse_coo().coalesce()
    agree(drawn(layer(WIDTH, 5, heads=3)), features(), adj_t, calls=2)


def test_more_heads_between_pairs() -> None:
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, N, (200,))])
    agree(drawn(GATConv((WIDTH, 7), 2, heads=18)), (features(30), features(N, 7)), given)


def test_weights_of_gat_after_dropout_are_dropped_or_scaled() -> None:
    compiled = plait.compile(drawn(GATConv(WIDTH, 5, heads=3, dropout=0.5)))
    _, (_, weights) = compiled(features(), edges(), return_attention_weights=True)
    compiled.eval()
    _, (_, whole) = compiled(features(), edges(), return_attention_weights=True)
    is_kept = weights > 0
    assert 0.3 < float(is_kept.float().mean()) < 0.7
    close(weights[is_kept], 2 * whole[is_kept], 1e-5, "weights")


def planned(inner: int, width: int) -> LayerPlan:
    rows, count = 50000, 2000000
    matrix = Matrix(rows, rows, count, True, Uniform(rows), Uniform(rows))
    sizes, wrt = {"N": rows, "M": rows, "E": count}, ("X", "W", "V")
    problem = Problem((), sizes, lambda expr: matrix, default_profile(), wrt)
    return choose(problem, ways(Attention("gat", inner, width, 4), wrt))


def test_recompute_wins_for_narrow_inputs_and_reuse_for_narrow_outputs() -> None:
    assert planned(16, 64).choice == "recompute"
    assert planned(256, 8).choice == "gat"
    plan = planned(64, 16)
    assert plan.choice.startswith("gat")
    assert {loser.seconds is not None and loser.seconds >= plan.seconds for loser in plan.rejected} == {True}


def test_the_plan_prints_its_steps_within_a_hundred_columns() -> None:
    lines = planned(16, 64).lines()
    assert any("recompute" in line for line in lines)
    assert max(map(len, lines)) <= 100


class _Counted(nn.Module):
    """A parametrization that counts how often it is read, as spectral_norm does one more iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1
        return weight


@pytest.mark.parametrize("returns_weights", [False, True])
@pytest.mark.parametrize("heads", [2, 17])
def test_a_parametrized_weight_is_read_as_often_as_in_pyg(heads: int, returns_weights: bool) -> None:
    layer, counted = GATConv(4, 2, heads=heads), _Counted()
    nn.utils.parametrize.register_parametrization(layer.lin, "weight", counted)
    x, edge_index = torch.randn(6, 4), torch.randint(0, 6, (2, 12))
    more = {"return_attention_weights": True} if returns_weights else {}
    seen = []
    for model in (layer, plait.compile(layer)):
        before = counted.times
        model(x, edge_index, **more)
        seen.append(counted.times - before)
    assert seen[0] == seen[1]
