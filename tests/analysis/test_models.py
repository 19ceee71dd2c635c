"""analysis/models.py and layers.py: every name is planned from statistics, near the paper's rows."""

from __future__ import annotations

import resource

import pytest

from plait.analysis.layers import layers_of
from plait.analysis.models import NAMES, layers_by_name
from plait.analysis.published import LOCAL, find
from plait.analysis.statistics import Statistics
from plait.cost.machine import default_profile
from plait.errors import InputError
from plait.plan.plan import NotPlanned, Plan

MACHINE = default_profile()
SMALL = Statistics(5000, 60_000, "poisson")


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("is_training", [True, False])
def test_every_name_is_counted(model: str, is_training: bool) -> None:
    layers = layers_by_name(model, (32, 16, 8), SMALL, MACHINE, is_training=is_training)
    assert layers[0].width_in == 32
    assert layers[-1].width_out == 8
    for layer in layers:
        assert layer.forward.flops > 0
        assert layer.forward.depth > 0
        assert (layer.backward.flops > 0) == is_training
        assert sum(layer.forward.kernels.values()) == layer.forward.flops
        assert layer.forward.seconds > 0
    assert any(layer.forward.gathers for layer in layers)


@pytest.mark.parametrize(
    ("model", "row", "allowed"),
    [
        ("gcn", "GCN", 0.15),
        ("commnet", "CommNet", 0.15),
        ("edgeconv-1", "EdgeConv-1", 0.15),
        ("gat", "GAT", 0.25),
    ],
)
def test_planned_layers_are_near_their_executed_formula(model: str, row: str, allowed: float) -> None:
    """The formulas leave out biases, loops and padding: within some percent of what is planned."""
    (layer,) = [x for x in layers_by_name(model, (64, 64, 64), SMALL, MACHINE, heads=1) if "1" in x.name[:8]]
    values = {"n": SMALL.nodes, "m": SMALL.edges, "d": 60, "k": 64, "L": 1}
    assert layer.forward.flops == pytest.approx(find(row).executed_work(**values), rel=allowed)


def test_formulas_of_fused_layers_evaluate_to_their_counts() -> None:
    for model in ("gat", "vanilla-attention", "gatv2", "transformer", "g-gcn", "agnn", "monet", "edgeconv-5"):
        for layer in layers_by_name(model, (32, 16, 8), SMALL, MACHINE)[1:]:
            for name, phase in layer.phases.items():
                assert phase.formulas["flops"](**phase.values) == phase.flops, model
                assert phase.formulas["depth"](**phase.values) == phase.depth, model
                is_checked = model in ("gat", "vanilla-attention", "monet")
                is_checked |= model in ("g-gcn", "edgeconv-5") and name == "forward"
                assert phase.is_exact == is_checked, model  # the others are held to no counted run


@pytest.mark.parametrize("model", ["vanilla-attention", "agnn", "monet", "g-gcn", "edgeconv-5"])
def test_models_only_the_paper_has_are_counted_as_their_rows_are(model: str) -> None:
    layer = layers_by_name(model, (64, 64, 64), SMALL, MACHINE)[1]
    row = next(row for row in LOCAL if row.model.lower().replace(" ", "-") == model)
    values = {"n": SMALL.nodes, "m": SMALL.edges, "d": layer.forward.values["d"], "k": 64, "L": 1}
    assert layer.forward.flops == row.executed_work(**values)
    assert layer.forward.depth == row.executed_depth(**values)


@pytest.mark.parametrize("degrees", ["powerlaw", "poisson", "regular"])
def test_papers100m_takes_little_memory(degrees: str) -> None:
    layers = layers_by_name("gcn", (128, 256, 172), Statistics(111_059_956, 1_615_685_872, degrees), MACHINE)
    assert layers[1].forward.flops > 1e13
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**20 * 3  # of the whole test process, in KiB


def test_layers_that_run_in_pyg_are_black_boxes() -> None:
    (box,) = layers_of(Plan((), (NotPlanned("conv", "no rule"),)))
    assert box.is_black_box
    assert "no rule" in box.note
    assert box.to_dict()["forward"]["flops"] == 0


@pytest.mark.parametrize("widths", [(), (3,), (3, 0), (3, 2.5), (True, 2)])
def test_bad_widths_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="widths"):
        layers_by_name("gcn", widths, SMALL, MACHINE)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="known are gcn, sage"):
        layers_by_name("graphormer", (3, 2), SMALL, MACHINE)
