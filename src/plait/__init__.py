"""plait, a query planner for graph neural networks: the same model and results, faster, with the reasons."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait import analysis as analysis
    from plait import distributed as distributed
    from plait import features as features
    from plait import loader as loader
    from plait.bench.calibrate import calibrate as calibrate
    from plait.distributed.shard import shard as shard
    from plait.graph import Graph as Graph
    from plait.graph import hag as hag
    from plait.pyg.analyze import analyze as analyze
    from plait.pyg.compile import compile as compile
    from plait.pyg.compile import explain as explain
    from plait.pyg.trace import trace as trace

__all__ = [
    "Graph", "analysis", "analyze", "calibrate", "compile", "distributed", "explain", "features", "hag",
    "loader", "shard", "trace",
]  # fmt: skip
__version__ = "0.1.0"

# A library does not decide where its messages go: see docs/profiling.md.
logging.getLogger("plait").addHandler(logging.NullHandler())

# Looked up when first used: importing plait.plan must not load torch.
_HOMES = {
    "Graph": "plait.graph",
    "analyze": "plait.pyg.analyze",
    "compile": "plait.pyg.compile",
    "explain": "plait.pyg.compile",
    "trace": "plait.pyg.trace",
    "calibrate": "plait.bench.calibrate",
    "shard": "plait.distributed.shard",
}
_MODULES = {
    "analysis": "plait.analysis",
    "distributed": "plait.distributed",
    "hag": "plait.graph.hag",
    "features": "plait.features",
    "loader": "plait.loader",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'plait' has no attribute {name!r}")
