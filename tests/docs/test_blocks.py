"""Every Python block of the pages runs, in order; their links, records and the printed plan are true."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import plait
from plait.cost.machine import default_profile
from plait.runtime.machine import using_machine

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOLDERS = ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*.md")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))
WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _given():
    """What a page takes for granted: a model, a graph, a loop of the user's own."""
    torch.manual_seed(0)
    num_nodes = 200
    data = Data(x=torch.randn(num_nodes, 16), edge_index=torch.randint(0, num_nodes, (2, 1500)))
    data.y, data.train_mask = torch.randint(0, 4, (num_nodes,)), torch.arange(num_nodes) % 2 == 0
    rows = data.x.numpy()

    def train(model, data):
        model(data.x, data.edge_index).sum().backward()

    return {
        "plait": plait,
        "torch": torch,
        "data": data,
        "model": GCN(16, 32, num_layers=2, out_channels=4),
        "train": train,
        "num_nodes": num_nodes,
        "fetch_rows": lambda ids: rows[np.asarray(ids)],
    }


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=_name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace = _given()
    for found in BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 1
        exec(compile("\n" * line + found[1], str(page), "exec"), namespace)


def _anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def _anchors(page: Path) -> set[str]:
    return {_anchor(found) for found in re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_a_file_and_to_a_heading_of_it(page):
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#\s]*)#?([^)]*)\)", page.read_text(encoding="utf-8")
    ):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in _anchors(there), f"{target}#{anchor}"


def test_every_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert f": {page.name}" in navigation
    for page in ROOT.glob("benchmarks/*.md"):
        assert f": benchmarks/{page.name.replace('README', 'index')}" in navigation


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_pages_are_in_plain_english(page):
    odd = re.compile(
        r"as it comes|\bsooner\b|\bbouts?\b|\blanes?\b|told as|held to|stranger believes|\banew\b|in vain"
        r"|\barms\b|wants? (?:a )?gradients?|features of edges|bytes a second"
        r"|\d (?:ms|MB|s) a (?:step|batch|cell|call|epoch)\b"
    )
    assert odd.findall(page.read_text(encoding="utf-8")) == []


def _prose(page: Path) -> Iterator[str]:
    """Lines outside code and tables."""
    is_code = False
    for line in page.read_text(encoding="utf-8").splitlines():
        is_code ^= line.lstrip().startswith("```")
        if not is_code and not line.lstrip().startswith("|"):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_prose_is_wrapped(page):
    wide = [line for line in _prose(page) if len(line) > 120]  # a link is never broken
    assert wide == []


RECORD = re.compile(r"[\w-]+-20\d{6}(?:-findings)?\.jsonl?\b")


def test_records_that_pages_name_exist_and_every_record_is_named():
    named = {name for page in PAGES for name in RECORD.findall(page.read_text(encoding="utf-8"))}
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert named - kept == set(), "named, not kept"
    assert kept - named == set(), "kept, named on no page"


def test_the_plan_on_the_first_screen_is_what_plait_prints():
    torch.manual_seed(0)
    data = Data(x=torch.randn(2000, 64), edge_index=torch.randint(0, 2000, (2, 20_000)))
    model = GCN(64, 32, num_layers=2, out_channels=4)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(Plan of .*?)\n *\.\.\.\n```", readme, re.DOTALL)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with using_machine(default_profile()):
            assert str(plait.compile(model, data).plan).startswith(shown)
    finally:
        torch.set_num_threads(threads)
