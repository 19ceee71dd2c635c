"""The colours of the page, by name, in light and in dark; distinguishable for colour-blind readers."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["colour_of", "css", "heat_class", "printed"]

# Lines and marks follow Okabe and Ito; the heat map runs from orange over grey to blue, which no common
# form of colour blindness confuses.
LIGHT = {
    "paper": "#fcfbf8",
    "card": "#ffffff",
    "ink": "#1c1e22",
    "soft": "#555b64",
    "faint": "#7d838c",
    "rule": "#e3e0d9",
    "grid": "#eceae4",
    "own": "#0067a5",
    "torch": "#c4500a",
    "pyg": "#a8457f",
    "dgl": "#00775a",
    "peer": "#6d737c",
    "wash": "#dcebf6",
    "slow3": "#b35806",
    "slow2": "#f0a04b",
    "slow1": "#fbe1bd",
    "even": "#f1efea",
    "fast1": "#d9e8f4",
    "fast2": "#abcde8",
    "fast3": "#67a5d4",
    "fast4": "#2b74b3",
    "fast5": "#0b4880",
    "on-light": "#1c1e22",
    "on-deep": "#ffffff",
}
DARK = {
    "paper": "#14161a",
    "card": "#1a1d22",
    "ink": "#eceae5",
    "soft": "#adb2ba",
    "faint": "#858b95",
    "rule": "#30343b",
    "grid": "#272b31",
    "own": "#58b2f5",
    "torch": "#ff9a57",
    "pyg": "#e695c4",
    "dgl": "#46cda4",
    "peer": "#959ba5",
    "wash": "#1b2f41",
    "slow3": "#f0a04b",
    "slow2": "#8f5414",
    "slow1": "#4f3a20",
    "even": "#2a2d33",
    "fast1": "#1d3449",
    "fast2": "#214d76",
    "fast3": "#2a6ca8",
    "fast4": "#5aa6e3",
    "fast5": "#a6d3f7",
    "on-light": "#eceae5",
    "on-deep": "#10141a",
}
_FAMILIES = {"plait": "own", "torch": "torch", "native": "torch", "pyg": "pyg", "dgl": "dgl", "dense": "ink"}
# ratio below which a cell has this class
_STEPS = (
    (0.5, "slow3"),
    (0.8, "slow2"),
    (0.95, "slow1"),
    (1.05, "even"),
    (1.25, "fast1"),
    (1.75, "fast2"),
    (3.0, "fast3"),
    (6.0, "fast4"),
)


def colour_of(variant: str) -> str:
    """The colour of a variant by the library it comes from."""
    family = re.split(r"[-_. ]", variant, maxsplit=1)[0]
    return f"var(--{_FAMILIES.get(family, 'peer')})"


def heat_class(ratio: float) -> str:
    """The name of a ratio's colour: "slow3" far below one, "even" about one, "fast5" far above."""
    return next((name for limit, name in _STEPS if ratio < limit), "fast5")


def css() -> str:
    """The palette as custom properties: light, dark where the system says so, and whichever is chosen."""
    light, dark = _declared(LIGHT, "light"), _declared(DARK, "dark")
    return (
        f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
    )


def _declared(colours: Mapping[str, str], scheme: str) -> str:
    return f"color-scheme:{scheme};" + "".join(f"--{name}:{value};" for name, value in colours.items())


def printed(svg: str) -> str:
    """A figure as a file: on paper, the light colours written out, which every reader of SVG understands."""
    paper = '</title><rect width="100%" height="100%" fill="var(--paper)"/>'
    svg = svg.replace("</title>", paper, 1)
    return re.sub(r"var\(--([a-z0-9-]+)\)", lambda match: LIGHT[match[1]], svg)
