"""The rule of the comparison: wrong answers are found in every precision, and rounding is not one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fuzz import replay as runs
from tests.fuzz.replay import Difference, replay

HEAD = """
edge_index, edge_weight, edge_attr, edge_type = graph('plain', 7, seed=0)
x = features(7, 4, seed=0)
model = model.{dtype}(); x = x.{dtype}()
original = model; model = plait.compile(model)
"""
PLAIN = "model = Chain(GCNConv(4, 4), F.relu, SAGEConv(4, 4))" + HEAD
# each step multiplies the weights: the runs of PyG lie far apart in the end
DIVERGING = (
    "model = PNA(4, 4, num_layers=2, aggregators=['mean', 'std'], scalers=['identity'], "
    "deg=torch.tensor([1, 4, 2]), norm='batch_norm')" + HEAD + "optimise(model, 5.0)\n"
)
CALL = "out = model(x, edge_index); backward(out)\n"
DTYPES = ("double", "float", "bfloat16", "half")


def compiles(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """The compiled model's results are PyG's, changed."""

    def compile(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        run = model.forward
        model.forward = lambda *given: change(run(*given))  # type: ignore[method-assign]
        return model

    monkeypatch.setattr(runs, "plait", SimpleNamespace(compile=compile))


def one_row_off(out: Tensor, by: float = 1e-2) -> Tensor:
    place = out.detach().abs().amax(dim=1).nan_to_num().argmax()
    share = torch.ones_like(out)
    share[place] += by
    return out * share


def is_undefined(out: Tensor) -> Tensor:
    return torch.cat([out[:-1], out[-1:] * float("nan")])


@pytest.mark.parametrize("dtype", ["double", "float"])
@pytest.mark.parametrize("script", [PLAIN, DIVERGING])
def test_a_row_off_by_a_hundredth_is_found(script: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, lambda out: out)
    replay(script.format(dtype=dtype) + CALL)
    compiles(monkeypatch, one_row_off)
    with pytest.raises(Difference, match="off by"):
        replay(script.format(dtype=dtype) + CALL)


@pytest.mark.parametrize("dtype", ["bfloat16", "half"])
def test_a_row_off_by_more_than_rounding_in_16_bits_is_found(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles(monkeypatch, lambda out: one_row_off(out, 0.15))
    with pytest.raises(Difference, match="off by"):
        replay(PLAIN.format(dtype=dtype) + CALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dropped_gradient_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, lambda out: torch.cat([out[:1].detach(), out[1:]]))
    with pytest.raises(Difference, match=r"gradient of .*: off by"):
        replay(PLAIN.format(dtype=dtype) + CALL)
    compiles(monkeypatch, lambda out: out.detach() + 0 * out.sum())
    with pytest.raises(Difference, match=r"gradient of .*: off by"):
        replay(PLAIN.format(dtype=dtype) + CALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_where_pyg_has_a_number_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles(monkeypatch, is_undefined)
    with pytest.raises(Difference, match="out: off by"):
        replay(PLAIN.format(dtype=dtype) + CALL)


def test_nan_in_float16_is_rounding_only_where_the_range_is_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    # plait's order of the same sums may overflow where PyG's just does not
    compiles(monkeypatch, lambda out: is_undefined(out) if out.dtype == torch.float16 else out)
    script = PLAIN.format(dtype="half")
    replay(script + "x.data.mul_(20000)\n" + CALL)
    with pytest.raises(Difference, match="out: off by"):
        replay(script + "x.data.mul_(20)\n" + CALL)


def sums_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        run = model.forward
        model.forward = lambda x, edges: run(x, edges.flip(1))  # type: ignore[method-assign]
        return model

    monkeypatch.setattr(runs, "plait", SimpleNamespace(compile=compile))


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_the_same_sums_is_no_difference(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sums_in_another_order(monkeypatch)
    replay(DIVERGING.format(dtype=dtype) + (CALL + "optimise(model, 0.5)\n") * 3 + CALL)


def test_what_a_coarser_type_left_is_no_difference_where_nan_has_reached_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = PLAIN.format(dtype="float") + (CALL + "optimise(model, 0.5)\n") * 3
    script += (
        "list(model.parameters())[-1].data[0, 0] = float('nan')\nmodel = model.double(); x = x.double()\n"
    )
    sums_in_another_order(monkeypatch)
    replay(script + "out = model(x, edge_index)\n")
    compiles(monkeypatch, lambda out: one_row_off(out, 0.5) if out.dtype == torch.float64 else out)
    with pytest.raises(Difference, match="out: off by"):
        replay(script + "out = model(x, edge_index)\n")
