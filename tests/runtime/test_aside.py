"""runtime/aside.py: PyG runs what it was timed to run sooner, and only calls that come once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCNConv, GINConv, TransformerConv

import plait
from plait.runtime import aside as module
from plait.runtime.aside import Aside


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_ASIDE", raising=False)


def edges(count: int = 100) -> Tensor:
    return torch.zeros((2, count), dtype=torch.long)


class Clock:
    """A model of two layers whose steps take so long, by whom they are run."""

    def __init__(self, own: float, theirs: float):
        self.now, self.cost = 0.0, {False: own, True: theirs}
        self.aside = Aside(lambda: self.now)

    def step(self, count: int = 100) -> bool:
        listed = edges(count)
        self.aside.calls += 1
        turns = []
        for layer in ("first", "second"):
            left = self.aside.has_left(layer, listed, None)
            turns.append(left or self.aside.is_pygs_turn(layer, listed))
        assert turns[0] == turns[1], "the layers of a step run the same way"
        self.now += self.cost[turns[0]]
        return turns[0]


def test_the_quicker_one_is_chosen() -> None:
    slow, quick = Clock(0.003, 0.001), Clock(0.001, 0.003)
    for _ in range(100):
        slow.step()
        quick.step()
    assert slow.step()
    assert not quick.step()
    assert "by PyG" in next(iter(slow.aside.notes.values()))
    assert not quick.aside.notes


@pytest.mark.parametrize(("own", "rounds"), [(0.001, 1), (0.0019, 4), (0.002, 4), (0.0021, 4), (0.02, 4)])
def test_that_plait_is_clearly_faster_is_seen_after_a_round(own: float, rounds: int) -> None:
    clock, steps = Clock(own, 0.002), rounds * module._BLOCK
    assert sum(clock.step() for _ in range(60)) == (steps if own < 0.00205 else 60 - module._WARM_UP - steps)


@pytest.mark.parametrize("own", [0.0019, 0.002, 0.0021])
def test_near_ties_are_decided_after_as_many_steps_as_said_and_no_sooner(own: float) -> None:
    clock = Clock(own, 0.002)
    for _ in range(module.SETTLED_AFTER - 1):
        clock.step()
    (kind,) = clock.aside._kinds.values()
    assert kind.is_out is None
    clock.step()
    assert kind.is_out is not None


@pytest.mark.parametrize("every", [3, 4, 10])
def test_what_a_loop_does_every_few_steps_decides_nothing(every: int) -> None:
    for begin in range(every):
        clock = Clock(0.0010, 0.0014)
        turns = []
        for number in range(80):
            turns.append(clock.step())
            clock.now += 0.010 * (number % every == begin)
        assert not any(turns[60:]), begin


def test_long_steps_and_small_differences_stay_with_plait() -> None:
    for clock in (Clock(3.0, 1.0), Clock(0.00101, 0.001)):
        assert not any([clock.step() for _ in range(100)][50:])


def test_sizes_and_gradients_are_decided_apart() -> None:
    clock = Clock(0.003, 0.001)
    for _ in range(60):
        clock.step()
    assert clock.step(100)
    assert not clock.step(100_000)
    with torch.no_grad():
        assert not clock.step(100)


def test_a_graph_that_comes_back_is_run_by_its_plan() -> None:
    clock = Clock(0.003, 0.001)
    for _ in range(60):
        clock.step()
    again = edges()
    assert clock.aside.has_left("first", again, None)
    assert clock.aside.has_left("second", again, None)
    assert clock.aside.has_left("first", again, None), "the graph is new in the whole call of the model"
    clock.aside.calls += 1
    assert not clock.aside.has_left("first", again, None)


def test_it_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_ASIDE", "0")
    clock = Clock(0.003, 0.001)
    assert not any(clock.step() for _ in range(100))


def test_a_model_that_steps_aside_says_so_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.nn import GCNConv

    monkeypatch.setattr(module, "_MARGIN", 0.0)  # PyG counts as quicker whatever it takes
    monkeypatch.setattr(module, "_LONGEST_SECONDS", float("inf"))
    layer = GCNConv(4, 3)
    model = plait.compile(layer)
    for seed in range(50):
        torch.manual_seed(seed)
        x, listed = torch.randn(9, 4), torch.randint(0, 9, (2, 20))
        torch.testing.assert_close(model(x, listed), layer(x, listed), rtol=1e-5, atol=1e-6)
    assert "run in PyG" in str(model.plan)
    for _ in range(4):  # the same graph again: seen first by the model at rest, then by its layer
        model(x, listed)
    assert model.plan.layers


def test_a_graph_that_comes_back_is_never_tried_in_pyg() -> None:
    aside = Aside()
    edges = torch.zeros(2, 5, dtype=torch.int64)
    asked = [aside.is_pygs_turn("conv", edges) for _ in range(200)]
    assert not any(asked[1:])


def test_trials_are_over_for_new_graphs_that_plait_is_faster_on() -> None:
    slow, quick = Clock(0.003, 0.001), Clock(0.001, 0.003)
    assert not quick.aside.is_over("first", edges())
    for _ in range(100):
        slow.step()
        quick.step()
    assert not slow.aside.is_over("first", edges())
    large, small = edges(module._SMALL_EDGES + 1), edges()
    for _ in range(20):
        quick.step(module._SMALL_EDGES + 1)
    assert quick.aside.is_over("first", small)
    assert quick.aside.is_over("first", small), "the same layer again in one call of the model"
    assert quick.aside.is_over("first", large)
    quick.aside.calls += 1
    assert not quick.aside.is_over("first", small), "a small graph that comes back may be tried in PyG"
    assert quick.aside.is_over("first", large)
    with torch.no_grad():
        assert not quick.aside.is_over("first", edges())
    assert not quick.aside.is_over("first", None)


def test_whole_calls_rest_when_all_layers_were_left_for_a_while() -> None:
    clock = Clock(0.003, 0.001)
    assert not clock.aside.rests((edges(),))
    for _ in range(100):
        clock.step()
    listed = edges()
    assert clock.aside.rests((torch.zeros(3, 4), listed))
    assert clock.aside.rests((SimpleNamespace(edge_index=edges()),)), "as a Data has it"
    clock.aside.calls += 1
    assert not clock.aside.rests((listed,)), "a graph that comes back is not PyG's"
    assert not clock.aside.rests((edges(100_000),))
    assert not clock.aside.rests((torch.zeros(3, 4),)), "nobody knows what the layers will read"
    with torch.no_grad():
        assert not clock.aside.rests((edges(),))
    clock.step(100_000)
    assert not clock.aside.rests((edges(),)), "a layer was planned"


def test_a_resting_model_is_pygs_until_a_graph_comes_back() -> None:
    layer = GCNConv(3, 2)
    compiled = plait.compile(layer)
    session = compiled._plait_plan_session
    session.aside.notes[(True, 2, False)] = "left for this test"
    x, made = torch.randn(3, 3), [torch.tensor([[0, 1], [1, k % 3]]) for k in range(60)]
    for each in made:
        torch.testing.assert_close(compiled(x, each), layer(x, each))
    calls = session.num_calls
    assert calls < 40
    for _ in range(4):
        torch.testing.assert_close(compiled(x, made[-1]), layer(x, made[-1]))
    assert session.num_calls > calls
    assert session.edges


def test_a_much_slower_way_is_tried_for_one_block_only() -> None:
    clock = Clock(0.010, 0.030)
    assert sum(clock.step() for _ in range(100)) == module._BLOCK
    near = Clock(0.010, 0.011)
    assert sum(near.step() for _ in range(100)) == module._BLOCK * module._ROUNDS


def test_a_small_graph_that_comes_back_is_pygs_in_slow_layers_only() -> None:
    clock, listed = Clock(0.003, 0.001), edges()

    def step(graph: Tensor) -> bool:
        names = {"first": False, "fused": True}  # layers that draw numbers never ask again
        clock.aside.calls += 1
        ways = {n: clock.aside.has_left(n, graph, None) for n in names}
        turn = ways["fused"] or clock.aside.is_pygs_turn("fused", graph, is_tried_again=True)
        clock.now += clock.cost[turn]
        assert not ways["first"]
        return turn

    asked = [step(listed) for _ in range(80)]
    assert not any(asked[: module._WARM_UP])
    assert all(asked[60:])
    large = edges(module._SMALL_EDGES + 1)
    assert not any(step(large) for _ in range(80)), "passes of their own pay on it"
    assert clock.aside.reason.startswith("graphs of up to 128 edges run in PyG: a step took 3.00 ms")


def test_training_and_inference_in_turns_on_a_small_graph_are_decided_too() -> None:
    aside_clock, listed = Clock(0.003, 0.001), edges()
    aside = aside_clock.aside
    turns: list[bool] = []
    for _ in range(80):
        for has_gradients in (True, False):
            aside.calls += 1
            with torch.set_grad_enabled(has_gradients):
                turns.append(aside.has_left("a", listed, None) or aside.is_pygs_turn("a", listed, True))
            aside_clock.now += aside_clock.cost[turns[-1]]
    assert all(turns[-20:])


def test_sizes_that_take_turns_are_decided_too() -> None:
    """Batches of small graphs fall on both sides of a power of two."""
    slow, quick = Clock(0.003, 0.001), Clock(0.001, 0.003)
    for _ in range(50):
        for count in (100, 200):
            slow.step(count)
            quick.step(count)
    assert slow.step(100)
    assert slow.step(200)
    assert not any(quick.step(count) for count in (100, 200))


def test_calls_before_a_backward_pass_are_taken_together() -> None:
    """A model is called twice, then gradients are computed: PyG is faster in the calls, plait in all."""
    clock = Clock(0.0, 0.0)
    turns = []
    for k in range(120):
        clock.cost = {False: 0.002, True: 0.001} if k % 2 else {False: 0.003, True: 0.006}
        turns.append(clock.step())
    assert not any(turns[-20:])


def test_features_are_no_edges() -> None:
    aside = Clock(0.003, 0.001).aside
    assert not any(aside.is_pygs_turn("fa", torch.zeros(4, 5), True) for _ in range(100))
    assert not aside._kinds


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_layer_slower_on_a_small_graph_is_left_and_says_so(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MARGIN", 0.0)  # PyG counts as quicker whatever it takes
    monkeypatch.setattr(module, "_CLEAR", float("inf"))
    layer = TransformerConv(4, 3, heads=2, dropout=dropout)
    model, listed = plait.compile(layer), torch.randint(0, 9, (2, 20))
    x = torch.randn(9, 4)
    for _ in range(60):
        out = model(x, listed)
        out.sum().backward()
    if dropout:  # other numbers are drawn than PyG's: a clock must not choose between the two
        assert model.plan.layers
        return
    torch.testing.assert_close(out, layer(x, listed), rtol=1e-5, atol=1e-6)
    assert not model.plan.layers
    assert "graphs of up to 32 edges run in PyG" in model.plan.not_planned[0].reason
    assert model(x, torch.randint(0, 9, (2, 6000))).shape == (9, 6)
    assert model.plan.layers


def test_a_matrix_expression_slower_on_a_small_graph_is_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MARGIN", 0.0)  # PyG counts as quicker whatever it takes
    monkeypatch.setattr(module, "_CLEAR", float("inf"))
    layer = GINConv(nn.Linear(4, 3))
    model, listed, x = plait.compile(layer), torch.randint(0, 9, (2, 20)), torch.randn(9, 4)
    for _ in range(60):
        out = model(x, listed)
        out.sum().backward()
    torch.testing.assert_close(out, layer(x, listed), rtol=1e-5, atol=1e-6)
    assert "graphs of up to 32 edges run in PyG" in model.plan.not_planned[0].reason
    model(x, torch.randint(0, 9, (2, 6000)))
    assert model.plan.layers


def test_nothing_is_made_of_the_graph_of_an_explained_layer() -> None:
    model, listed, x = plait.compile(GCNConv(4, 3)), torch.randint(0, 9, (2, 20)), torch.randn(9, 4)
    explainer = Explainer(
        model, GNNExplainer(epochs=40), explanation_type="model", edge_mask_type="object",
        node_mask_type="attributes",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )  # fmt: skip
    target = model(x, listed).argmax(dim=1)
    session = model._plait_plan_session
    session.edges.clear()
    calls = session.num_calls
    explainer.algorithm(model, x, listed, target=target, index=0)
    assert not session.edges
    assert session.num_calls == calls + 1, "the model rests while its layers are explained"
    assert "an explainer masks its messages" in model.plan.not_planned[0].reason
    model(x, listed)
    assert session.edges


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_call_left_to_pyg_is_recognised_by_its_edges(
    is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the layers nor the edges are looked at any more, until something else comes."""
    layer = GCNConv(3, 2)
    compiled = plait.compile(layer)
    seats, session = compiled._plait_seats, compiled._plait_plan_session
    listed, x = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.randn(3, 3)
    graph = torch.sparse_coo_tensor(listed, torch.ones(3), (3, 3)).to_sparse_csr() if is_sparse else listed
    other = edges(100_000)
    for with_grad in (True, False):
        session.aside.notes[with_grad, module._kind(graph)[1], True] = "left for this test"
        session.aside._kinds[with_grad, module._kind(graph)[1], True] = module._Kind(layers={"model GCNConv"})
    for _ in range(module.RESTS_AFTER + 3):
        torch.testing.assert_close(compiled(x, graph), layer(x, graph))
    calls, found = session.num_calls, []
    monkeypatch.setattr(session.aside, "rests", lambda args: found.append(args))
    torch.testing.assert_close(compiled(x, graph), layer(x, graph))
    assert session.num_calls == calls
    assert not found
    assert seats.rested[0] == 1
    for call in (lambda: compiled(x, edge_index=graph), lambda: compiled(torch.randn(100, 3), other % 100)):
        call()
        assert found.pop()
    with torch.no_grad():
        compiled(x, graph)
    assert found.pop()


@pytest.mark.parametrize("draws", [False, True])
def test_pygs_steps_on_a_graph_that_comes_back_are_timed_as_whole_calls(draws: bool) -> None:
    """As such calls run once they are left; only after one in which every layer was left."""
    clock, listed = Clock(0.002, 0.002), edges()
    whole = by_layer = 0
    for _ in range(60):
        clock.aside.calls += 1
        if clock.aside.rests((torch.zeros(3, 4), listed)):
            whole += 1
        elif clock.aside.is_pygs_turn("first", listed, is_tried_again=True):
            by_layer += 1
            if draws:  # a layer with dropout is not tried
                clock.aside.planned_in = clock.aside.calls
        clock.now += 0.002
    rounds = module._ROUNDS
    assert (whole, by_layer) == (
        (0, rounds * module._BLOCK) if draws else (rounds * (module._BLOCK - 1), rounds)
    )
