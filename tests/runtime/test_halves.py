"""runtime/halves.py: rows without remote neighbours first, gradients of the others first, same values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plait.errors import InputError
from plait.graph import Graph
from plait.ir import Barrier, Sparse
from plait.ir.build import propagation
from plait.plan.exchange import Link
from plait.pyg.layers.base import bias, features, weight
from plait.runtime.constants import Constants
from plait.runtime.deferred import Deferred
from plait.runtime.halves import Cut, rows_ahead
from plait.runtime.spread import RankConstants, Runs

OWN, HALO, NODES = 300, 60, 420
INNER = 200  # rows whose neighbours are here


class _Sent:
    def __init__(self, rows: Tensor):
        self.rows = rows


class _Peers:
    """Rank 0 of two; rows of the halo and gradients from the other rank are always the same."""

    rank, size, begin, num_rows, num_shared, num_nodes = 0, 2, 0, OWN, HALO, NODES
    columns = np.arange(OWN + HALO)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.halo = torch.randn(HALO, 6, generator=generator)
        self.back = torch.randn(HALO, 6, generator=generator)
        self.events: list[str] = []
        self.gradients: list[Tensor] = []  # of the halo, as sent
        self.dropped: list[Any] = []

    def pick(self, x: Tensor) -> Tensor:
        return x[OWN - HALO :]

    def send(self, x: Tensor, is_back: bool) -> _Sent:
        self.events.append("send back" if is_back else "send")
        if is_back:
            self.gradients.append(x.clone())
        return _Sent(self.back if is_back else self.halo)

    def receive(self, sent: _Sent) -> Tensor:
        self.events.append("receive")
        return sent.rows

    def receive_back(self, sent: _Sent, out: Tensor) -> Tensor:
        self.events.append("receive back")
        out[OWN - HALO :] += sent.rows
        return out

    def let_go(self, values: Iterable[Any]) -> None:
        self.dropped += [value for value in values if isinstance(value, _Sent)]

    def share_of(self, width: int) -> int:
        return width // 2

    def agree(self, prices: Mapping[str, float]) -> Mapping[str, float]:
        return prices


class _Layer:
    """A X W + b on one rank of two, by plait and in torch."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        target = np.concatenate((rng.integers(0, OWN, 1500), rng.integers(INNER, OWN, 200)))
        source = np.concatenate((rng.integers(0, OWN, 1500), rng.integers(OWN, OWN + HALO, 200)))
        target[-1], source[-1] = INNER, OWN
        graph = Graph.from_edge_index(source, target, NODES)
        self.matrix = torch.zeros(OWN, OWN + HALO)
        self.matrix.index_put_(
            (torch.from_numpy(target), torch.from_numpy(source)), torch.ones(1700), accumulate=True
        )
        self.peers = _Peers()
        peers: Any = self.peers
        self.runs = Runs(peers, Link(1e3, 1e-4, 1), "nodes, overlapped")  # a slow network: halves pay
        self.rank = RankConstants(Constants(graph, None, {}, torch.float32), peers)
        self.forms = ((propagation() @ features()) @ weight() + bias(),)
        torch.manual_seed(2)
        self.x, self.w, self.v = (torch.randn(*s, requires_grad=True) for s in ((OWN, 6), (6, 6), (6, 6)))
        self.b = torch.randn(6, requires_grad=True)

    def __call__(self) -> Tensor:
        given = {"X": self.x, "W": self.w, "b": self.b}
        return self.runs.apply("layer", self.rank, self.forms, given, False)

    def expected(self) -> Tensor:
        return self.matrix @ torch.cat((self.x, self.peers.halo)) @ self.w + self.b

    def gradients(self, out: Tensor) -> list[Tensor]:
        """Those of a sum over all rows, with what the other rank sends."""
        wrt = (self.x, self.w, self.b, self.v)
        return [*torch.autograd.grad(out, wrt, torch.full_like(out, 0.5), allow_unused=True)]

    def check(self, out: Tensor, expected: Tensor) -> None:
        """Values and gradients are those of torch; the other rank's rows are added to the gradient of x."""
        torch.testing.assert_close(out.detach().clone(), expected.detach(), rtol=1e-4, atol=1e-4)
        found, wanted = self.gradients(out), self.gradients(expected)
        wanted[0] = wanted[0].clone()
        wanted[0][OWN - HALO :] += self.peers.back
        for one, two in zip(found, wanted, strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-3)


def test_the_halo_is_awaited_when_all_rows_are_needed() -> None:
    layer = _Layer()
    out = layer()
    assert isinstance(out, Deferred)
    after = functional.linear(out.relu(), layer.v)
    assert layer.peers.events == ["send"]
    assert isinstance(after, Deferred)
    assert after.shape == (OWN, 6)
    assert after.detach().abs().max() > 0
    assert layer.peers.events == ["send", "receive"]
    layer.check(after, functional.linear(layer.expected().relu(), layer.v))


