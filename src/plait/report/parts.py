"""Draws what a division of a graph costs: the cut, the halos, the balance, the bytes of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.report.table import Table, amount, bytes_text

__all__ = ["parts_text"]


def parts_text(statistics: Mapping[str, Any], num_edges: int) -> str:
    """The table of all parts, and the whole in a few lines below it."""
    parts, row_bytes = statistics["parts"], statistics["row_bytes"]
    table = Table(("part", "nodes", "in-edges", "cut edges", "halo", "train", "remote rows", "bytes/epoch"))
    for number, part in enumerate(parts):
        table.add(
            number,
            *(f"{part[name]:,}" for name in ("nodes", "edges", "cut_edges", "halo", "train")),
            amount(part["remote_rows"], "").strip(),
            bytes_text(part["remote_rows"] * row_bytes) if row_bytes else "-",
        )
    cut = sum(part["cut_edges"] for part in parts)
    total = sum(part["remote_rows"] for part in parts)
    fanout = ",".join(map(str, statistics["fanout"]))
    lines = [
        f"edge cut: {cut:,} of {num_edges:,} edges ({cut / max(1, num_edges):.1%})",
        "largest part over the mean: "
        + ", ".join(f"{label} {_imbalance(parts, name):.3f}" for label, name in _LOADS),
        f"expected of fanout {fanout}, batches of {statistics['batch_size']:,}, no cache: "
        f"{amount(total, '').strip()} rows per epoch"
        + (f", {bytes_text(total * row_bytes)} over the network" if row_bytes else "; no features stored"),
    ]
    return "\n".join([str(table), "", *lines])


_LOADS = (("nodes", "nodes"), ("in-edges", "edges"), ("training nodes", "train"))


def _imbalance(parts: Any, name: str) -> float:
    held = [part[name] for part in parts]
    return max(held) * len(held) / sum(held) if sum(held) else 1.0
