"""What is compared: training programs of several systems, each with its settings (`Arm`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ARMS", "Arm", "Setting"]


@dataclass(frozen=True)
class Arm:
    """A program (`dgl` or `plait`) and how it handles remote rows."""

    name: str
    program: str
    says: str
    loader: str = ""
    """Of DistDGL's programs: sync, massive or plait."""
    cache: float = 0.0
    """Share of the halo that is kept."""
    policy: str = "auto"
    wire: str = "float32"
    """What plait's rows are sent and kept in."""


ARMS = {
    arm.name: arm
    for arm in (
        Arm("dgl", "dgl", "DistDGL with its defaults", "sync"),
        Arm("dgl-massive", "dgl", "DistDGL with MassiveGNN's rule and pipeline", "massive", 0.25),
        Arm("dgl-plait", "dgl", "DistDGL with plait.distributed.dgl", "plait", 0.25),
        Arm("plait-none", "plait", "plait without a cache"),
        Arm("plait-massive", "plait", "plait with MassiveGNN's rule", "", 0.25, "massivegnn"),
        Arm("plait-auto", "plait", "plait with policy auto", "", 0.25, "auto"),
        Arm("plait-auto-16", "plait", "... and features in float16", "", 0.25, "auto", "float16"),
    )
}


@dataclass(frozen=True)
class Setting:
    """One measurement: what every rank of it is told.

    `fanout` is in DGL's order, the hop next to the seeds last.
    """

    graph: str
    hosts: int
    rate: str
    hidden: int
    arm: str
    epochs: int
    fanout: tuple[int, ...] = (10, 25)
    batch: int = 1000
    learning_rate: float = 0.003
    dropout: float = 0.5
    seed: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells settings apart in a record; more epochs make no other setting."""
        return (self.graph, self.hosts, self.rate, self.hidden, self.arm, self.fanout, self.batch)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Setting:
        """The setting that `to_dict` wrote."""
        return cls(**{**values, "fanout": tuple(values["fanout"])})