def test_gradients_of_the_halo_are_sent_before_those_of_inner_rows_are_computed() -> None:
    layer = _Layer()
    after = layer().relu()
    rows = rows_ahead(after)
    assert rows is not None
    assert rows.held.shape[0] == INNER
    first, others = rows.held.square(), rows.others().square()
    first.register_hook(lambda grad: layer.peers.events.append("inner rows"))  # type: ignore[no-untyped-call]
    (first.sum() + others.sum()).backward()  # type: ignore[no-untyped-call]
    assert layer.peers.events == ["send", "receive", "send back", "inner rows", "receive back"]
    grad = 2 * layer.expected().relu()
    sent = layer.matrix[:, OWN:].t() @ grad @ layer.w.t()
    torch.testing.assert_close(layer.peers.gradients[0], sent.detach(), rtol=1e-4, atol=1e-2)


def test_whatever_follows_the_layer_sees_the_same_matrix() -> None:
    layer = _Layer()
    follows = [
        lambda h: h,
        lambda h: h.relu() + h.tanh(),  # two functions of the same rows
        lambda h: h.relu().sum(0, keepdim=True) + h,  # of all rows, after a function of some
        lambda h: functional.dropout(h, 0.0, True).relu_(),
        lambda h: _Doubled.apply(h.tanh()),  # below torch's functions
        lambda h: torch.cat((h, h.relu()), dim=1),
        lambda h: h[:7],
        lambda h: h[:0],
        lambda h: h.flip(0),
    ]
    for follow in follows:
        layer.check(follow(layer()), follow(layer.expected()))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_weights_are_those_of_the_call() -> None:
    layer = _Layer()
    after = functional.linear(layer(), layer.v)
    expected = functional.linear(layer.expected(), layer.v.detach().clone())
    with torch.no_grad():
        layer.v.add_(1.0)  # before the other rows were computed
    torch.testing.assert_close(after.detach().clone(), expected.detach(), rtol=1e-4, atol=1e-4)


def test_a_second_pass_through_the_same_graph_sends_again() -> None:
    layer = _Layer()
    out = layer().relu()
    total = out.sum()
    one = torch.autograd.grad(total, (layer.x, layer.w), retain_graph=True)
    two = torch.autograd.grad(total, (layer.x, layer.w))
    torch.testing.assert_close(one, two)
    assert layer.peers.events.count("send back") == 2


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    for name in "xwb":
        layer = _Layer()
        setattr(layer, name, getattr(layer, name).detach())
        wrt = [value for value in (layer.x, layer.w, layer.b) if value.requires_grad]
        found = torch.autograd.grad(layer().relu().sum(), wrt)
        expected = [*torch.autograd.grad(layer.expected().relu().sum(), wrt)]
        if name != "x":
            expected[0] = expected[0].clone()
            expected[0][OWN - HALO :] += layer.peers.back
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-2)


def test_rows_that_nobody_waits_for_are_let_go() -> None:
    layer = _Layer()
    layer()
    assert len(layer.peers.dropped) == 1
    assert layer.peers.events == ["send"]


def test_nothing_of_a_step_is_left_to_the_garbage_collector() -> None:
    """In a cycle every step would be computed in fresh memory."""
    layer, gone = _Layer(), []
    gc.collect()
    gc.disable()
    try:
        matrix = functional.linear(layer().relu(), layer.v) + 0.5
        rows = rows_ahead(matrix)
        assert rows is not None
        gone += [weakref.ref(rows), *map(weakref.ref, rows.calls)]
        (rows.held.sum() + rows.others().sum()).backward()  # type: ignore[no-untyped-call]
        rows = None
        matrix.sum()  # whole now
        del matrix
        assert [found() for found in gone] == [None, None]
    finally:
        gc.enable()


def test_nothing_is_cut_without_gradients_or_where_it_does_not_pay() -> None:
    layer = _Layer()
    with torch.no_grad():
        assert type(layer()) is Tensor
    layer = _Layer()
    layer.runs.link = Link(1e12, 0.0, 1)
    assert type(layer()) is Tensor


def test_hooks_on_rows_that_were_used_are_refused_with_the_next_step() -> None:
    layer = _Layer()
    out, seen = layer(), []
    out.register_hook(seen.append)  # type: ignore[no-untyped-call]
    out.relu().sum().backward()
    assert seen[0].shape == (OWN, 6)
    out = layer()
    kept = out.relu()
    with pytest.raises(InputError, match="right after the layer"):
        out.register_hook(seen.append)  # type: ignore[no-untyped-call]
    assert kept.shape == (OWN, 6)


def test_inner_rows_come_before_the_first_with_a_remote_neighbour() -> None:
    layer = _Layer()
    cut = Cut.of(layer.rank.matrix(Barrier("remote", Sparse("A", "N", "N"))))
    assert (cut.count, cut.num_rows) == (INNER, OWN)
    assert not cut.is_all_of(torch.arange(INNER))
