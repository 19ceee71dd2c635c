"""Draws models and graphs as lines of Python, with what the rules need to know of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.layers import (
    ADDED,
    BETWEEN,
    EDGE_NETWORKS,
    HOLDS,
    KINDS,
    LAYERS,
    LAZY,
    NETWORKS,
    NODES,
    WIDTH,
    Layer,
    Options,
)
from tests.fuzz.rules import CAST, Facts

__all__ = ["graphs", "models"]


@st.composite
def models(draw: Any) -> tuple[list[str], Facts]:
    shape = draw(st.sampled_from((*("chain",) * 5, "layer", "sequential", "gnn", "typed", "wrapped")))
    width = draw(st.sampled_from((WIDTH, WIDTH, 1)))
    if shape == "gnn":
        return _gnn(draw, width)
    if shape == "typed":
        return _typed(draw, width)
    if shape == "wrapped":
        return _wrapped(draw, width)
    count = 1 if shape == "layer" else draw(st.integers(1, 3))
    names = [draw(st.sampled_from(sorted(LAYERS))) for _ in range(count)]
    is_pair = shape == "chain" and bool(LAYERS[names[0]].pair) and draw(st.booleans()) and draw(st.booleans())
    is_sparse, wide, steps = True, width, []
    for number, name in enumerate(names):
        layer = LAYERS[name]
        options = _options(draw, layer, shape)
        is_sparse &= layer.sparse(options)
        text = _layer_text(draw, layer, options, wide, is_pair and not number)
        is_even = layer.out(wide, options) == wide and not (is_pair and not number)
        is_added = shape == "chain" and name in ADDED and is_even and draw(st.booleans())
        steps.append(f"InPlace({text})" if is_added else text)
        wide = layer.out(wide, options)
        if number + 1 < count or draw(st.booleans()):
            steps.append(draw(st.sampled_from(BETWEEN)).format(w=wide))
    takes = {LAYERS[name].takes for name in names} - {""}
    if any("orm" in step or "mean" in step for step in steps):
        takes.add("fine")  # differences of nearly equal rows: nothing is left of them in half precision
    if shape == "layer":
        return _alone(names[0], steps[0], width, is_sparse)
    if shape == "sequential":
        takes -= {"attr", "type"}
    words = takes | ({"edge list"} if not (is_sparse and not is_pair and draw(st.booleans())) else {"sparse"})
    if "sparse" in words:
        words -= {"weight", "attr", "type"}
    if shape == "sequential":
        return _sequential(names, steps, width, frozenset(words - {"weight"}))
    if len(names) > 1 and draw(st.booleans()) and draw(st.booleans()):
        steps += [s for s in steps[:1] if LAYERS[names[0]].out(width, {}) == width == wide]
    hold = draw(st.sampled_from(HOLDS))
    last = [f"hold={hold!r}"] * (hold != "modules") + ["is_pair=True"] * is_pair
    return (
        [f"model = Chain({', '.join([*steps, *last])})"],
        Facts(
            frozenset(names),
            frozenset(words | {"chain"} | _lookahead(takes, words)),
            _arguments(words),
            width,
        ),
    )


def _lookahead(takes: set[str], words: Any) -> set[str]:
    return {"lookahead"} if not takes & {"attr", "type"} and "edge list" in words else set()


def _arguments(words: Any) -> str:
    if words & {"attr", "type"}:
        return "x, edge_index, edge_weight, edge_attr, edge_type"
    return "x, edge_index, edge_weight" if "weight" in words else "x, edge_index"


def _options(draw: Any, layer: Layer, shape: str) -> Options:
    keys = draw(st.lists(st.sampled_from(sorted(layer.options)), max_size=2, unique=True))
    options = {key: draw(st.sampled_from(layer.options[key])) for key in keys}
    if shape == "sequential":
        options.pop("edge_dim", None)
    return options


def _layer_text(draw: Any, layer: Layer, options: Options, width: int, is_pair: bool) -> str:
    wide = -1 if layer.text.startswith(LAZY) and draw(st.integers(0, 9)) == 9 else width
    fields: dict[str, object] = {"w": layer.pair.format(w=wide) if is_pair else wide}
    if "{n}" in layer.text:
        fields["n"] = draw(st.sampled_from(NETWORKS)).format(w=width)
    if "{e}" in layer.text:
        fields["e"] = draw(st.sampled_from(EDGE_NETWORKS)).format(w=width)
    if "{a}" in layer.text:
        fields["a"] = draw(st.sampled_from((["mean"], ["max", "std"], ["sum", "var", "min"])))
        fields["s"] = draw(st.sampled_from((["identity"], ["amplification", "linear"])))
    extra = [f"{key}={value}" for key, value in options.items()]
    text = layer.text.format(**fields, o="".join(f", {one}" for one in extra))
    return text.replace("(, ", "(")


def _alone(name: str, text: str, width: int, is_sparse: bool) -> tuple[list[str], Facts]:
    """A layer that is the whole model; those that need features or kinds of edges come in a chain."""
    takes = LAYERS[name].takes
    needs = takes in ("attr", "type") or name == "FAConv"
    words = {"edge list"} | ({"weight"} if takes == "weight" and name != "FAConv" else set())
    if needs:
        words |= {takes, "chain"}
        return [f"model = Chain({text})"], Facts(
            frozenset([name]), frozenset(words), _arguments(words), width
        )
    return [f"model = {text}"], Facts(
        frozenset([name]), frozenset(words | {"lookahead"}), _arguments(words), width
    )


def _sequential(
    names: list[str], steps: list[str], width: int, words: frozenset[str]
) -> tuple[list[str], Facts]:
    """PyG's Sequential; what is no module is left out."""
    if any(LAYERS[name].takes in ("attr", "type") or name == "FAConv" for name in names):
        return (
            [f"model = Chain({', '.join(steps)})"],
            Facts(frozenset(names), words | {"attr", "type", "chain", "edge list"} - {"sparse"},
                  "x, edge_index, edge_weight, edge_attr, edge_type", width),
        )  # fmt: skip
    parts = []
    for step in steps:
        if step.split("(")[0] in LAYERS:
            parts.append(f"({step}, 'x, edge_index -> x')")
        elif step.startswith("nn."):
            parts.append(step)
    lookahead = {"lookahead"} if "edge list" in words else set()
    return (
        [f"model = Sequential('x, edge_index', [{', '.join(parts)}])"],
        Facts(frozenset(names), words | lookahead, "x, edge_index", width),
    )


