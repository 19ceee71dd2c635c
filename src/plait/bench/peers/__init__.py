"""The peers by name: each turns a problem into a runner on the same weights."""

from __future__ import annotations

from collections.abc import Callable

from plait.bench.cases import known
from plait.bench.peers import dgl, own, pyg
from plait.bench.peers.runner import Runner, SameAs, Unavailable
from plait.bench.problem import Problem

__all__ = [
    "DEFAULT", "PEERS", "REFERENCE", "UNTRIED", "Runner", "SameAs", "Unavailable", "family", "prepare",
]  # fmt: skip

Prepare = Callable[[Problem, str], Runner]

PEERS: dict[str, Prepare] = {
    "pyg-default": pyg.default,
    "pyg": pyg.normalised_once,
    "pyg-csr": pyg.csr,
    "pyg-edgeindex": pyg.cached_edge_index,
    "pyg-compile": pyg.compiled,
    "dgl": dgl.stock,
    "dgl-ops": dgl.operators,
    "plait": own.compiled,
}
REFERENCE = "pyg-default"
# torch.compile takes 10 s and more per cell: only when asked for
DEFAULT = tuple(name for name in PEERS if name != "pyg-compile")
# not tried in a child first: plait's own crash is no line of a table, and torch.compile starts processes
UNTRIED = ("plait", "pyg-compile")


def family(name: str) -> str:
    """Whose a peer is: "pyg", "dgl" or "plait"."""
    return name.partition("-")[0]


def prepare(name: str, problem: Problem, mode: str) -> Runner:
    """The runner of a peer; Unavailable or SameAs when there is none of its own."""
    return PEERS[known("--peers", name, tuple(PEERS))](problem, mode)
