"""Records of the test bed as a table: medians over epochs, ratios to DistDGL and to plait without a cache."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.hosts.systems import SYSTEMS, Setting

__all__ = ["curve_of", "curves", "epochs_of", "summary", "table"]

_JUDGED = 3  # epochs after which accuracies are compared: runs differ in how many they have
_COLUMNS = ("sampling", "exchange", "stall", "compute", "all_reduce")


def epochs_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Every epoch of some runs but their first: the slowest rank's seconds, the mean of all else."""
    found = []
    for line in lines:
        by_epoch: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for rank in line["ranks"]:
            by_epoch[rank["epoch"]].append(rank)
        for epoch, ranks in sorted(by_epoch.items()):
            if epoch == 0:
                continue
            numbers = {name for name, value in ranks[-1].items() if isinstance(value, int | float)}
            mean = {name: statistics.fmean(float(r.get(name, 0.0)) for r in ranks) for name in numbers}
            found.append(mean | {"seconds": max(float(r["seconds"]) for r in ranks)})
    return found


def curve_of(line: dict[str, Any]) -> list[float]:
    """The accuracy of a run after every epoch, which rank 0 tells."""
    told = sorted((r["epoch"], r["accuracy"]) for r in line["ranks"] if r["rank"] == 0)
    return [accuracy for _, accuracy in told]


def curves(lines: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of accuracies after every epoch: mean over runs with other seeds, least and most."""
    by_key: dict[tuple[Any, ...], list[list[float]]] = defaultdict(list)
    for line in lines:
        setting = Setting.from_dict(line["setting"])
        by_key[setting.graph, setting.hosts, setting.hidden, setting.system].append(curve_of(line))
    most = max(len(curve) for runs in by_key.values() for curve in runs)
    rows = [["graph, hosts", "hidden", "system", "runs", *(f"epoch {epoch + 1}" for epoch in range(most))]]
    rows.append(["---"] * len(rows[0]))
    for (graph, hosts, hidden, system), runs in sorted(by_key.items(), key=_system_last):
        cells = [f"{graph}, {hosts}", str(hidden), system, str(len(runs))]
        for epoch in range(most):
            found = [curve[epoch] for curve in runs if epoch < len(curve)]
            mean = statistics.fmean(found) if found else 0.0
            cells.append(f"{mean:.3f} [{min(found):.3f}, {max(found):.3f}]" if found else "")
        rows.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _system_last(item: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    graph, hosts, hidden, system = item[0]
    return graph, hosts, hidden, list(SYSTEMS).index(system)


def summary(lines: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """Medians over the epochs of each setting, with the fastest and the slowest epoch."""
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_key[Setting.from_dict(line["setting"]).key].append(line)
    found = {}
    for key, runs in by_key.items():
        epochs = epochs_of(runs)
        names = set().union(*epochs)
        medians = {name: statistics.median(e.get(name, 0.0) for e in epochs) for name in names}
        early = [curve_of(run)[:_JUDGED][-1] for run in runs]
        times = [e["seconds"] for e in epochs]
        found[key] = medians | {
            "least": min(times),
            "most": max(times),
            "epochs": float(len(epochs)),
            "accuracy": statistics.fmean(early),
        }
    return found


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one row per setting."""
    found = summary(lines)
    heads = [
        "graph, hosts",
        "hidden",
        "rate",
        "system",
        "epochs",
        "seconds [least, most]",
        "x DistDGL",
        "x none",
    ]
    rows = [
        [
            *heads,
            *(name.replace("_", "-") for name in _COLUMNS),
            "MB in",
            "hits",
            "cpu s",
            f"accuracy after {_JUDGED}",
        ]
    ]
    for key, row in sorted(found.items(), key=lambda item: _order(item[0])):
        graph, hosts, rate, hidden, system = key[:5]
        ratios = []
        for other in ("dgl", "plait-none"):
            base = found.get((*key[:4], other, *key[5:]))
            ratios.append("" if base is None else f"{base['seconds'] / row['seconds']:.2f}")
        times = f"{row['seconds']:.2f} [{row['least']:.2f}, {row['most']:.2f}]"
        cells = [f"{graph}, {hosts}", str(hidden), rate, system, f"{row['epochs']:.0f}", times, *ratios]
        cells += [f"{row.get(name, 0.0):.2f}" for name in _COLUMNS]
        cells += [f"{row['interface_bytes'] / 1e6:.0f}", f"{row.get('hit_rate', 0.0):.0%}"]
        rows.append([*cells, f"{row['processor_seconds']:.2f}", f"{row['accuracy']:.3f}"])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    graph, hosts, rate, hidden, system = key[:5]
    return graph, hosts, hidden, len(rate), rate, list(SYSTEMS).index(system)
