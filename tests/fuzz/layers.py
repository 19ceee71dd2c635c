"""The layers that are drawn as text, with their options, and the user's code between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = [
    "ADDED",
    "BETWEEN",
    "EDGE_NETWORKS",
    "HOLDS",
    "KINDS",
    "LAYERS",
    "LAZY",
    "NETWORKS",
    "NODES",
    "WIDTH",
    "Layer",
    "Options",
]

WIDTH = 4
Options = dict[str, str]


@dataclass(frozen=True)
class Layer:
    """A layer as text ({w}: width of its input), the options that may be added, and what it needs."""

    text: str
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    out: Callable[[int, Options], int] = lambda width, options: WIDTH
    takes: str = ""  # "weight", "attr" or "type"
    sparse: Callable[[Options], bool] = lambda options: True
    pair: str = ""  # how the input's width is written where x comes as a pair


def _same(width: int, options: Options) -> int:
    return width


def _heads(width: int, options: Options) -> int:
    return WIDTH // 2 if options.get("concat") == "False" else WIDTH


def _no_extremes(options: Options) -> bool:
    # on a sparse matrix PyG gives the gradient of tied extremes to one edge, on edge lists to all of them
    return options.get("aggr") not in ("'max'", "'min'")


def _never(options: Options) -> bool:
    return False


_NO, _YES = ("False",), ("True",)
_BOTH = "({w}, {w})"
_ATTENTION = {
    "concat": _NO, "edge_dim": ("2",), "residual": _YES, "bias": _NO, "add_self_loops": _NO,
    "negative_slope": ("0.5",), "fill_value": ("'add'", "0.5"),
}  # fmt: skip
NETWORKS = (
    "nn.Linear({w}, 4)",
    "nn.Sequential(nn.Linear({w}, 4), nn.ReLU(), nn.Linear(4, 4))",
    "nn.Sequential(nn.Tanh(), nn.Linear({w}, 4))",
    "MLP([{w}, 4, 4])",
)
EDGE_NETWORKS = (
    "nn.Linear(2 * {w}, 4)",
    "nn.Sequential(nn.Linear(2 * {w}, 4), nn.ReLU(), nn.Linear(4, 4))",
    "nn.Sequential(nn.Linear(2 * {w}, 4), nn.ReLU(inplace=True))",
    "nn.Sequential(nn.Linear(2 * {w}, 4), nn.BatchNorm1d(4), nn.ELU())",
    "MLP([2 * {w}, 4, 4], norm=None)",
)

# layers whose input PyG lets a model write to before the backward pass: h += conv(h)
ADDED = ("LGConv", "APPNP", "GINConv", "SGConv", "EdgeConv", "PNAConv", "GENConv", "CGConv")
# DynamicEdgeConv is left out: PyG runs it on pyg-lib only.
LAYERS: dict[str, Layer] = {
    "GCNConv": Layer("GCNConv({w}, 4{o})", {
        "improved": _YES, "cached": _YES, "add_self_loops": _NO, "normalize": _NO, "bias": _NO,
    }, takes="weight"),
    "SAGEConv": Layer("SAGEConv({w}, 4{o})", {
        "aggr": ("'max'", "'sum'", "'min'", "'lstm'", "'std'", "'median'"), "root_weight": _NO,
        "normalize": _YES, "project": _YES, "bias": _NO,
    }, sparse=lambda o: o.get("aggr") in (None, "'sum'"), pair=_BOTH),
    "GraphConv": Layer("GraphConv({w}, 4{o})", {"aggr": ("'mean'", "'max'", "'min'"), "bias": _NO},
                       takes="weight", sparse=_no_extremes, pair=_BOTH),
    "GINConv": Layer("GINConv({n}{o})", {"eps": ("0.3",), "train_eps": _YES}, pair="{w}"),
    "SGConv": Layer("SGConv({w}, 4{o})", {
        "K": ("2", "0"), "cached": _YES, "add_self_loops": _NO, "bias": _NO}, takes="weight"),
    "SSGConv": Layer("SSGConv({w}, 4, alpha=0.1{o})", {
        "K": ("2",), "cached": _YES, "add_self_loops": _NO, "bias": _NO}, takes="weight"),
    "TAGConv": Layer("TAGConv({w}, 4{o})", {"K": ("1", "0"), "normalize": _NO, "bias": _NO}, takes="weight"),
    "MixHopConv": Layer("MixHopConv({w}, 2{o})", {
        "powers": ("[0, 1]", "[2, 0]"), "add_self_loops": _NO, "bias": _NO},
        out=lambda w, o: 4 if "powers" in o else 6, takes="weight"),
    "APPNP": Layer("APPNP(K=2, alpha=0.1{o})", {"cached": _YES, "add_self_loops": _NO, "normalize": _NO},
                   out=_same, takes="weight"),
    "LGConv": Layer("LGConv({o})", {"normalize": _NO}, out=_same, takes="weight"),
    "ChebConv": Layer("ChebConv({w}, 4, K=2{o})", {"normalization": ("'rw'", "None"), "bias": _NO},
                      takes="weight", sparse=_never),
    "ClusterGCNConv": Layer("ClusterGCNConv({w}, 4{o})", {
        "diag_lambda": ("0.3",), "add_self_loops": _NO, "bias": _NO}),
    "LEConv": Layer("LEConv({w}, 4{o})", {"bias": _NO}, takes="weight", pair=_BOTH),
    "ARMAConv": Layer("ARMAConv({w}, 4{o})", {
        "num_stacks": ("2",), "num_layers": ("2",), "shared_weights": _YES, "act": ("None", "nn.Tanh()"),
        "bias": _NO}, takes="weight", sparse=_never),
    "GATConv": Layer("GATConv({w}, 2, heads=2{o})", _ATTENTION, _heads, "attr", _never, _BOTH),
    "GATv2Conv": Layer("GATv2Conv({w}, 2, heads=2{o})", _ATTENTION | {"share_weights": _YES}, _heads, "attr",
                       _never, _BOTH),
    "TransformerConv": Layer("TransformerConv({w}, 2, heads=2{o})", {
        "concat": _NO, "beta": _YES, "edge_dim": ("2",), "root_weight": _NO, "bias": _NO},
        _heads, "attr", _never, _BOTH),
    "AGNNConv": Layer("AGNNConv({o})", {"requires_grad": _NO, "add_self_loops": _NO}, _same, sparse=_never),
    "SuperGATConv": Layer("SuperGATConv({w}, 2, heads=2{o})", {
        "concat": _NO, "attention_type": ("'SD'",), "add_self_loops": _NO, "bias": _NO},
        _heads, sparse=_never),
    "FAConv": Layer("FAConv({w}{o})", {
        "eps": ("0.3",), "add_self_loops": _NO, "normalize": _NO, "cached": _YES}, _same, "weight", _never),
    "GMMConv": Layer("GMMConv({w}, 4, dim=2, kernel_size=2{o})", {
        "aggr": ("'sum'",), "bias": _NO, "separate_gaussians": _YES, "root_weight": _NO}, takes="attr",
        sparse=_never),
    "GENConv": Layer("GENConv({w}, 4{o})", {
        "aggr": ("'softmax_sg'", "'powermean'"), "learn_t": _YES, "learn_p": _YES, "bias": _YES,
        "msg_norm": _YES, "edge_dim": ("2",), "norm": ("None",)}, takes="attr", sparse=_never),
    "FiLMConv": Layer("FiLMConv({w}, 4, num_relations=2{o})", {
        "act": ("None", "nn.Tanh()"), "aggr": ("'sum'",)}, takes="type", sparse=_never),
    "CGConv": Layer("CGConv({w}, dim=2{o})", {"aggr": ("'mean'",), "batch_norm": _YES, "bias": _NO}, _same,
                    "attr", _never),
    "GatedGraphConv": Layer("GatedGraphConv({w}, num_layers=2{o})", {"aggr": ("'mean'",), "bias": _NO}, _same,
                            "weight"),
    "ResGatedGraphConv": Layer("ResGatedGraphConv({w}, 4{o})", {
        "edge_dim": ("2",), "root_weight": _NO, "bias": _NO, "act": ("nn.Tanh()",)},
        takes="attr", sparse=_never),
    "RGCNConv": Layer("RGCNConv({w}, 4, num_relations=2{o})", {
        "num_bases": ("2",), "num_blocks": ("1",), "aggr": ("'sum'", "'max'"), "root_weight": _NO,
        "bias": _NO}, takes="type", sparse=_never),
    "PNAConv": Layer("PNAConv({w}, 4, aggregators={a}, scalers={s}, deg=torch.tensor([1, 4, 2]){o})", {
        "edge_dim": ("2",), "towers": ("2",), "pre_layers": ("2",), "post_layers": ("2",),
        "train_norm": _YES, "divide_input": _YES}, takes="attr", sparse=_never),
    "OwnMessage": Layer("OwnMessage({w}, 4{o})", {"cached": _YES, "bias": _NO},
                        takes="weight", sparse=_never),
    "OwnNorm": Layer("OwnNorm({w}, 4, K=2{o})", {"normalization": ("'rw'", "None"), "bias": _NO},
                     takes="weight", sparse=_never),
    "OwnNew": Layer("OwnNew({w}, 4{o})", {"aggr": ("'sum'",), "root_weight": _NO}),
    "EdgeConv": Layer("EdgeConv({e}{o})", {"aggr": ("'mean'", "'sum'", "'min'")}, sparse=_never, pair="{w}"),
}  # fmt: skip

LAZY = ("GCNConv", "SAGEConv", "GraphConv", "GATConv", "SGConv", "TAGConv")
BETWEEN = (
    "F.relu", "nn.BatchNorm1d({w})", "nn.Dropout(0.5)", "nn.Dropout(0.5, inplace=True)", "torch.relu_",
    "'h + skip'", "'h += skip'", "'h[0] = 0'", "'h - mean'", "nn.Linear({w}, {w})", "nn.LayerNorm({w})",
    "nn.ReLU(inplace=True)", "torch.tanh", "InstanceNorm({w})", "GraphNorm({w})", "nn.LogSoftmax(dim=1)",
    "PairNorm()", "nn.ELU()", "DeepGCNLayer(GCNConv({w}, {w}), nn.LayerNorm({w}), nn.ReLU(), ckpt_grad=True)",
    "DeepGCNLayer(SAGEConv({w}, {w}), nn.Identity(), nn.ReLU(), block='res')",
)  # fmt: skip
HOLDS = ("modules", "list", "lambda", "dict", "partial", "bound", "parent")
KINDS = ("plain", "loops", "repeated", "hub", "isolated", "no edges", "cliques")
NODES = (7, 7, 7, 7, 5, 5, 1, 0)
