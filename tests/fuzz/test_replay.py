"""The fuzzer itself: two worlds of PyG never differ, a planted mistake is found and told as a script."""

from __future__ import annotations

import contextlib
import copy
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

from tests.fuzz import replay as worlds
from tests.fuzz.layers import LAYERS
from tests.fuzz.parts import apart
from tests.fuzz.replay import Difference, Tally, replay
from tests.fuzz.rounding import in_double
from tests.fuzz.rules import RULES, Facts
from tests.fuzz.scripts import _without_known, scripts

SCRIPT = """
model = Chain(GCNConv(4, 4), F.relu)
edge_index, edge_weight, edge_attr, edge_type = graph('plain', 7, seed=0)
x = features(7, 4, seed=0)
original = model; model = plait.compile(model)
out = model(x, edge_index); backward(out)
{edit}
out = model(x, edge_index); backward(out)
"""


def compiles_with(monkeypatch: pytest.MonkeyPatch, compile: Any) -> None:
    monkeypatch.setattr(worlds, "plait", SimpleNamespace(compile=compile, explain=lambda *_, **__: None))


def keep_first(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    """A compiler that answers every call like the first."""
    first: list[Any] = []
    run = model.forward

    def forward(*arguments: Any) -> Any:
        first.append(run(*arguments))
        return first[0]

    model.forward = forward  # type: ignore[method-assign]
    return model


def test_two_worlds_of_pyg_do_not_differ_and_most_calls_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_with(monkeypatch, lambda model, *_, **__: model)
    tally = Tally()

    @settings(
        max_examples=60, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(scripts())
    def run(script: str) -> None:
        replay(script, tally)

    run()
    assert tally.answered > 3 * tally.refused


def test_a_stale_answer_is_found_and_told_as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_with(monkeypatch, keep_first)
    with pytest.raises(Difference, match="out: off by") as found:
        replay(SCRIPT.format(edit="x.data.mul_(2)"))
    text = str(found.value).partition("replay('''")[2].partition("''')")[0]
    with pytest.raises(Difference, match="out: off by"):
        replay(text)


def wrong_under_autocast(model: nn.Module) -> nn.Module:
    """A compiler whose answers are half as large again where autocast is on."""
    run = model.forward

    def forward(*arguments: Any) -> Any:
        return run(*arguments) * (1.5 if torch.is_autocast_enabled("cpu") else 1)

    model.forward = forward  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("edit", ["pass", "x.data[:1] = float('nan')", "x.data[:1] = 3"])
def test_a_mistake_under_autocast_is_not_taken_for_rounding(
    edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SCRIPT.format(edit=edit) + (
        "with torch.autocast('cpu', dtype=torch.bfloat16): out = model(x, edge_index); backward(out)\n"
    )
    compiles_with(monkeypatch, lambda model: model)
    replay(script)
    compiles_with(monkeypatch, wrong_under_autocast)
    with pytest.raises(Difference, match="off by"):
        replay(script)


def test_gradients_that_vanish_but_for_rounding_are_no_difference_under_autocast() -> None:
    # a bias before a norm over nodes: neither PyG nor plait has a digit of its gradient in 16 bits
    replay("""
model = Chain(SSGConv(1, 4, alpha=0.1), InstanceNorm(4), GatedGraphConv(4, num_layers=2), hold='bound')
edge_index, edge_weight, edge_attr, edge_type = graph('loops', 7, seed=2)
x = features(7, 1, seed=2)
original = model; model = plait.compile(model)
hook = model.register_forward_pre_hook(twice)
with torch.autocast('cpu', dtype=torch.bfloat16): out = model(x, edge_index, edge_weight); backward(out)
""")


def test_a_script_in_double_precision_answers_on_new_graphs_and_under_autocast() -> None:
    script = SCRIPT.format(
        edit="x, edge_index, edge_weight, edge_attr, edge_type = batch(1, 4); model.float(); pass"
    )
    script += "with torch.autocast('cpu', dtype=torch.bfloat16): out = model(x, edge_index)"
    tally = Tally()
    worlds._replay("\n".join(in_double(script.strip().splitlines())), tally)
    assert (tally.answered, tally.refused) == (3, 0)


def test_modes_gradients_and_inputs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_with(monkeypatch, lambda model: copy.deepcopy(model))
    with pytest.raises(Difference, match="modes"):
        replay(SCRIPT.format(edit="original.eval()"))
    compiles_with(monkeypatch, lambda model: model.requires_grad_(False))
    with pytest.raises(Difference, match="requires_grad is False"):
        replay(SCRIPT.format(edit="pass"))


def test_what_both_worlds_refuse_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_with(monkeypatch, lambda model: model)
    tally = Tally()
    replay(SCRIPT.format(edit="out = model.no_such_name"), tally)
    assert (tally.answered, tally.refused) == (2, 1)


def test_an_error_in_one_world_only_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module) -> nn.Module:
        raise ValueError("no")

    compiles_with(monkeypatch, refuse)
    with pytest.raises(Difference, match="only the compiled model raises ValueError"):
        replay(SCRIPT.format(edit="pass"))


def test_every_layer_and_rule_is_a_line_of_python() -> None:
    facts = Facts(
        frozenset(LAYERS),
        frozenset({"chain", "edge list", "sparse", "weight", "attr", "lookahead", "bare"}),
        "x",
        4,
    )
    assert all(rule.holds(facts) for rule in RULES)
    for rule in RULES:
        compile(rule.line.format(a="x", w=4, c="x", k=0, g="hub", n=7, plain="pass"), "<rule>", "exec")


NAN_BEHIND_A_RELU = """
model = PNA(4, 4, num_layers=2, aggregators=['mean'], scalers=['identity'], deg=torch.tensor([1, 4, 2]))
edge_index, edge_weight, edge_attr, edge_type = graph('no edges', 7, seed=0)
x = features(7, 4, seed=0)
original = model; model = plait.compile(model)
next(model.parameters()).data.view(-1)[:1] = float('nan')
out = torch.autograd.grad(model(x, edge_index).sum(), wanted(model), allow_unused=True)
"""
WRITTEN_UNDER_A_HOOK = """
model = Chain(nn.Linear(4, 4), InPlace(GINConv(MLP([4, 4, 4], norm=None), eps=0.3, train_eps=True)))
edge_index, edge_weight, edge_attr, edge_type = graph('plain', 7, seed=0)
x = features(7, 4, seed=0)
original = model; model = plait.compile(model)
hook = layer(model).register_full_backward_pre_hook(twice)
out = model(x, edge_index); backward(out)
"""
EDGES_BEYOND_THE_ROWS = """
model = AGNNConv()
edge_index, edge_weight, edge_attr, edge_type = graph('plain', 7, seed=0)
x = features(7, 4, seed=0)
original = model; model = plait.compile(model)
out = (lambda x: model(x, edge_index))(x.detach()[:-1])
"""
MORE_ROWS_THAN_THE_MATRIX = """
model = SGConv(4, 4, K=0)
edge_index, edge_weight, edge_attr, edge_type = graph('plain', 5, seed=0)
x = features(5, 4, seed=0)
edge_index = adj_t(edge_index, 5, 'csr')
original = model; model = plait.compile(model)
x = torch.cat([x, x])
out = model(x, edge_index); backward(out)
"""
ROWS_CUT_INTO_MORE = """
model = PNAConv(2, 4, aggregators=['mean'], scalers=['identity'], deg=torch.tensor([1, 4, 2]))
edge_index, edge_weight, edge_attr, edge_type = graph('plain', 7, seed=0)
x = features(7, 4, seed=0)
original = model; model = plait.compile(model)
out = model(x, edge_index); backward(out)
"""
NAN_IN_GRADIENTS_OF_THREADS = """
model = PNAConv(4, 4, aggregators=['max', 'std'], scalers=['identity'], deg=torch.tensor([1, 4, 2]))
edge_index, edge_weight, edge_attr, edge_type = graph('no edges', 7, seed=2)
x = features(7, 4, seed=2)
original = model; model = plait.compile(model)
x.data[:1] = float('nan')
out = apart(model, x, edge_index)
"""
COMPILED_LAYER_REPLACED = """
model = Chain(GCNConv(4, 4), hold='parent')
edge_index, edge_weight, edge_attr, edge_type = graph('plain', 7, seed=0)
x = features(7, 4, seed=0)
original = model; model = plait.compile(model)
model.parts[0] = plait.compile(model.parts[0])
model.replace(0, layer(copy.deepcopy(model)))
out = model(x, edge_index); backward(out)
"""


@pytest.mark.parametrize(
    "script",
    [
        NAN_BEHIND_A_RELU,
        WRITTEN_UNDER_A_HOOK,
        EDGES_BEYOND_THE_ROWS,
        MORE_ROWS_THAN_THE_MATRIX,
        ROWS_CUT_INTO_MORE,
        NAN_IN_GRADIENTS_OF_THREADS,
        COMPILED_LAYER_REPLACED,
    ],
)
def test_what_is_no_difference(script: str) -> None:
    replay(script)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_threads_do_not_share_the_graph_of_a_weight_that_a_hook_makes() -> None:
    model, meeting = nn.utils.weight_norm(nn.Linear(4, 4)), threading.Barrier(2)

    def meet(*_: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)

    model.register_forward_pre_hook(meet)  # after the hook that sets the weight
    assert len(apart(model, torch.ones(3, 4))) == 2


def test_what_crashes_in_pyg_is_not_drawn() -> None:
    line = "out = model(x); hook = out.register_hook(lambda g: 2 * g); backward(out)"
    assert any("hook = out.register_hook(lambda g: 2 * g); " in rule.line for rule in RULES)
    for layer, edit, is_kept in (
        ("SuperGATConv", "model = model.half()", False),
        ("SuperGATConv", "out = torch.func.jvp(model, (x,), (x,))", False),
        ("SuperGATConv", "model = model.float()", True),
        ("GATConv", "model = model.half()", True),
    ):
        script = f"model = {layer}(4, 4)\n{edit}\n{line}"
        assert ("register_hook" in _without_known(script)) == is_kept


@pytest.mark.parametrize("call", ["out = torch.func.jvp(f, (x,), (x,))", "out = torch.func.jacrev(f)(x)"])
def test_layers_without_a_size_are_not_differentiated_by_torch_func(call: str) -> None:
    assert _without_known(f"model = GCNConv(-1, 4)\n{call}\nx = 1") == "model = GCNConv(-1, 4)\nx = 1"
    assert call in _without_known(f"model = GCNConv(4, 4)\n{call}")


@pytest.mark.parametrize(("layer", "is_kept"), [("PNAConv", False), ("EdgeConv", False), ("SAGEConv", True)])
def test_messages_of_exactly_zero_are_not_made_where_ties_are_counted_otherwise(
    layer: str, is_kept: bool
) -> None:
    line = "[p.data.clamp_(min=0) for p in model.parameters()]"
    assert (line in _without_known(f"model = {layer}(4, 4)\n{line}")) == is_kept


def test_an_analysis_may_find_what_pyg_finds_in_training() -> None:
    # a ReLU in place overwrites what the gradient of a minimum reads
    replay("""
model = Chain(EdgeConv(nn.Linear(2 * 4, 4), aggr='min'), torch.relu_)
edge_index, edge_weight, edge_attr, edge_type = graph('cliques', 5, seed=2)
x = features(5, 4, seed=2)
model = model.half(); x = x.half()
original = model; model = plait.compile(model)
plait.explain(model, data(x, edge_index), analyze=True)
""")
