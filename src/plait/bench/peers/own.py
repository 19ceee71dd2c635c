"""plait itself, given what a user gives it: the layer as PyG constructs it, and the data."""

from __future__ import annotations

import copy

import torch
from torch_geometric.data import Data

import plait
from plait.bench.peers.runner import Runner, named_gradients
from plait.bench.problem import Problem

__all__ = ["compiled"]


def compiled(problem: Problem, mode: str) -> Runner:
    """plait.compile of the layer.

    The features in `data` are a stand-in of the input's shape that needs a gradient, as a hidden activation
    does: nothing may be multiplied beforehand because the input is thought to be constant. A layer that
    takes more than x and edges is planned at its first call, as everything is checked before it is timed.
    """
    arguments = (problem.edge_index, *problem.extra)
    data = None
    if not problem.extra:
        stand_in = torch.zeros_like(problem.x).requires_grad_()
        data = Data(x=stand_in, edge_index=problem.edge_index, num_nodes=problem.num_nodes)
    layer = plait.compile(copy.deepcopy(problem.layer), data, mode=mode)
    return Runner(lambda x: layer(x, *arguments), tuple(layer.parameters()), named_gradients(layer))
