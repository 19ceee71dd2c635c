"""The least time of a layer on this machine: its dense products and gathers at their measured rates.

The planner chooses once more for a machine on which calls, edges and rows cost nothing of their own; what is
left of its price is arithmetic and memory traffic. A layer's time over this says how much is left to win.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch_geometric.data import Data

from plait.bench.problem import Problem
from plait.errors import PlaitError
from plait.pyg.compile import compile
from plait.pyg.probe import machine_in_use, using_machine

__all__ = ["floor_seconds"]


def floor_seconds(problem: Problem, mode: str) -> float | None:
    """Seconds of the cheapest plan without overheads; None for layers that are not planned."""
    if problem.extra:
        return None
    stand_in = torch.zeros_like(problem.x).requires_grad_()
    data = Data(x=stand_in, edge_index=problem.edge_index, num_nodes=problem.num_nodes)
    try:
        with using_machine(machine_in_use(problem.x.device).without_overheads()):
            plan: Any = compile(copy.deepcopy(problem.layer), data, mode=mode, forms=["csr"]).plan
    except PlaitError:
        return None
    return float(plan.seconds) if plan.layers else None
