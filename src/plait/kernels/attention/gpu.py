"""Attention over a graph's edges on a GPU by Triton, and its gradients: all heads in one program."""

from __future__ import annotations

from plait.kernels.attention.gpu_forward import attend, statistics_of
from plait.kernels.attention.gpu_launch import AttentionTiles
from plait.kernels.attention.gpu_sources import attend_sources
from plait.kernels.attention.gpu_targets import attend_targets

__all__ = ["AttentionTiles", "attend", "attend_sources", "attend_targets", "statistics_of"]
