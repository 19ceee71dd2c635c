"""plait bench loops: training and inference loops in which something changes at every step, against PyG."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, GATConv, GCNConv, GINConv, SAGEConv, global_mean_pool
from torch_geometric.utils import add_self_loops, dropout_edge

import plait
from plait.bench import suite
from plait.bench.batches.part import edge_list
from plait.bench.cases import find_graph, known
from plait.bench.pace import threads
from plait.bench.suite import Suite, case_reader
from plait.bench.trial import in_short
from plait.errors import InputError
from plait.measure import (
    BusyElsewhere,
    Record,
    processor_clock,
    speedup,
    time_calls,
    wall_clock,
)

__all__ = ["GRAPH", "KIND", "LOOPS", "LoopCase", "Options", "World", "cases", "left", "measure", "run"]

KIND = "bench-loops"
GRAPH = "rmat:scale=12,edges=3e4"
PEERS = ("pyg", "plait")
LEARNING_RATE = 0.01
# Results of the first steps must agree this closely before the clock starts: rounding grows in training.
CHECKED_STEPS, TOLERANCE = 6, 1e-3
# Steps before the clock starts: a plan may take a few calls to see what keeps changing.
WARM_UP = 8
POOL = 24  # different graphs, batches and feature matrices; each is met as a fresh tensor
SMALL_GRAPHS, SMALL_NODES, SMALL_EDGES = 32, 20, 60


@dataclass(frozen=True, order=True)
class LoopCase:
    """One cell: a loop on a graph with a number of threads."""

    loop: str
    graph: str
    threads: int


@dataclass(frozen=True)
class Options(suite.Options):
    """How the loops are run: widths of features and hidden layers, seconds for each comparison."""

    width: int = 64
    hidden: int = 32
    classes: int = 8
    budget_seconds: float = 4.0
    repeats: int | None = None


class World:
    """What a loop runs on, the same for both peers; `compile` is what a peer does with a model."""

    def __init__(
        self, edge_index: Tensor, nodes: int, options: Options, compile: Callable[..., nn.Module]
    ) -> None:
        self.edge_index, self.nodes = edge_index.clone(), nodes
        self.width, self.hidden, self.classes = options.width, options.hidden, options.classes
        self._draw = torch.Generator().manual_seed(0)
        self._compile = compile
        self.x = torch.randn(nodes, self.width, generator=self._draw)
        self.y = torch.randint(0, self.classes, (nodes,), generator=self._draw)
        self.weight = torch.rand(edge_index.shape[1], generator=self._draw)

    def graphs(self, nodes: int | None = None, edges: int | None = None) -> list[Tensor]:
        """Random edges, another graph each: of the world's size unless told otherwise."""
        shape = (2, edges or self.edge_index.shape[1])
        return [torch.randint(0, nodes or self.nodes, shape, generator=self._draw) for _ in range(POOL)]

    def compiled(self, model: nn.Module) -> Any:
        """The peer's model, planned for the world's graph."""
        return self._compile(model, Data(x=self.x, edge_index=self.edge_index, num_nodes=self.nodes))

    def two(self, first: nn.Module, second: nn.Module) -> Trainer:
        """Two layers with a ReLU between, ready to be trained."""
        return Trainer(self.compiled(Layers(first, second)))

    def gcn(self, **options: Any) -> Trainer:
        return self.two(
            GCNConv(self.width, self.hidden, **options), GCNConv(self.hidden, self.classes, **options)
        )

    def sage(self, **options: Any) -> Trainer:
        return self.two(
            SAGEConv(self.width, self.hidden, **options), SAGEConv(self.hidden, self.classes, **options)
        )


