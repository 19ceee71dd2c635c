"""A printed plan: what is done and why, ties called ties, no line too long, colour only on a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import plait
from plait.cost.machine import default_profile
from plait.plan import printed
from plait.plan.plan import LayerPlan, Plan, Rejected
from plait.runtime.machine import using_machine
from tests.plan.expressions import LAYERS
from tests.plan.test_plan import layer

GOLDEN = Path(__file__).parents[1] / "golden"


class Net(nn.Module):
    """Two layers with a ReLU between them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


MODELS = {
    "gcn": lambda: Net(GCNConv(600, 16), GCNConv(16, 4)),
    "gat": lambda: Net(GATConv(600, 8, heads=2), GATConv(16, 4)),
    "sage": lambda: Net(SAGEConv(600, 16), SAGEConv(16, 4)),
}


def data() -> Data:
    """A graph of 500 nodes and 3,000 edges with features that are mostly zeros; the same at every call."""
    k = torch.arange(3000)
    x = torch.zeros(500, 600)
    x[torch.arange(500).repeat(6), (torch.arange(3000) * 37) % 600] = 1.0
    return Data(x=x, edge_index=torch.stack([(k * 7919) % 500, (k * 104729 + k // 500) % 500]))


@pytest.fixture
def built_in() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with using_machine(default_profile()):
        yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("built_in")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_print_is_what_it_was(name: str) -> None:
    plan = plait.explain(MODELS[name](), data())
    text = str(replace(plan, warnings=())) + "\n"
    path = GOLDEN / f"plan-{name}.txt"
    # of two next best plans 1% apart either may be named, depending on what the process planned before
    assert _without_margins(text) == _without_margins(path.read_text(encoding="utf-8"))


def _without_margins(text: str) -> str:
    return re.sub(r"\d+% slower", "slower", text)


@pytest.mark.usefixtures("built_in")
def test_the_print_says_what_is_done_and_why() -> None:
    text = str(plait.explain(MODELS["gcn"](), data()))
    assert (
        "Aggregate once before training, then only multiply by W: x never changes and is mostly zeros."
        in text
    )
    assert "Multiply by W first, then aggregate: gathering 4 columns per edge is cheaper than 16." in text
    assert "fold(" not in text


@pytest.mark.usefixtures("built_in")
def test_a_gradient_has_the_size_of_its_weight() -> None:
    assert "gradient of W (600 x 20)" in str(plait.explain(MODELS["gat"](), data()))


def priced(seconds: float, *others: float) -> LayerPlan:
    losers = tuple(Rejected(f"c{k}", s, 1, "dearer", f"do {k}") for k, s in enumerate(others))
    return replace(layer("gcn"), seconds=seconds, rejected=losers)


def _doing(plan: LayerPlan, *texts: str) -> LayerPlan:
    losers = zip(plan.rejected, texts, strict=True)
    return replace(plan, rejected=tuple(replace(loser, words=text) for loser, text in losers))


def test_a_tie_is_called_a_tie_and_no_loser_is_cheaper() -> None:
    text = printed.next_best(priced(1.0, 0.97, 1.05, 2.0))
    assert text == "A tie (predicted times within 10%) with: do 0. Next best: do 2, 2.0x slower."
    assert printed.next_best(priced(1.0)) == ""
    assert printed.next_best(_doing(priced(1.0, 1.05, 2.0, 3.0), "do it", "do it", "do more")) == (
        "A tie (predicted times within 10%) with: do it. Next best: do more, 3.0x slower."
    )
    assert printed.next_best(_doing(priced(1.0, 1.05, 2.0), "do it", "do it")).endswith(
        "Next best: a variant of one of these, 2.0x slower."
    )
    assert printed.next_best(priced(1.0, 30.0)) == "Next best: do 0, 30x slower."


def test_the_rejected_of_a_search_never_cost_less_by_their_words() -> None:
    for name in sorted(LAYERS):
        for loser in layer(name).rejected:
            assert "0.9" not in loser.why
            assert "1.00 x" not in loser.why


def test_repr_is_one_line_and_html_escapes() -> None:
    plan = Plan((layer("gcn"),), notes=("a < b",), model="GCN")
    assert "\n" not in repr(plan)
    assert repr(plan).startswith("<Plan of GCN: 1 planned layer, ")
    page = plan._repr_html_()
    assert "a &lt; b" in page
    assert page.count("<table") == page.count("</table>") == 1


def test_warnings_come_first() -> None:
    plan = Plan((layer("gcn"),), warnings=("profile of another machine",))
    assert str(plan).startswith("warning: profile of another machine")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_and_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plan, pipe, terminal = Plan((layer("gcn"),)), io.StringIO(), _Terminal()
    plan.show(file=pipe)
    plan.show(file=terminal)
    assert "\x1b[" not in pipe.getvalue()
    assert "\x1b[" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plan.show(file=(quiet := _Terminal()))
    assert quiet.getvalue() == pipe.getvalue()


def test_formulas_show_every_loser_and_the_print_does_not() -> None:
    plan = Plan((layer("gcn"),))
    plan.show(formulas=True, file=(out := io.StringIO()))
    assert "rejected:" in out.getvalue()
    assert "rejected:" not in str(plan)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.2345e-4, "0.523 ms"), (1.5e-3, "1.50 ms"), (0.0114, "11.4 ms"), (12.0, "12.0 s")]
)
def test_times_have_three_figures(seconds: float, text: str) -> None:
    assert printed.milliseconds(seconds) == text


def test_a_long_step_keeps_its_words_and_loses_its_size() -> None:
    row = replace(layer("gcn").rows()[0], text="send gradients back, gradients of V, W, X and b")
    assert "and b (12 x 4) " in printed._row_text(replace(row, size=(12, 4)), 1.0, False)
    wide = printed._row_text(replace(row, size=(1_693_430, 128)), 1.0, False)
    assert "and b  " in wide
    assert "…" not in wide
    assert len(wide) <= printed.WIDTH
