"""Traffic of shards by the choices of their ranks."""

from __future__ import annotations

from plait.analysis.network import Traffic
from plait.analysis.shards import Shards
from plait.plan.exchange import Choice


def choice(travels: str, *each: int) -> Choice:
    return Choice("layer", "training", "by nodes", travels, {travels: 1.0}, None, each, 7)


def test_bytes_add_up_over_ranks_and_layers() -> None:
    first = (choice("once halo x 4"), choice("once halo x 4"))
    second = (choice("fwd halo x 4, bwd haloᵀ x 4", 10, 30), choice("fwd halo x 4, bwd haloᵀ x 4", 30, 10))
    found = Shards((first, second))
    assert found.traffic == [Traffic(0.0, 0.0, 0), Traffic(80.0, 60.0, 2)]
    assert found.exchanges == 2
    assert not found.is_split


def test_columns_make_a_split_by_features() -> None:
    assert Shards(((choice("fwd columns x 4, fwd rows x 4", 8, 8),),)).is_split
