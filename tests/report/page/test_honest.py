"""What the page must not hide: single samples, whose wrong answer it was, a busy machine, wide intervals."""

import base64
import gzip
import re

from plait.measure import Record
from plait.report.page import layout, strips, trees, words
from plait.report.page.samples import Run, contests, samples_of


def _line(seconds, repeats=9, status="timed", **more):
    line = {"status": status, "median_seconds": seconds, "repeats": repeats, **more}
    return line | {"samples_seconds": [seconds] * min(repeats, 5)}


def _record(peers, busy=0.0, layer="gcn", graph="cora"):
    case = {"layer": layer, "graph": graph, "width_in": 64, "width_out": 64, "mode": "training"}
    return Record("bench-layers", case, {"peers": peers, "busy_elsewhere": busy})


def _run(*records):
    return Run((records,), {}, ())


def _head(run):
    return layout.report_of(run).html().split("<form")[0]


def test_times_of_single_samples_take_no_part_in_means():
    good = _record({"plait": _line(1.0), "pyg-csr": _line(2.0)})
    single = _record({"plait": _line(1.0, repeats=1), "pyg-csr": _line(50.0, repeats=1)}, graph="pubmed")
    samples, _ = samples_of(_run(good, single))
    first, second = contests(samples)
    assert first.ratio == 2.0
    assert second.ratio != second.ratio  # NaN
    assert words.key_figures(samples, [])[0].value == "2.00×"
    told = words.findings(_run(good, single), samples, [], [], 0)
    assert any("1 case has fewer than 3 samples" in line for line in told)


def test_a_whole_training_is_one_long_sample_and_counts():
    case = {"model": "gcn", "graph": "cora", "epochs": 200}
    peers = {"plait": _line(1.0, repeats=1), "pyg-csr": _line(3.0, repeats=1)}
    samples, _ = samples_of(_run(Record("bench-models", case, {"peers": peers})))
    assert contests(samples)[0].ratio == 3.0


def test_a_wrong_answer_says_whose_it_was():
    wrong = {"status": "wrong", "reason": "output differs"}
    samples, _ = samples_of(_run(_record({"plait": _line(1.0), "dgl": wrong, "pyg-csr": _line(2.0)})))
    (figure,) = [f for f in words.key_figures(samples, []) if "wrong" in f.meaning]
    assert figure.value == "1"
    assert "dgl 1" in figure.meaning
    assert "plait 0" in figure.meaning


def test_a_disturbed_run_carries_a_banner_above_its_numbers():
    peers = {"plait": _line(1.0), "pyg-csr": _line(2.0)}
    head = _head(_run(_record(peers, busy=0.6)))
    assert 'class="banner"' in head
    assert head.index("banner") < head.index('class="numbers"')
    assert 'class="banner"' not in _head(_run(_record(peers)))


def test_intervals_wider_than_the_value_are_marked():
    wide = _line(1.0, interval_seconds=[0.5, 1.9])
    samples, _ = samples_of(
        _run(_record({"plait": wide, "pyg-csr": _line(2.0, interval_seconds=[1.9, 2.1])}))
    )
    table = strips.strip_table("layers", samples)
    assert table.count("wide") >= 1
    assert re.search(r'class="num ci wide"[^>]*>[^<]*⚠', table)
    assert len(re.findall("⚠", table)) == 1


def test_a_page_of_many_records_is_packed():
    records = [
        _record({"plait": _line(1.0 + k / 1e4), "pyg-csr": _line(2.0)}, graph=f"graph {k}") for k in range(60)
    ]
    report = layout.report_of(_run(*records))
    whole, packed = report.html(), report.html(most=20_000)
    assert "data-packed=" not in whole
    assert len(packed) < len(whole)
    content = re.search(r'data-packed="([^"]+)"', packed).group(1)
    assert "<table" in gzip.decompress(base64.b64decode(content)).decode()
    assert "<noscript>" in packed


def test_what_is_done_once_has_its_own_scale():
    def step(phase, seconds):
        return {"phase": phase, "op": "spmm", "seconds": seconds, "rows": 4, "columns": 4}

    layer = {"layer": "conv", "expression": "A @ X", "form": "csr", "seconds": 0.001}
    plan = {"layers": [{**layer, "hoisted": [step("once", 1.0)], "steps": [step("fwd", 0.001)]}]}
    figure = trees.tree_figure("plan", plan)
    drawn = figure.draw(800)
    assert "its own scale" in drawn
    widths = [float(w) for w in re.findall(r'<rect[^>]*? width="([\d.]+)"', drawn)]
    assert min(widths[-2:]) > 100  # on one scale the step would be a pixel
    assert "predicted less measured" in figure.caption
