"""The graphs that kernels of a GPU are timed on, made on the device: two skewed ones, a mesh and cliques."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["GRAPHS", "cliques", "grid", "rmat", "uniform"]


def rmat(scale: int, num_edges: int, seed: int = 0, device: str = "cuda") -> tuple[torch.Tensor, int]:
    """(edge_index, nodes) of a random graph with a power law: 2 ** scale nodes, quarters 57, 19, 19, 5%."""
    draws = torch.Generator(device=device).manual_seed(seed)
    source = torch.zeros(num_edges, dtype=torch.int64, device=device)
    target = source.clone()
    for _ in range(scale):
        r = torch.rand(num_edges, generator=draws, device=device)
        source = source * 2 + (r > 0.76)
        target = target * 2 + (((r > 0.57) & (r <= 0.76)) | (r > 0.95))
    return torch.stack([source, target]), 1 << scale


def uniform(num_nodes: int, num_edges: int, seed: int = 0, device: str = "cuda") -> tuple[torch.Tensor, int]:
    """(edge_index, nodes) with both ends of every edge drawn evenly."""
    draws = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=draws, device=device), num_nodes


def grid(side: int, device: str = "cuda") -> tuple[torch.Tensor, int]:
    """(edge_index, nodes) of a square mesh, both directions."""
    node = torch.arange(side * side, device=device).view(side, side)
    right = torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()])
    down = torch.stack([node[:-1].flatten(), node[1:].flatten()])
    edges = torch.cat([right, down], 1)
    return torch.cat([edges, edges.flip(0)], 1), side * side


def cliques(count: int, size: int, device: str = "cuda") -> tuple[torch.Tensor, int]:
    """(edge_index, nodes) of separate complete graphs."""
    source, target = torch.nonzero(1 - torch.eye(size, device=device), as_tuple=True)
    first = torch.arange(count, device=device).repeat_interleave(source.numel()) * size
    return torch.stack([source.repeat(count) + first, target.repeat(count) + first]), count * size


GRAPHS: dict[str, Callable[[], tuple[torch.Tensor, int]]] = {
    "rmat-arxiv": lambda: rmat(17, 2_200_000),
    "grid-road": lambda: grid(1000),
    "cliques": lambda: cliques(2000, 60),
    "rmat-reddit": lambda: rmat(18, 64_400_000),
}
