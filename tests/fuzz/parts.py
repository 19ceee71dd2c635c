"""What the lines of a fuzzed script are made of: graphs, modules as users write them, hooks, small helpers.

Everything a model holds lives here and not in the script, so that models can be pickled.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    ChebConv,
    DeepGCNLayer,
    GCNConv,
    HeteroConv,
    MessagePassing,
    SAGEConv,
    SuperGATConv,
    to_hetero,
)
from torch_geometric.utils import coalesce, to_torch_coo_tensor, to_torch_csr_tensor

from plait.loader import NeighborLoader

__all__ = [
    "Attending",
    "Chain",
    "Dropped",
    "Halved",
    "Heads",
    "InPlace",
    "OwnMessage",
    "OwnNew",
    "OwnNorm",
    "Typed",
    "adj_t",
    "apart",
    "backward",
    "batch",
    "batched",
    "cast",
    "data",
    "doubled",
    "features",
    "graph",
    "halved",
    "in_threads",
    "inner",
    "layer",
    "made",
    "named",
    "of_layers",
    "on_new_graphs",
    "optimise",
    "replica",
    "resaved",
    "sampled",
    "second",
    "stacked",
    "strided",
    "trained",
    "twice",
    "wanted",
]

ATTRIBUTES, RELATIONS = 2, 2
# What a layer takes beside x and edge_index, by the name of its class; the others take nothing more.
TAKES = {
    **dict.fromkeys(
        ("GCNConv", "GraphConv", "SGConv", "SSGConv", "TAGConv", "MixHopConv", "APPNP"), "weight"
    ),
    **dict.fromkeys(("ChebConv", "LEConv", "ARMAConv", "LGConv", "FAConv", "GatedGraphConv"), "weight"),
    **dict.fromkeys(("GATConv", "GATv2Conv", "TransformerConv", "GMMConv", "GENConv", "CGConv"), "attr"),
    **dict.fromkeys(("ResGatedGraphConv", "PNAConv"), "attr"),
    **dict.fromkeys(("RGCNConv", "FiLMConv"), "type"),
}


# Graphs ----------------------------------------------------------------------------------------------------


def graph(kind: str, nodes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(edge_index, edge_weight, edge_attr, edge_type) of a small odd graph, sorted by target."""
    draw = torch.Generator().manual_seed(seed)
    src, dst = torch.randint(
        0, max(nodes, 1), (2, 0 if kind == "no edges" or not nodes else 2 * nodes), generator=draw
    )
    if kind == "hub":
        dst[: len(dst) // 2] = nodes - 1
    if kind == "isolated":
        src, dst = src // 2, dst // 2
    if kind == "repeated":
        src, dst = torch.cat([src, src[:3], src[:1]]), torch.cat([dst, dst[:3], dst[:1]])
    if kind == "cliques":  # nodes nobody can tell apart
        pairs = torch.cartesian_prod(torch.arange(nodes), torch.arange(nodes)).t()
        src, dst = pairs[:, (pairs[0] // 3 == pairs[1] // 3) & (pairs[0] != pairs[1])]
    if kind == "loops":
        src, dst = torch.cat([src, torch.arange(nodes)]), torch.cat([dst, torch.arange(nodes)])
    order = torch.argsort(dst, stable=True)
    ends, count = torch.stack([src, dst])[:, order], len(src)
    # multiples of 1/8, zeros among them: their sums are exact, so that a degree of 0 is one for everybody
    weight = torch.randint(0, 9, (count,), generator=draw) / 8.0
    attr = torch.rand(count, ATTRIBUTES, generator=draw)
    return ends, weight, attr, torch.randint(0, RELATIONS, (count,), generator=draw)


def features(nodes: int, width: int, seed: int = 0) -> Tensor:
    """Normal numbers, a third of them 0."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, width, generator=draw)
    return x * (torch.rand(nodes, width, generator=draw) < 0.7)


def strided(x: Tensor, how: str) -> Tensor:
    """The same kind of numbers in another place: what svd, slices and expand leave behind."""
    x = x.detach()
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "stepped":
        return torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2]
    if how == "expanded":
        return x[..., :1].expand_as(x)
    return torch.cat([x, x], dim=-1)[..., 1 : x.shape[-1] + 1]  # "offset": rows further apart than long


def adj_t(edge_index: Tensor, nodes: int, layout: str = "csr") -> Tensor:
    """The transposed adjacency matrix, every edge once."""
    ends = coalesce(edge_index.flip(0), num_nodes=max(nodes, 1))
    build = to_torch_csr_tensor if layout == "csr" else to_torch_coo_tensor
    return build(ends, size=(nodes, nodes), is_coalesced=True)


def cast(dtype: str, *values: Any) -> list[Any]:
    """The numbers among the values in another type; row numbers and None stay."""
    kept = (v.detach() if isinstance(v, Tensor) else v for v in values)
    return [getattr(v, dtype)() if isinstance(v, Tensor) and v.is_floating_point() else v for v in kept]


def data(x: Tensor, edge_index: Tensor) -> Data:
    return Data(x=x, edge_index=edge_index, num_nodes=x.shape[0])


# Models ----------------------------------------------------------------------------------------------------

Edges = tuple[Any, ...]
Step = Any  # a module, a function of h, or one of the words of `_apply`


def _feed(conv: Callable[..., Tensor], h: Any, edges: Edges) -> Tensor:
    """The layer's output, given what its class takes."""
    of = conv if isinstance(conv, nn.Module) else conv.__self__
    edge_index, weight, attr, kind = edges
    name = next((c.__name__ for c in type(of).__mro__ if c.__name__ in TAKES), "")
    takes = TAKES.get(name, "")
    if takes == "attr" and name in (
        "GATConv",
        "GATv2Conv",
        "TransformerConv",
        "GENConv",
        "PNAConv",
        "ResGatedGraphConv",
    ):
        takes = "attr" if getattr(of, "edge_dim", None) or getattr(of, "lin_edge", None) is not None else ""
    more = {"weight": weight, "attr": attr, "type": kind}.get(takes)
    if name == "FAConv":
        more = None if of.normalize else more
    before = (h, h) if name == "FAConv" else (h,)
    return conv(*before, edge_index) if more is None else conv(*before, edge_index, more)


class InPlace(nn.Module):
    """h += conv(h), as a step of a chain."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv


class OwnMessage(GCNConv):
    """A layer of the user's own, made from PyG's."""

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return 2 * super().message(x_j, edge_weight)


class OwnNorm(ChebConv):
    def __norm__(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ends, weight = super().__norm__(*arguments, **options)
        return ends, weight / 2


class OwnNew(SAGEConv):
    """Made with an argument that `__new__` insists on."""

    def __new__(cls, width: int, out: int, **options: Any) -> OwnNew:
        made = super().__new__(cls)
        made.__dict__["widths"] = (width, out)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OwnNew, self.widths, self.__dict__


def _apply(step: Step, h: Tensor, skip: Tensor, edges: Edges) -> Tensor:
    inplace = getattr(step, "__self__", step)
    if isinstance(inplace, InPlace):
        h = h * 1
        h += _feed(inplace.conv, h, edges)
        return h
    if isinstance(step, MessagePassing) or isinstance(getattr(step, "__self__", None), MessagePassing):
        return _feed(step, h, edges)
    if isinstance(inplace, DeepGCNLayer):
        return step(h, edges[0])
    if step == "h + skip":
        return h + skip if h.shape == skip.shape else h
    if step == "h += skip":
        h += skip if h.shape == skip.shape else 1
        return h
    if step == "h[0] = 0":
        h[:1] = 0
        return h
    if step == "h - mean":
        return h - h.mean(dim=0)
    return step(h)


class Chain(nn.Module):
    """Layers and the user's own code one after the other; `hold` says how the model keeps them."""

    def __init__(self, *steps: Step, hold: str = "modules", is_pair: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(s for s in steps if isinstance(s, nn.Module))
        self.is_pair = is_pair
        self.hold = hold
        if hold == "modules":
            numbers = iter(range(len(steps)))
            self.plain: Any = [next(numbers) if isinstance(s, nn.Module) else s for s in steps]
        elif hold == "list":
            self.plain = list(steps)
        elif hold == "dict":
            self.plain = dict(enumerate(steps))
        elif hold == "partial":
            self.plain = [functools.partial(_apply, s) for s in steps]
        elif hold == "lambda":
            self.plain = [lambda *rest, s=s: _apply(s, *rest) for s in steps]
        elif hold == "bound":
            self.plain = [s.__call__ if isinstance(s, nn.Module) else s for s in steps]
        elif hold == "parent":
            self.plain = list(steps)
            for part in self.parts:
                part.__dict__["owner"] = [self]

    def steps(self) -> list[Callable[[Tensor, Tensor, Edges], Tensor]]:
        """What is applied to h in turn, found the way this model holds it."""
        plain = self.plain
        if self.hold in ("partial", "lambda"):
            return list(plain)
        if self.hold == "parent" and len(self.parts):
            plain = self.parts[0].owner[0].plain
        found = plain.values() if isinstance(plain, dict) else plain
        return [functools.partial(_apply, self.parts[s] if isinstance(s, int) else s) for s in found]

    def run(self, steps: list[Any], x: Tensor, edges: Edges) -> Tensor:
        h: Any = (x, 2 * x) if self.is_pair else x
        skip = x
        for step in steps:
            h = step(h, skip, edges)
        return h

    def forward(
        self, x: Any, edge_index: Any, edge_weight: Any = None, edge_attr: Any = None, edge_type: Any = None
    ) -> Tensor:
        return self.run(self.steps(), x, (edge_index, edge_weight, edge_attr, edge_type))

    def embed(self, x: Any, *edges: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Another way in than forward: what stands before the last step, and the result."""
        steps, edges = self.steps(), (*edges, None, None, None, None)[:4]
        h = self.run(steps[:-1], x, edges) if len(steps) > 1 else x
        last = steps[-1](h, x, edges)
        return h, {"out": last}

    def replace(self, number: int, module: nn.Module) -> None:
        """Another layer in the place of one, where the model looks its layers up."""
        old, self.parts[number] = self.parts[number], module
        if self.hold in ("list", "parent"):
            self.plain = [module if _is_same(s, old) else s for s in self.plain]
            module.__dict__["owner"] = [self]
        if self.hold == "dict":
            self.plain = {k: module if _is_same(s, old) else s for k, s in self.plain.items()}


def _is_same(step: Step, module: nn.Module) -> bool:
    """Whether a step is the module; a compiled layer is another object with the same state."""
    return isinstance(step, nn.Module) and step.__dict__ is module.__dict__


class _Plain(nn.Module):
    """What to_hetero can trace: a model of x and edge_index."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = SAGEConv((width, width), 4), SAGEConv((4, 4), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Typed(nn.Module):
    """Two kinds of nodes and three of edges, made of one graph; `convs` by kind of edge, none: to_hetero."""

    KINDS = ("a", "to", "b"), ("b", "back", "a"), ("a", "in", "a")

    def __init__(self, convs: list[nn.Module], width: int, aggr: str = "sum") -> None:
        super().__init__()
        if convs:
            self.layers = HeteroConv(dict(zip(self.KINDS, convs, strict=True)), aggr=aggr)
        else:
            self.layers = to_hetero(_Plain(width), (["a", "b"], list(self.KINDS)), aggr)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = dict(zip(self.KINDS, (edge_index, edge_index.flip(0), edge_index), strict=True))
        out = self.layers({"a": x, "b": 2 * x}, edges)
        return out["a"] + 0.5 * out["b"]


class Heads(nn.Module):
    """The loop of sampled blocks: targets are the first rows of the sources, edges a part of the graph's."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        count = x.shape[0] // 2 + 1
        return self.conv((x, x[:count]), edge_index[:, edge_index[1] < count])


class Dropped(nn.Module):
    """Other edges at every call, as dropout_edge leaves them."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        kept = torch.rand(edge_index.shape[1]) < 0.7 if self.training else slice(None)
        return self.conv(x, edge_index[:, kept])


class Attending(nn.Module):
    """A layer that is asked for its attention weights too."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.conv(x, edge_index, return_attention_weights=True)


# What users do with them -----------------------------------------------------------------------------------


def layer(model: nn.Module, number: int = 0) -> Any:
    """A layer of the model."""
    found = [m for m in model.modules() if isinstance(m, MessagePassing)]
    return found[number % len(found)]


def inner(model: nn.Module, number: int = 0) -> Any:
    """The first module with a weight inside a layer, else the layer."""
    conv = layer(model, number)
    return next((m for m in conv.modules() if m is not conv and hasattr(m, "weight")), conv)


def twice(*arguments: Any) -> Any:
    """A hook: results, gradients and arguments are doubled."""
    last = arguments[-1] if isinstance(arguments[-1], (Tensor, tuple)) else None
    if isinstance(last, tuple):
        return tuple(
            2 * v if isinstance(v, Tensor) and v.is_floating_point() and v.layout == torch.strided else v
            for v in last
        )
    return None if last is None else 2 * last


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def backward(out: Any) -> None:
    """The gradients of a weighted sum of everything in `out`, where there are any."""
    if isinstance(out, (tuple, list, dict)):
        for part in out.values() if isinstance(out, dict) else out:
            backward(part)
    elif isinstance(out, Tensor) and out.requires_grad:
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        out.backward(direction.to(out.dtype), retain_graph=True)


def wanted(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that want a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


def of_layers(model: nn.Module) -> list[nn.Parameter]:
    """The parameters but those of batch norms.

    torch's own second derivative of a batch norm is wrong where the weight's stride is not 1 (2.13, CPU).
    """
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    without = {id(p) for m in norms for p in m.parameters()}
    return [p for p in model.parameters() if id(p) not in without]


def halved(model: nn.Module) -> dict[str, Tensor]:
    """Other parameters for the model."""
    return {name: parameter / 2 for name, parameter in model.named_parameters()}


def stacked(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of two models of its kind."""
    return {name: torch.stack([p, p / 2]).detach() for name, p in model.named_parameters()}


def second(model: nn.Module, x: Tensor, *edges: Any) -> list[Tensor | None]:
    """Gradients of the size of the gradients of a smooth function of the output."""
    x = x.detach().requires_grad_()
    inputs = [x, *wanted(model)]
    first = torch.autograd.grad(model(x, *edges).tanh().sum(), inputs, create_graph=True, allow_unused=True)
    size = sum(g.square().sum() for g in first if g is not None)
    return list(torch.autograd.grad(size, inputs, allow_unused=True))


def made(model: nn.Module, part: nn.Module) -> None:
    """A part's weights become plain tensors with a history, as a network that makes them leaves them."""
    held = [(owner, name, p) for owner in part.modules() for name, p in owner._parameters.items()]
    first = next(p for _, _, p in held if p is not None)
    model.scale = nn.Parameter(torch.full((), 0.5, dtype=first.dtype))
    for owner, name, weight in held:
        if weight is not None:
            del owner._parameters[name]
            setattr(owner, name, weight.detach() * model.scale)


def named(model: nn.Module, x: Any, *edges: Any) -> Any:
    """The output of a call by keywords."""
    names = ("edge_index", "edge_weight", "edge_attr", "edge_type")
    return model(x=x, **dict(zip(names, edges, strict=False)))


def replica(module: Any) -> Any:
    """The model as nn.DataParallel copies it to a device: parameters are plain tensors with a history."""
    found = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        if child is not None:
            found._modules[name] = replica(child)
    for name, parameter in module._parameters.items():
        places = found._parameters if parameter is None else found.__dict__
        places[name] = None if parameter is None else parameter.clone()
    return found


def apart(model: nn.Module, *arguments: Any) -> list[Any]:
    """The gradients of a call in each of two threads, as `in_threads` runs them.

    One after the other where a weight is a plain tensor with a history, such as the one that weight_norm and
    pruning set at every call: a thread may read the other's, whose graph the first backward pass frees.
    """

    def gradients(*given: Any) -> list[Tensor | None]:
        out = model(*given)
        inputs = [v for v in (given[0], *wanted(model)) if v.requires_grad]
        return list(torch.autograd.grad(out.square().sum(), inputs, allow_unused=True))

    shares = any(isinstance(value, Tensor) for m in model.modules() for value in vars(m).values())
    return _in_threads(model, gradients, arguments, takes_turns=shares)


def optimise(model: nn.Module, rate: float = 0.01) -> None:
    """A step down the gradients there are."""
    torch.optim.SGD(model.parameters(), lr=rate).step()


def resaved(model: nn.Module) -> Any:
    """The model, saved and loaded."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def batch(seed: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x, edge_index, edge_weight, edge_attr, edge_type) of some small graphs as one."""
    parts = [graph(kind, nodes, seed) for kind, nodes in (("hub", 5), ("no edges", 1), ("loops", 3))]
    names = ("edge_index", "edge_weight", "edge_attr", "edge_type")
    graphs = [
        Data(x=features(nodes, width, seed), num_nodes=nodes, **dict(zip(names, part, strict=True)))
        for nodes, part in zip((5, 1, 3), parts, strict=True)
    ]
    made = Batch.from_data_list(graphs)
    return made.x, made.edge_index, made.edge_weight, made.edge_attr, made.edge_type


def sampled(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """(x, edge_index) of a batch of plait's loader, whose edge_index carries its graph."""
    found = next(iter(NeighborLoader(data(x.detach(), edge_index), num_neighbors=[3, 2], batch_size=3)))
    return found.x, found.edge_index


def in_threads(model: nn.Module, *arguments: Any) -> list[Any]:
    """The outputs of a call in each of two threads; an error in one of them is raised.

    At once, but for models that draw random numbers, in an order that is nobody's, for those asked for
    attention weights, which PyG hands over in an attribute of the layer, and for those with a spectral norm,
    whose vectors each call takes a step further.
    """
    return _in_threads(model, model, arguments)


def _in_threads(
    model: nn.Module, run: Callable[..., Any], arguments: tuple[Any, ...], takes_turns: bool = False
) -> list[Any]:
    alone = (nn.Dropout, Dropped, SuperGATConv, Attending, parametrizations._SpectralNorm)
    takes_turns = takes_turns or any(isinstance(m, alone) for m in model.modules())
    found: list[Any] = [None, None]

    def call(place: int) -> None:
        try:
            found[place] = run(*arguments)
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
        if takes_turns:
            thread.join()
    for thread in threads:
        thread.join()
    for out in found:
        if isinstance(out, Exception):
            raise out
    return found


def trained(model: nn.Module, *arguments: Any, steps: int = 4) -> list[Any]:
    """The outputs of some steps of training."""
    found = []
    for _ in range(steps):
        model.zero_grad()
        out = model(*arguments)
        backward(out)
        optimise(model, 0.001)
        found.append(out.detach())
    return found


def on_new_graphs(model: nn.Module, x: Tensor, edge_index: Tensor, *rest: Any, calls: int = 36) -> Any:
    """The last outputs of many calls on graphs never seen before: long enough for a clock to decide."""
    for _ in range(calls):
        out = model(x, edge_index.clone(), *rest)
    return out


def batched(model: nn.Module, *arguments: Any) -> list[Tensor | None]:
    """The gradients of some directions at once."""
    out = model(*arguments)
    directions = torch.stack([torch.ones_like(out), 2 * out.detach()])
    inputs = [v for v in (*arguments[:1], *wanted(model)) if v.requires_grad]
    return list(torch.autograd.grad(out, inputs, directions, is_grads_batched=True, allow_unused=True))


class doubled:  # noqa: N801  it is called like a function
    """A method with twice its results, in the place of that method."""

    def __init__(self, method: Callable[..., Tensor]) -> None:
        self.method = method

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        return 2 * self.method(*arguments, **named)
