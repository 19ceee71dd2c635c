"""report/page/page.js and page.css in a real browser: the page loads, filters, sorts and fits a phone."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from plait.report.page import Report
from plait.report.page.layout import document, plain_table

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_BROWSER = next((path for name in _NAMES if (path := shutil.which(name))), None)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(_BROWSER is None, reason="no Chromium: the page is not tried in a browser"),
]


class Browser:
    """Chromium without a window, one page per call."""

    def __init__(self, folder: Path, page: str) -> None:
        self.folder = folder
        self.file = folder / "report.html"
        self.file.write_text(page, encoding="utf-8")

    def _run(self, *arguments: str, address: str = "") -> str:
        command = [
            str(_BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={self.folder / 'profile'}", "--enable-logging=stderr", "--v=0", *arguments,
            self.file.as_uri() + address,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr, done.stderr
        return done.stdout

    def dom(self, address: str = "") -> str:
        """The document after its script has run; fails when the console has anything to say."""
        return self._run("--dump-dom", "--virtual-time-budget=3000", address=address)

    def picture(self, width: int, height: int) -> tuple[int, int, int]:
        """A screenshot: its width, height and size in bytes."""
        path = self.folder / f"{width}.png"
        self._run(f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={path}")
        content = path.read_bytes()
        return *struct.unpack(">II", content[16:24]), len(content)


@pytest.fixture(scope="module")
def browser(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    return Browser(tmp_path_factory.mktemp("browser"), report.html())


def _shown(dom: str, selector: str) -> list[str]:
    """The opening tags of elements with this attribute that no filter hides."""
    tags = re.findall(rf"<[a-z]+ [^>]*{selector}[^>]*>", dom)
    return [tag for tag in tags if not re.search(r'class="[^"]*\boff\b', tag)]


def test_the_page_loads_and_counts_its_timings(browser: Browser) -> None:
    dom = browser.dom()
    assert 'id="count" aria-live="polite">222 timings<' in dom
    assert len(_shown(dom, 'data-op="sort"')) > 1
    assert re.search(r'<button type="button" class="more">show all \d+<', dom)


def test_a_filter_hides_all_else_in_figures_and_tables(browser: Browser) -> None:
    dom = browser.dom("#filter=op:scatter_add")
    assert "64 of 222 timings" in dom
    shown = _shown(dom, 'data-op="')
    kinds = {re.match(r"<([a-z]+)", tag)[1] for tag in shown}  # type: ignore[index]
    # dots of the roofline, panels of curves, rows of the heat map and of the tables
    assert {"circle", "figure", "tr"} <= kinds
    dimmed = [tag for tag in shown if "data-fade" in tag]
    assert all("dim" in tag for tag in dimmed)
    assert all('data-op="scatter_add"' in tag for tag in shown if tag not in dimmed)
    assert not re.search(r'<button [^>]*id="clear"[^>]*hidden', dom)


def test_filters_meet(browser: Browser) -> None:
    dom = browser.dom("#filter=op:gcn,graph:small,device:cpu")
    assert "7 of 222 timings" in dom
    columns = [tag for tag in _shown(dom, 'data-graph="') if tag.startswith("<th")]
    assert all('data-graph="small"' in tag for tag in columns)


def test_a_filter_nothing_meets_leaves_nothing_and_no_error(browser: Browser) -> None:
    assert "0 of 222 timings" in browser.dom("#filter=op:nonsense")
    assert "222 timings" in browser.dom("#filter=%E0%A4%A,op&sort=none:99:up&theme=green")


def test_a_column_sorts(browser: Browser) -> None:
    for order in ("ascending", "descending"):
        dom = browser.dom(f"#sort=layers:4:{order}")
        table = dom[dom.index('id="layers"') : dom.index("</table>", dom.index('id="layers"'))]
        assert f'aria-sort="{order}"' in table
        medians = [float(v) for v in re.findall(r'num med" data-v="([^"]+)"', table)]
        assert medians == sorted(medians, reverse=order == "descending")


def test_titles_become_tips_that_are_read_aloud(browser: Browser) -> None:
    dom = browser.dom()
    assert re.search(r'<circle [^>]*aria-label="spmm, plait', dom)
    assert 'role="tooltip"' in dom


# what a hand would do, and what it would see
_HAND = """
addEventListener("load", () => {
  const seen = [];
  const tip = document.getElementById("tip");
  const fire = (element, kind) => element.dispatchEvent(new Event(kind, { bubbles: true }));
  const mark = document.querySelector("circle.mark");
  fire(mark, "pointerover");
  seen.push(!tip.hidden && tip.textContent === mark.getAttribute("aria-label"));
  fire(document.body, "pointerover");
  seen.push(tip.hidden);
  const drawing = document.querySelector("#roofline-cpu .at-desk svg");
  drawing.focus();
  drawing.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  seen.push(!tip.hidden && drawing.querySelectorAll(".at").length === 1);
  const operation = document.getElementById("filter-op");
  operation.value = "gcn";
  fire(operation, "change");
  seen.push(location.hash === "#filter=op:gcn");
  document.querySelector("#layers thead th:nth-child(5) button").click();
  seen.push(location.hash === "#filter=op:gcn&sort=layers:4:ascending");
  document.getElementById("clear").click();
  seen.push(document.getElementById("count").textContent === "222 timings");
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  seen.push(getComputedStyle(document.body).backgroundColor !== before);
  document.querySelector("#ops").parentElement.nextElementSibling.click();
  seen.push(document.querySelectorAll("#ops tbody tr[hidden]").length === 0);
  document.title = seen.join(" ");
});
"""


def test_hovering_keys_choices_and_buttons_do_what_they_say(report: Report, tmp_path: Path) -> None:
    page = report.html().replace("</body>", f"<script>{_HAND}</script></body>")
    seen = re.search(r"<title>([^<]*)</title>", Browser(tmp_path, page).dom())
    assert seen is not None
    assert seen[1] == " ".join(["true"] * 8)


@pytest.mark.parametrize(("width", "height"), [(1440, 1600), (390, 844)])
def test_a_screenshot_is_not_blank(browser: Browser, width: int, height: int) -> None:
    taken_width, taken_height, size = browser.picture(width, height)
    assert (taken_width, taken_height) == (width, height)
    assert size > 20_000


def test_nothing_is_wider_than_a_phone(report: Report, tmp_path: Path) -> None:
    # a window without a frame is never narrower than 500 pixels; a frame inside it is
    probe = "addEventListener('load', () => parent.postMessage(document.documentElement.scrollWidth, '*'))"
    inner = tmp_path / "inner.html"
    inner.write_text(report.html().replace("</body>", f"<script>{probe}</script></body>"), encoding="utf-8")
    outer = (
        f'<script>addEventListener("message", (event) => {{ document.title = event.data; }})</script>'
        f'<iframe width="390" height="844" frameborder="0" src="{inner.as_uri()}"></iframe>'
    )
    width = re.search(r"<title>(\d+)</title>", Browser(tmp_path, outer).dom())
    assert width is not None
    assert int(width[1]) <= 390


def test_a_sentence_in_a_table_is_not_a_column_of_words_on_a_phone(tmp_path: Path) -> None:
    sentence = "remote rows of every layer are fetched from their owners, batch by batch"
    table = plain_table(["form", *["figure"] * 8, "how"], [["edge cut", *["100 MB"] * 8, sentence]])
    height = "document.title = document.querySelector('tbody tr').offsetHeight / 20"
    probe = f"<script>addEventListener('load', () => {{ {height}; }})</script>"
    lines = re.search(r"<title>([\d.]+)</title>", Browser(tmp_path, document("page", table, probe)).dom())
    assert lines is not None
    assert float(lines[1]) < 6
