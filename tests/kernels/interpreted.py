"""What tests of a GPU's kernels run: less where Triton's interpreter stands in, which takes its time."""

from __future__ import annotations

import pytest
import torch

from tests.graph.hag.graphs import ODD_GRAPHS, graph_of

__all__ = ["GRAPHS", "RUNS", "skip_if_walked_alike"]

_CLIQUE = graph_of([[u for u in range(5) if u != v] for v in range(5)])
GRAPHS = ODD_GRAPHS if torch.cuda.is_available() else ODD_GRAPHS | {"clique": _CLIQUE}
"""The odd graphs; interpreted, the smallest clique whose rows are longer than pieces of three edges."""
RUNS = 2 if torch.cuda.is_available() else 1
"""Programs that run side by side must give the same bits again; the interpreter runs them in turn."""
_TELLING = ("no edges", "one hub", "repeated edges", "more sources than nodes")


def skip_if_walked_alike(graph: str, is_first: bool) -> None:
    """Leave most graphs to the first of several kinds of a kernel that differ in arithmetic alone."""
    if not is_first and graph not in _TELLING and not torch.cuda.is_available():
        pytest.skip("the graph is walked alike for all kinds, and the interpreter is slow")
