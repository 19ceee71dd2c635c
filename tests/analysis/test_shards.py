"""Traffic of shards by the choices of their ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from plait.analysis.network import Traffic
from plait.analysis.shards import Shards
from plait.plan.exchange import Choice


def choice(travels: str, *each: int) -> Choice:
    return Choice("layer", "training", "by nodes", travels, {travels: 1.0}, None, each, 7)


def test_bytes_add_up_over_ranks_and_layers() -> None:
    first = (choice("once halo x 4"), choice("once halo x 4"))
    second = (choice("fwd halo x 4, bwd haloᵀ x 4", 10, 30), choice("fwd halo x 4, bwd haloᵀ x 4", 30, 10))
    found = Shards((first, second))
    assert found.traffic == [Traffic(0.0, 0.0, 0), Traffic(80.0, 60.0, 2, 2)]
    assert found.exchanges == 2
    assert not found.is_split


def test_columns_make_a_split_by_features() -> None:
    assert Shards(((choice("fwd columns x 4, fwd rows x 4", 8, 8),),)).is_split


def planned(*steps: tuple[str, float]) -> Choice:
    """A choice whose steps take so long; of exchanges that is what is copied."""
    priced = [
        SimpleNamespace(step=SimpleNamespace(op=op), price=SimpleNamespace(seconds=took, copy_seconds=took))
        for op, took in steps
    ]
    plan: Any = SimpleNamespace(steps=priced)
    return Choice("layer", "training", "by nodes", "halo", {}, plan, (8,))


def test_ranks_wait_for_the_slowest_at_every_exchange() -> None:
    first = planned(("gemm", 1.0), ("send", 0.0), ("spmm", 2.0), ("receive", 4.0), ("spmm", 8.0))
    second = planned(("gemm", 5.0), ("exchange", 6.0), ("spmm", 3.0))
    assert Shards(((first, second),)).seconds == 5.0 + 12.0
    assert Shards(((first, first),)).seconds == 15.0


def test_layers_with_passes_of_their_own_are_as_slow_as_the_slowest_rank() -> None:
    def layer(seconds: float) -> Choice:
        return Choice("layer", "training", "by nodes", "halo", {}, None, (8,), pass_seconds=seconds)

    assert Shards(((layer(2.0), layer(3.0)), (layer(7.0), layer(1.0)))).seconds == 10.0