class Layers(nn.Module):
    """Layers one after the other with ReLU between; what follows the edges goes to every layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        rest = () if edge_weight is None else (edge_weight,)
        for number, layer in enumerate(self.layers):
            x = layer(x.relu() if number else x, edge_index, *rest)
        return x


class Trainer:
    """A model and its optimiser."""

    def __init__(self, model: nn.Module, *more: nn.Parameter) -> None:
        self.model = model
        self.optimiser = torch.optim.Adam([*model.parameters(), *more], lr=LEARNING_RATE)

    def fit(self, y: Tensor, *inputs: Any, rows: Tensor | None = None) -> Tensor:
        """The loss of one training step."""
        return self.descend(lambda: self._loss(self.model(*inputs), y, rows))

    def descend(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """The loss, after a step down its gradient."""
        self.optimiser.zero_grad()
        loss = loss_of()
        torch.autograd.backward(loss)
        self.optimiser.step()
        return loss.detach()

    @staticmethod
    def _loss(out: Tensor, y: Tensor, rows: Tensor | None) -> Tensor:
        return (
            functional.cross_entropy(out, y) if rows is None else functional.cross_entropy(out[rows], y[rows])
        )


Step = Callable[[int], Tensor]  # what one step of a loop gives: a loss, or an output
Loop = Callable[[World], Step]
LOOPS: dict[str, Loop] = {}


def _loop(name: str) -> Callable[[Loop], Loop]:
    def register(loop: Loop) -> Loop:
        LOOPS[name] = loop
        return loop

    return register


# Features change -------------------------------------------------------------------------------------------


@_loop("x masked in place")
def _masked(world: World) -> Step:
    trainer, x = world.gcn(), world.x.clone()

    def step(k: int) -> Tensor:
        x.copy_(world.x).mul_((torch.rand(world.nodes, 1) < 0.8).float())
        return trainer.fit(world.y, x, world.edge_index)

    return step


@_loop("new x")
def _new_x(world: World) -> Step:
    trainer, noise = world.gcn(), [torch.randn_like(world.x) for _ in range(4)]
    return lambda k: trainer.fit(world.y, world.x + noise[k % 4], world.edge_index)


@_loop("dropout on x")
def _dropped_x(world: World) -> Step:
    trainer = world.sage()
    return lambda k: trainer.fit(world.y, functional.dropout(world.x, 0.5), world.edge_index)


@_loop("new x, inference")
def _new_x_inference(world: World) -> Step:
    model, noise = world.gcn().model.eval(), [torch.randn_like(world.x) for _ in range(4)]

    def step(k: int) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(world.x + noise[k % 4], world.edge_index)
        return out

    return step


# Scalars change --------------------------------------------------------------------------------------------


@_loop("APPNP, alpha scheduled")
def _alpha(world: World) -> Step:
    conv = APPNP(K=5, alpha=0.1)
    trainer = world.two(GCNConv(world.width, world.classes), conv)
    spread: Any = next(m for m in trainer.model.modules() if isinstance(m, APPNP))

    def step(k: int) -> Tensor:
        spread.alpha = 0.1 + 0.002 * (k % 100)
        return trainer.fit(world.y, world.x, world.edge_index)

    return step


@_loop("GIN, eps scheduled")
def _eps(world: World) -> Step:
    trainer = world.two(
        GINConv(nn.Linear(world.width, world.hidden)), GINConv(nn.Linear(world.hidden, world.classes))
    )
    layers: list[Any] = [m for m in trainer.model.modules() if isinstance(m, GINConv)]

    def step(k: int) -> Tensor:
        for layer in layers:
            layer.eps.fill_(0.01 * (k % 100))
        return trainer.fit(world.y, world.x, world.edge_index)

    return step


# Edge weights change ---------------------------------------------------------------------------------------


@_loop("learnable edge_weight")
def _learnable(world: World) -> Step:
    weight = nn.Parameter(world.weight.clone())
    model = world.gcn().model
    trainer = Trainer(model, weight)
    return lambda k: trainer.fit(world.y, world.x, world.edge_index, weight.sigmoid())


@_loop("new edge_weight")
def _new_weight(world: World) -> Step:
    trainer = world.gcn()
    return lambda k: trainer.fit(world.y, world.x, world.edge_index, world.weight * (1.0 + 0.01 * (k % 100)))


# The graph changes -----------------------------------------------------------------------------------------


@_loop("dropout_edge")
def _dropped_edges(world: World) -> Step:
    trainer = world.gcn()
    return lambda k: trainer.fit(world.y, world.x, dropout_edge(world.edge_index, p=0.2)[0])


@_loop("new graph of equal size")
def _new_graph(world: World) -> Step:
    trainer, graphs = world.gcn(), world.graphs()
    return lambda k: trainer.fit(world.y, world.x, graphs[k % POOL].clone())


@_loop("growing graph")
def _growing(world: World) -> Step:
    trainer, count = world.gcn(), world.edge_index.shape[1]
    return lambda k: trainer.fit(world.y, world.x, world.edge_index[:, : count // 2 + k % (count // 2)])


@_loop("GAT on new graphs")
def _gat(world: World) -> Step:
    heads, graphs = 4, world.graphs()
    first = GATConv(world.width, world.hidden // heads, heads=heads)
    trainer = world.two(first, GATConv(world.hidden // heads * heads, world.classes, heads=1))
    return lambda k: trainer.fit(world.y, world.x, graphs[k % POOL].clone())


@_loop("SAGE max on new graphs")
def _sage_max(world: World) -> Step:
    trainer, graphs = world.sage(aggr="max"), world.graphs()
    return lambda k: trainer.fit(world.y, world.x, graphs[k % POOL].clone())


@_loop("self loops added by hand")
def _own_loops(world: World) -> Step:
    trainer = world.gcn(add_self_loops=False)

    def step(k: int) -> Tensor:
        return trainer.fit(world.y, world.x, add_self_loops(world.edge_index, num_nodes=world.nodes)[0])

    return step


@_loop("edge_index flipped")
def _flipped(world: World) -> Step:
    trainer = world.sage()
    return lambda k: trainer.fit(world.y, world.x, world.edge_index.flip(0))


@_loop("sampled subgraphs")
def _sampled(world: World) -> Step:
    """Batches as a loader gives them: other nodes, other edges, another size each."""
    trainer, batches = world.sage(), []
    for k, edges in enumerate(world.graphs(max(world.nodes // 4, 2), max(world.edge_index.shape[1] // 3, 2))):
        nodes = max(world.nodes // 4, 2) + k
        batches.append((torch.randperm(world.nodes)[:nodes], edges[:, : edges.shape[1] - k]))

    def step(k: int) -> Tensor:
        rows, edges = batches[k % POOL]
        return trainer.fit(world.y[rows], world.x[rows], edges.clone())

    return step


def _collated(world: World) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, edge_index, batch) of many small graphs each."""
    nodes = SMALL_GRAPHS * SMALL_NODES
    offsets = torch.arange(SMALL_GRAPHS).repeat_interleave(SMALL_EDGES) * SMALL_NODES
    batch = torch.arange(SMALL_GRAPHS).repeat_interleave(SMALL_NODES)
    ends = world.graphs(SMALL_NODES, SMALL_GRAPHS * SMALL_EDGES)
    return [(torch.randn(nodes, world.width), one + offsets, batch) for one in ends]


