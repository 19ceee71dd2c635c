"""report/models: seconds, ratios, loss differences and memory of whole trainings."""

from __future__ import annotations

from plait.measure import Record
from plait.report.models import model_line, models_text


def record(seconds: dict[str, float], memory: bool = False, **case: object) -> Record:
    peers: dict[str, dict[str, object]] = {
        name: {"status": "timed", "median_seconds": value, "max_loss_difference": 2e-6}
        for name, value in seconds.items()
    }
    if memory:
        for name, value in seconds.items():
            peers[name] |= {"peak_tensor_bytes": int(value * 1e6), "peak_process_bytes": None}
    return Record("bench-models", {"graph": "cora", "model": "gcn", "epochs": 200} | case, {"peers": peers})


RUN = record({"pyg-default": 12.0, "pyg-csr": 6.0, "dgl": 4.0, "plait": 2.0}, memory=True)


def test_the_table_has_times_ratios_and_the_loss_difference() -> None:
    row = next(line for line in models_text([RUN]).splitlines() if line.startswith("cora"))
    assert row.split() == ["cora", "gcn", "12", "-", "6", "4", "2", "dgl", "2.00x", "3.00x", "2e-06"]


def test_the_last_line_is_the_geometric_mean() -> None:
    other = record({"pyg-csr": 8.0, "dgl": 8.0, "plait": 1.0}, graph="pubmed")
    mean = next(line for line in models_text([RUN, other]).splitlines() if line.startswith("geometric mean"))
    assert mean.split() == ["geometric", "mean", "4.00x", "4.90x"]


def test_memory_is_compared_with_the_best_peer() -> None:
    row = models_text([RUN]).split("peak MB")[1].splitlines()[-1]
    assert row.split() == ["cora", "gcn", "12", "6", "4", "2", "2.00x"]


def test_lines_fit_a_terminal() -> None:
    assert all(len(line) <= 100 for line in models_text([RUN]).splitlines())


def test_one_training_is_a_line() -> None:
    assert model_line(RUN) == "cora gcn: pyg-default 12 pyg-csr 6 dgl 4 plait 2 s; best peer / plait 2.00"


def test_no_records_are_no_error() -> None:
    assert models_text([]) == "no models measured"
