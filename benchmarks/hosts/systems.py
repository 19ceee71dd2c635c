"""What is compared: training programs of several systems, each with its settings (`System`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["SYSTEMS", "Setting", "System"]


@dataclass(frozen=True)
class System:
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


SYSTEMS = {
    system.name: system
    for system in (
        System("dgl", "dgl", "DistDGL with its defaults", "sync"),
        System("dgl-massive", "dgl", "DistDGL with MassiveGNN's rule and pipeline", "massive", 0.25),
        System("dgl-plait", "dgl", "DistDGL with plait.distributed.dgl", "plait", 0.25),
        System("plait-none", "plait", "plait without a cache"),
        System("plait-massive", "plait", "plait with MassiveGNN's rule", "", 0.25, "massivegnn"),
        System("plait-auto", "plait", "plait with policy auto", "", 0.25, "auto"),
        System("plait-auto-16", "plait", "... and features in float16", "", 0.25, "auto", "float16"),
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
    system: str
    epochs: int
    fanout: tuple[int, ...] = (10, 25)
    batch: int = 1000
    learning_rate: float = 0.003
    dropout: float = 0.5
    seed: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells settings apart in a record; more epochs make no other setting."""
        return (self.graph, self.hosts, self.rate, self.hidden, self.system, self.fanout, self.batch)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Setting:
        """The setting that `to_dict` wrote; records up to 18 November 2026 call the system `arm`."""
        given = {"system" if name == "arm" else name: value for name, value in values.items()}
        return cls(**{**given, "fanout": tuple(given["fanout"])})
