"""runtime/budget.py: what a compiled model keeps is bounded in bytes, over thousands of steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import plait
from plait.errors import InputError
from plait.runtime.budget import VARIABLE, bytes_in, cache_limit
from plait.runtime.constants import from_dense
from plait.runtime.session import Session

NODES, EDGES, WIDTH = 40, 160, 4
STEPS = 2000


def edges(seed: int, count: int = EDGES) -> Tensor:
    return torch.randint(0, NODES, (2, count), generator=torch.Generator().manual_seed(seed))


def session_of(model: Any) -> Session:
    found: Session = model._plait_plan_session
    return found


def kept(session: Session) -> int:
    """Everything that is counted, in pieces: none of these may grow without end."""
    graphs = list(session.edges.values())
    parts = ("constants", "runs", "restricted", "calls", "plans", "weights")
    counts = [len(getattr(graph, part)) for graph in graphs for part in parts]
    return sum(counts) + len(graphs) + len(session._calls) + len(session.watched) + len(session.by_size)


# What changes from step to step ---------------------------------------------------------------------------

Loop = Callable[[Any, int], object]


def new_weights() -> tuple[nn.Module, Data, Loop]:
    x, edge_index = torch.randn(NODES, WIDTH), edges(0)
    return (
        GCNConv(WIDTH, 3),
        Data(x=x, edge_index=edge_index),
        lambda m, k: m(x, edge_index, torch.rand(EDGES)),
    )


def weights_by_data() -> tuple[nn.Module, Data, Loop]:
    x, edge_index, weight = torch.randn(NODES, WIDTH), edges(0), torch.rand(EDGES)

    def step(model: Any, k: int) -> None:
        weight.data = torch.rand(EDGES)
        model(x, edge_index, weight)

    return GCNConv(WIDTH, 3), Data(x=x, edge_index=edge_index), step


def new_features() -> tuple[nn.Module, Data, Loop]:
    edge_index = edges(0)
    data = Data(x=torch.randn(NODES, WIDTH), edge_index=edge_index)
    return SAGEConv(WIDTH, 3), data, lambda m, k: m(torch.randn(NODES, WIDTH), edge_index)


def masked_features() -> tuple[nn.Module, Data, Loop]:
    x, edge_index = torch.randn(NODES, WIDTH), edges(0)

    def step(model: Any, k: int) -> None:
        x[k % NODES] = 0
        model(x, edge_index)

    return GCNConv(WIDTH, 3), Data(x=x, edge_index=edge_index), step


def new_graphs() -> tuple[nn.Module, Data, Loop]:
    x = torch.randn(NODES, WIDTH)
    return (
        GINConv(nn.Linear(WIDTH, 3)),
        Data(x=x, edge_index=edges(0)),
        lambda m, k: m(x, edges(k, 100 + k % 60)),
    )


def new_graphs_attention() -> tuple[nn.Module, Data, Loop]:
    x = torch.randn(NODES, WIDTH)
    return GATConv(WIDTH, 3), Data(x=x, edge_index=edges(0)), lambda m, k: m(x, edges(k, 100 + k % 60))


LOOPS = [new_weights, weights_by_data, new_features, masked_features, new_graphs, new_graphs_attention]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("with_rows", [False, True], ids=["all", "rows"])
def test_nothing_grows_when_something_changes_at_every_step(loop: Any, with_rows: bool) -> None:
    torch.manual_seed(0)
    layer, data, step = loop()
    rows = {"rows": torch.arange(0, NODES, 3)} if with_rows else {}
    model = plait.compile(layer, data, **rows)
    session = session_of(model)
    half, is_slow = STEPS // 12, loop is new_graphs_attention
    for k in range(60):
        step(model, k)
    gc.collect()
    pieces, size = kept(session), session.cache_bytes
    for k in range(60, half // 4 if is_slow else half):
        step(model, k)
    gc.collect()
    assert kept(session) <= pieces + 4
    assert session.cache_bytes <= 1.2 * size + 4096


def test_two_thousand_steps_with_new_weights_hold_what_sixty_do() -> None:
    layer, data, step = new_weights()
    model = plait.compile(layer, data, rows=torch.arange(5))
    session = session_of(model)
    for k in range(60):
        step(model, k)
    pieces, size = kept(session), session.cache_bytes
    for k in range(60, STEPS):
        step(model, k)
    assert kept(session) <= pieces + 2
    assert session.cache_bytes <= 1.1 * size


# What the user keeps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["weights", "graphs"])
def test_tensors_that_stay_are_kept_up_to_the_limit(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    limit = 200_000
    monkeypatch.setenv(VARIABLE, str(limit))
    layer = GCNConv(WIDTH, 3)
    model, x, edge_index = plait.compile(layer), torch.randn(NODES, WIDTH), edges(0, 1000)
    held: list[Tensor] = []
    for k in range(100):
        held.append(torch.rand(1000) if what == "weights" else edges(k, 1000))
        given = (edge_index, held[-1]) if what == "weights" else (held[-1],)
        made = model(x, *given)
        assert session_of(model).cache_bytes <= limit
    torch.testing.assert_close(made, layer(x, *given), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x, edge_index), layer(x, edge_index), rtol=1e-4, atol=1e-5)


def test_a_limit_of_nothing_keeps_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    layer = nn.ModuleList([GCNConv(WIDTH, WIDTH), SAGEConv(WIDTH, 3)])
    models, x = [plait.compile(part) for part in layer], torch.randn(NODES, WIDTH)
    for k in range(5):
        for model, part in zip(models, layer, strict=True):
            torch.testing.assert_close(model(x, edges(k)), part(x, edges(k)), rtol=1e-4, atol=1e-5)


def test_what_belongs_to_a_tensor_goes_with_it() -> None:
    model, x = plait.compile(GCNConv(WIDTH, 3)), torch.randn(NODES, WIDTH)
    edge_index, weight = edges(0), torch.rand(EDGES)
    model(x, edge_index, weight)
    session = session_of(model)
    (known,) = session.edges.values()
    (constants,) = known.constants.values()
    gone = [weakref.ref(known.graph), weakref.ref(constants), weakref.ref(edge_index), weakref.ref(weight)]
    del known, constants, edge_index, weight
    model(x, edges(1))
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


# Counting ---------------------------------------------------------------------------------------------------


def test_a_storage_is_counted_once() -> None:
    whole = torch.zeros(100)
    assert bytes_in([whole, whole[3:], {"again": whole}]) == 400
    view = from_dense(torch.eye(8))
    assert bytes_in(view) >= 8 * 4 * 2
    before = bytes_in(view)
    view.operands(is_transposed=True)
    assert bytes_in(view) > before


def test_the_limit_is_a_share_of_memory_an_argument_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert cache_limit() >= 256 << 20
    assert cache_limit(5) == 5
    monkeypatch.setenv(VARIABLE, "123")
    assert cache_limit() == 123
    for text in ("many", "-1"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(InputError, match=VARIABLE):
            cache_limit()
