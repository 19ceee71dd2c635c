"""What is measured: rows of (graph, layer, widths, mode), and where the graphs come from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.errors import GraphError, InputError, did_you_mean, unknown
from plait.graph import LoadedGraph, generate, load_arrays

__all__ = [
    "ATTENTION", "DEVICE_GRAPHS", "EVERY_LAYER", "EVERY_MODEL", "GRAPHS", "HEADS", "LAYERS", "LEARNED",
    "MODELS", "MODEL_GRAPHS", "MODES", "WIDTHS", "LayerCase", "data_folders", "find_graph", "known",
    "layer_cases", "parse_widths",
]  # fmt: skip

LAYERS = ("gcn", "sage-mean", "sage-max", "gin", "sgc", "tag")
ATTENTION = ("gat", "gatv2", "transformer")
LEARNED = ("rgcn", "pna", "edgeconv", "resgated")  # messages with weights of their own
# LAYERS is what is measured where nothing is named; these are the names that may be
EVERY_LAYER = (*LAYERS, *ATTENTION, *LEARNED)
HEADS = 4
GRAPHS = (
    "cora",
    "pubmed",
    "amazon_photo",
    "coauthor_cs",
    "ego_twitter",
    "web_cnr2000",
    "road_luxembourg",
    "tu_proteins",
)
DEVICE_GRAPHS = ("rmat-arxiv", "grid-road", "cliques", "rmat-reddit", "ego_twitter", "web_cnr2000", "pubmed")
WIDTHS = ((64, 64), (256, 32), (32, 256))
MODES = ("inference", "training")

MODELS = ("gcn", "sage", "gin")
EVERY_MODEL = (*MODELS, "gat")
MODEL_GRAPHS = ("cora", "citeseer", "pubmed", "amazon_photo", "coauthor_cs", "flickr_attr", "dblp_full")


@dataclass(frozen=True, order=True)
class LayerCase:
    """One cell of the layers grid: a middle layer, so its input needs a gradient in training.

    width_out is the width of the whole output: a head of an attention layer has width_out / heads of it.
    """

    graph: str
    layer: str
    width_in: int
    width_out: int
    mode: str
    heads: int = 1

    def to_dict(self) -> dict[str, object]:
        """Plain values for a record."""
        return asdict(self)

    @property
    def widths(self) -> str:
        """As tables show it: "64->64"."""
        return f"{self.width_in}->{self.width_out}"


def layer_cases(
    graphs: Iterable[str] = GRAPHS,
    layers: Iterable[str] = LAYERS,
    widths: Iterable[tuple[int, int]] = WIDTHS,
    modes: Iterable[str] = MODES,
    heads: int = HEADS,
) -> list[LayerCase]:
    """The grid, graph by graph, so that each is read once; unknown layers or modes are refused."""
    chosen = [known("--layers", layer, EVERY_LAYER) for layer in layers]
    wanted = [known("--modes", mode, MODES) for mode in modes]
    grid = itertools.product(graphs, chosen, widths, wanted)
    return [
        LayerCase(graph, layer, *pair, mode, _heads_of(layer, pair[1], heads))
        for graph, layer, pair, mode in grid
    ]


def _heads_of(layer: str, width_out: int, heads: int) -> int:
    if layer not in ATTENTION:
        return 1
    if heads < 1 or width_out % heads:
        raise InputError(f"--heads: {heads} heads do not divide an output of {width_out} columns")
    return heads


def known(flag: str, name: str, names: Sequence[str]) -> str:
    """`name` when it is one of `names`, else an error that lists them."""
    if name not in names:
        raise InputError(unknown(flag, name, names))
    return name


def parse_widths(text: str) -> tuple[int, int]:
    """(64, 32) of "64->32", "64:32" or "64-32"."""
    for sign in ("->", ":", "-"):
        before, found, after = text.partition(sign)
        if found and before.isdigit() and after.isdigit() and int(before) and int(after):
            return int(before), int(after)
    raise InputError(f"--widths: {text!r} is not a pair of widths; write for example 64->32")


def find_graph(name: str, data_dir: str | None = None) -> LoadedGraph:
    """The graph of a generator ("rmat:scale=14,edges=2e5"), of a file, or of a name in a data folder.

    Folders are searched in this order: `data_dir`, the environment's PLAIT_DATA, ../shared/data.
    """
    if ":" in name or name in generate.KINDS:
        return generate.parse(name)
    if name.endswith(".npz"):
        return _load_file(Path(name))
    for folder in data_folders(data_dir):
        path = folder / f"{name}.npz"
        if path.exists():
            return load_arrays(path)
    if Path(name).is_file():
        raise GraphError(
            f"{name}: not an npz file; write its edges with numpy.savez(path, edge_index=..., x=..., y=...)"
        )
    searched = ", ".join(map(str, data_folders(data_dir))) or "any data folder"
    files = [path.stem for folder in data_folders(data_dir) for path in folder.glob("*.npz")]
    raise InputError(
        f"graph {name!r}: no {name}.npz in {searched}; {did_you_mean(name, [*files, *generate.KINDS])}"
        "give --data-dir, set PLAIT_DATA, or use a generator such as rmat:scale=14,edges=2e5"
    )


def _load_file(path: Path) -> LoadedGraph:
    """The graph in a file; the error for one that is not there names a file of nearly that name."""
    if not path.exists():
        near = did_you_mean(path.name, [other.name for other in path.parent.glob("*.npz")])
        raise GraphError(f"{path}: no such file; {near or 'check the path'}".rstrip())
    return load_arrays(path)


def data_folders(data_dir: str | None = None) -> list[Path]:
    """Where graph files may lie, first choice first; only folders that exist, a given one must."""
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise InputError(f"--data-dir: {data_dir} is not a folder")
        return [Path(data_dir)]
    named = os.environ.get("PLAIT_DATA")
    choices = [Path(named)] if named else []
    # next to the current folder, and next to the checkout plait runs from
    choices += [Path("..") / "shared" / "data", Path(__file__).parents[4] / "shared" / "data"]
    return [folder for folder in choices if folder.is_dir()]