@_loop("batches of 32 small graphs")
def _small_graphs(world: World) -> Step:
    trainer = world.two(
        GINConv(nn.Sequential(nn.Linear(world.width, world.hidden), nn.ReLU())),
        GINConv(nn.Linear(world.hidden, world.classes)),
    )
    batches, y = _collated(world), torch.arange(SMALL_GRAPHS * SMALL_NODES) % world.classes
    return lambda k: trainer.fit(y, batches[k % POOL][0].clone(), batches[k % POOL][1].clone())


@_loop("graph classification with pooling")
def _pooled(world: World) -> Step:
    trainer, batches = world.gcn(), _collated(world)
    y = torch.arange(SMALL_GRAPHS) % world.classes

    def step(k: int) -> Tensor:
        x, edges, batch = (part.clone() for part in batches[k % POOL])
        return trainer.descend(
            lambda: functional.cross_entropy(
                global_mean_pool(trainer.model(x, edges), batch, SMALL_GRAPHS), y
            )
        )

    return step


# What is asked for changes ---------------------------------------------------------------------------------


@_loop("link prediction, new negative edges")
def _links(world: World) -> Step:
    trainer = world.gcn()

    def loss() -> Tensor:
        h = trainer.model(world.x, world.edge_index)
        wrong = torch.randint(0, world.nodes, (2, world.edge_index.shape[1] // 4))
        right = world.edge_index[:, : wrong.shape[1]]
        scores = [(h[ends[0]] * h[ends[1]]).sum(dim=1) for ends in (right, wrong)]
        return functional.softplus(-scores[0]).mean() + functional.softplus(scores[1]).mean()

    return lambda k: trainer.descend(loss)


@_loop("layers frozen in turn")
def _frozen(world: World) -> Step:
    trainer = world.gcn()
    layers = [m for m in trainer.model.modules() if isinstance(m, GCNConv)]

    def step(k: int) -> Tensor:
        for number, layer in enumerate(layers):
            layer.requires_grad_(number == k % 2)
        return trainer.fit(world.y, world.x, world.edge_index)

    return step


@_loop("evaluation after every step")
def _evaluated(world: World) -> Step:
    trainer = world.sage()

    def step(k: int) -> Tensor:
        trainer.model.train()
        trainer.fit(world.y, world.x, world.edge_index)
        trainer.model.eval()
        with torch.no_grad():
            out: Tensor = trainer.model(world.x, world.edge_index)
        return out

    return step


@_loop("float and double in turn")
def _types(world: World) -> Step:
    model, xs = world.gcn().model, (world.x, world.x.double())

    def step(k: int) -> Tensor:
        model.to(xs[k % 2].dtype)
        with torch.no_grad():
            out: Tensor = model(xs[k % 2], world.edge_index)
        return out.float()

    return step


@_loop("another mask of rows")
def _rows(world: World) -> Step:
    trainer = world.gcn()
    return lambda k: trainer.fit(world.y, world.x, world.edge_index, rows=torch.rand(world.nodes) < 0.1)


# Measuring -------------------------------------------------------------------------------------------------


def cases(loops: Sequence[str] | None, graph: str, counts: Sequence[int]) -> list[LoopCase]:
    """The grid: every loop with every number of threads."""
    chosen = [known("--loops", name, tuple(LOOPS)) for name in loops or LOOPS]
    if any(count < 1 for count in counts):
        raise InputError(f"--threads: {list(counts)}; give numbers of threads, 1 or more each")
    return [LoopCase(name, graph, count) for count, name in itertools.product(counts, chosen)]


def _take(cases: list[LoopCase], options: Options) -> Iterator[Record]:
    for name, group in itertools.groupby(cases, key=lambda case: case.graph):
        graph = find_graph(name, options.data_dir).graph
        edge_index = torch.from_numpy(edge_list(graph))
        facts = {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges, "width": options.width}
        for case in group:
            result = measure(case, edge_index, graph.num_nodes, options)
            yield Record(KIND, asdict(case) | facts, result, options.environment)
            gc.collect()


_SUITE = Suite(KIND, case_reader(LoopCase), _take)
run, left = _SUITE.run, _SUITE.left


def measure(case: LoopCase, edge_index: Tensor, nodes: int, options: Options) -> dict[str, object]:
    """What PyG and plait took for a step of the loop, after their first steps agreed."""
    with threads(case.threads):
        expected = _first_steps(case.loop, edge_index, nodes, options, PEERS[0])
        lines: dict[str, dict[str, object]] = {PEERS[0]: {"status": "timed", "error": 0.0}}
        lines[PEERS[1]] = _checked(case.loop, edge_index, nodes, options, expected)
        timed = [name for name, line in lines.items() if line["status"] == "timed"]
        calls = {name: _call(_steps(case.loop, edge_index, nodes, options, name)) for name in timed}
        with BusyElsewhere() as busy:
            timings = time_calls(
                calls,
                warmup=WARM_UP,
                repeats=options.repeats,
                budget_seconds=options.budget_seconds,
                is_settled=True,
                # with one thread the processor's seconds count, which other programs do not disturb
                clock=processor_clock if case.threads == 1 else wall_clock,
            )
    for name, timing in timings.items():
        lines[name] |= timing.to_dict()
    result: dict[str, object] = {"peers": lines, "reference": PEERS[0], "busy_elsewhere": busy.share}
    if len(timings) == len(PEERS):
        result["ratio"], result["ratio_low"], result["ratio_high"] = speedup(
            *(timings[name] for name in PEERS)
        )
    return result


def _steps(loop: str, edge_index: Tensor, nodes: int, options: Options, peer: str) -> Step:
    """The loop as the peer runs it, from the same weights and the same random numbers as the other's."""
    torch.manual_seed(0)
    compile: Callable[..., Any] = plait.compile if peer == "plait" else lambda model, data: model
    return LOOPS[loop](World(edge_index, nodes, options, compile))


def _first_steps(loop: str, edge_index: Tensor, nodes: int, options: Options, peer: str) -> list[Tensor]:
    step = _steps(loop, edge_index, nodes, options, peer)
    results = []
    for k in range(CHECKED_STEPS):
        torch.manual_seed(k)
        results.append(step(k).clone())
    return results


def _checked(
    loop: str, edge_index: Tensor, nodes: int, options: Options, expected: list[Tensor]
) -> dict[str, object]:
    """plait's line: wrong where a result of its first steps differs from PyG's, missing where it broke."""
    try:
        found = _first_steps(loop, edge_index, nodes, options, "plait")
    except Exception as error:  # a loop that breaks is its own line, not the run's end
        return {"status": "missing", "reason": in_short(error)}
    errors = [
        float((have - want).abs().max() / want.abs().max().clamp(min=1e-6))
        for have, want in zip(found, expected, strict=True)
    ]
    line: dict[str, object] = {"status": "timed", "error": max(errors)}
    if not all(error <= TOLERANCE for error in errors):  # NaN is wrong too
        first = next(k for k, error in enumerate(errors) if not error <= TOLERANCE)
        line |= {"status": "wrong", "reason": f"step {first} differs by {errors[first]:.1e} from PyG"}
    return line


def _call(step: Step) -> Callable[[], Tensor]:
    numbers = itertools.count()
    return lambda: step(next(numbers))
