"""analysis/between.py: laws of what happens beside layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.analysis.between import Beside, Passed, after, looked_up_row_seconds, loss_seconds
from plait.analysis.models import layers_by_name
from plait.analysis.statistics import Statistics
from plait.cost.machine import default_profile
from plait.cost.price import Pricer

MACHINE = default_profile()


def test_a_loss_of_twice_the_rows_takes_twice_as_long_until_pages_are_fresh() -> None:
    assert sum(loss_seconds(2000, 64, MACHINE)) == pytest.approx(2 * sum(loss_seconds(1000, 64, MACHINE)))
    assert sum(loss_seconds(2000, 8, MACHINE)) > sum(
        loss_seconds(2000, 32, MACHINE)
    )  # rows narrower than a vector
    assert sum(loss_seconds(400_000, 64, MACHINE)) > 2 * sum(loss_seconds(100_000, 64, MACHINE)) * 2


@pytest.mark.parametrize("is_training", [True, False])
def test_behind_the_last_layer_is_the_loss_and_without_gradients_nothing(is_training: bool) -> None:
    layers = layers_by_name("gcn", (64, 64, 8), Statistics(1000, 9000), MACHINE, is_training=is_training)
    seconds = after(1000, Pricer(MACHINE), 1)
    ahead, behind = seconds(layers[0], False)
    assert ahead > 0
    assert (behind > 0) == is_training
    assert seconds(layers[1], True) == (loss_seconds(1000, 8, MACHINE) if is_training else (0.0, 0.0))


def test_wider_rows_take_longer_to_look_up() -> None:
    assert looked_up_row_seconds(MACHINE, 256) > 2 * looked_up_row_seconds(MACHINE, 64)


def test_what_was_noted_takes_the_place_of_an_activation() -> None:
    layers = layers_by_name("gcn", (64, 64, 8), Statistics(1000, 9000), MACHINE)
    pricer, size = Pricer(MACHINE), 4 * 1000 * 64
    plain = after(1000, pricer, 1)
    noted = after(1000, pricer, 1, Beside({layers[0].name: [Passed(size, size)] * 2}, width=32))
    assert sum(noted(layers[0], False)) == pytest.approx(2 * sum(plain(layers[0], False)))
    assert noted(layers[1], True) == loss_seconds(
        1000, 32, MACHINE
    )  # as wide as the model's result, not the layer's


def test_a_product_beside_layers_is_priced_as_one() -> None:
    pricer = Pricer(MACHINE)
    ahead, behind = Passed(1, 1, True, (1000, 64, 128)).seconds(pricer, 1)
    assert behind > ahead > Passed(1, 1).seconds(pricer, 1)[0]
    assert Passed(4, 4, has_gradient=False).seconds(pricer, 1)[1] == 0.0


def test_a_product_that_torch_runs_is_not_priced_as_plaits_own() -> None:
    tables = {"plait": MACHINE.gemm["plait"], "torch": MACHINE.gemm["torch"]}
    fast = {**tables, "plait": replace(tables["plait"], gflops=((1e6,) * 7,) * 7)}
    product = Passed(1, 1, True, (10_000, 64, 64))
    ahead, _ = product.seconds(Pricer(replace(MACHINE, gemm=fast)), 2)
    assert ahead == pytest.approx(product.seconds(Pricer(MACHINE), 2)[0])


def test_activations_take_as_long_as_the_machine_says_and_some_longer_than_relu() -> None:
    slow = replace(MACHINE, passed_byte_seconds=2 * MACHINE.passed_byte_seconds, call_seconds=0.0)
    size = 1 << 20
    relu, dropout = (
        Passed(size, size, name=name).seconds(Pricer(slow), 1)[0] for name in ("relu", "dropout")
    )
    assert relu == pytest.approx(2 * size * slow.passed_byte_seconds)
    assert dropout > 10 * relu