def _gnn(draw: Any, width: int) -> tuple[list[str], Facts]:
    kind = draw(st.sampled_from(("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN", "PNA")))
    extra = draw(
        st.lists(
            st.sampled_from(
                ("norm='batch_norm'", "jk='cat'", "jk='max'", "act_first=True", "act='tanh'", "dropout=0.5")
            ),
            max_size=2,
            unique=True,
        )
    )
    if kind == "PNA":
        extra.append("aggregators=['mean', 'std'], scalers=['identity'], deg=torch.tensor([1, 4, 2])")
    if kind == "GAT":  # whose dropout drops attention weights, others than PyG's
        extra = [one for one in extra if "dropout" not in one] + draw(st.sampled_from(([], ["v2=True"])))
    extra = [
        one for k, one in enumerate(extra) if not any(one[:2] == "jk" == other[:2] for other in extra[:k])
    ]
    text = f"{kind}({width}, 4, num_layers=2{''.join(f', {one}' for one in extra)})"
    words = {"edge list", "lookahead"} | ({"fine"} if "norm" in text else set())
    return [f"model = {text}"], Facts(frozenset(), frozenset(words), "x, edge_index", width)


def _typed(draw: Any, width: int) -> tuple[list[str], Facts]:
    """Kinds of nodes and edges: HeteroConv, or a model made so by to_hetero."""
    pair = ("SAGEConv(({w}, {w}), 4)", "GATConv(({w}, {w}), 4, add_self_loops=False)",
            "GraphConv(({w}, {w}), 4, aggr='mean')", "SAGEConv((-1, -1), 4)")  # fmt: skip
    own = ("GCNConv({w}, 4)", "GATConv({w}, 4)", "SAGEConv({w}, 4, aggr='max')", "GCNConv(-1, 4)")
    aggr = draw(st.sampled_from(("sum", "mean", "max")))
    convs = [draw(st.sampled_from(options)).format(w=width) for options in (pair, pair, own)]
    listed = draw(st.sampled_from((f"[{', '.join(convs)}]",) * 3 + ("[]",)))
    words = frozenset({"edge list", "lookahead"})
    return [f"model = Typed({listed}, {width}, {aggr!r})"], Facts(frozenset(), words, "x, edge_index", width)


def _wrapped(draw: Any, width: int) -> tuple[list[str], Facts]:
    """A layer in a model that makes its own edges, or asks for attention weights."""
    options = {
        "Heads": (
            "SAGEConv({w}, 4)", "SAGEConv({w}, 4, aggr='max')", "SAGEConv({w}, 4, aggr='lstm')",
            "GATConv(({w}, {w}), 4)", "GATv2Conv(({w}, {w}), 4)", "TransformerConv(({w}, {w}), 4)",
            "LEConv({w}, 4)", "GraphConv({w}, 4)", "EdgeConv(nn.Linear(2 * {w}, 4))",
            "GINConv(nn.Linear({w}, 4))",
        ),
        "Dropped": (
            "GCNConv({w}, 4)", "SAGEConv({w}, 4)", "GATConv({w}, 2, heads=2)", "GCN({w}, 4, num_layers=2)",
            "GIN({w}, 4, num_layers=2)", "APPNP(2, 0.1)", "EdgeCNN({w}, 4, num_layers=2)",
        ),
        "Attending": (
            "GATConv({w}, 2, heads=2)", "GATv2Conv({w}, 2, heads=2)", "TransformerConv({w}, 2, heads=2)",
            "GATConv({w}, 4, add_self_loops=False)", "GATv2Conv({w}, 4, residual=True)",
        ),
    }  # fmt: skip
    kind = draw(st.sampled_from(sorted(options)))
    text = f"{kind}({draw(st.sampled_from(options[kind])).format(w=width)})"
    words = frozenset({"edge list", "lookahead"})
    return [f"model = {text}"], Facts(frozenset(), words, "x, edge_index", width)


@st.composite
def graphs(draw: Any, facts: Facts) -> list[str]:
    kind, nodes, seed = draw(st.sampled_from(KINDS)), draw(st.sampled_from(NODES)), draw(st.integers(0, 2))
    lines = [
        f"edge_index, edge_weight, edge_attr, edge_type = graph({kind!r}, {nodes}, seed={seed})",
        f"x = features({nodes}, {facts.width}, seed={seed})",
    ]
    if "weight" not in facts.words:
        lines.append("edge_weight = None")
    if "sparse" in facts.words:
        layout = draw(st.sampled_from(("csr", "coo")))
        lines.append(f"edge_index = adj_t(edge_index, {nodes}, {layout!r})")
    dtypes = ("double", "float", "double", "float", "bfloat16", "half")
    dtype = draw(st.sampled_from(dtypes[:4] if facts.words & {"sparse", "fine"} else dtypes))
    if dtype != "float":
        lines.append(f"model = model.{dtype}(); {CAST} = cast({dtype!r}, {CAST})")
    if draw(st.booleans()):
        lines.append("x.requires_grad_()")
    return lines
