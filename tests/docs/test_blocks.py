"""Every Python block of README and docs runs, in the order of its page."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import plait

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    if BLOCK.search(path.read_text(encoding="utf-8"))
)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace = _given()
    for found in BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 1
        exec(compile("\n" * line + found[1], str(page), "exec"), namespace)


def test_links_between_pages_lead_somewhere():
    link = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        for target in link.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_every_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert f": {page.name}" in navigation


def test_pages_are_in_plain_english():
    odd = re.compile(
        r"as it comes|\bsooner\b|\bbouts?\b|\blanes?\b|told as|held to|stranger believes|\banew\b|in vain"
        r"|\barms\b|wants? (?:a )?gradients?|features of edges|bytes a second"
        r"|\d (?:ms|MB|s) a (?:step|batch|cell|call|epoch)\b"
    )
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        assert odd.findall(page.read_text(encoding="utf-8")) == [], page.name
