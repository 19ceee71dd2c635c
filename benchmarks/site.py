"""Puts the measurements into the documentation's site: a hook of mkdocs (mkdocs.yml), because they lie beside docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent


def on_files(files: Files, config: Any) -> Files:
    """The pages of docs/, and those of benchmarks/ with README.md as their index."""
    for page in sorted(HERE.glob("*.md")):
        name = "index.md" if page.name == "README.md" else page.name
        files.append(File.generated(config, f"benchmarks/{name}", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The links of a page as they are in the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../").replace("](README.md", "](index.md")
    markdown = markdown.replace("](../benchmarks/README.md", "](benchmarks/index.md")
    return markdown.replace("](../benchmarks/", "](benchmarks/")
