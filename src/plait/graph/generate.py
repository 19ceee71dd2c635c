"""Synthetic graphs for tests, benchmarks and the demo; randomness comes in as `rng`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import GraphError, InputError, did_you_mean
from plait.graph.csr import Graph
from plait.graph.io import LoadedGraph

__all__ = ["cliques", "erdos", "grid", "parse", "regular", "rmat", "sbm", "star"]

Ints = NDArray[Any]
Rng = np.random.Generator | int


def rmat(
    scale: int,
    edges: int,
    rng: Rng = 0,
    a: float = 0.57,
    b: float = 0.19,
    c: float = 0.19,
    symmetric: bool = False,
    shuffle: bool = True,
) -> Graph:
    """A recursive-matrix graph of 2**scale nodes with power-law degrees (Chakrabarti et al. 2004).

    Each edge descends `scale` times into a quadrant with chances a, b, c, 1 - a - b - c. Repeats and self
    loops stay. symmetric adds every edge's reverse (so 2 x edges); shuffle renumbers the nodes, as Graph500
    does: without it the hubs are the small numbers and the graph is easier to cache than real ones.
    """
    _require(0 <= scale <= 40, f"scale={scale}: choose 0 .. 40, the graph has 2**scale nodes")
    _require(
        min(a, b, c, 1 - a - b - c) >= 0,
        f"a={a}, b={b}, c={c}: probabilities must not be negative and must sum to at most 1",
    )
    generator = np.random.default_rng(rng)
    src, dst = np.zeros(int(edges), np.int64), np.zeros(int(edges), np.int64)
    for _ in range(scale):
        draw = generator.random(src.size, dtype=np.float32)
        src = 2 * src + (draw >= a + b)
        dst = 2 * dst + (((draw >= a) & (draw < a + b)) | (draw >= a + b + c))
    if shuffle:
        names = generator.permutation(2**scale)
        src, dst = names[src], names[dst]
    return _both_ways(src, dst, 2**scale) if symmetric else Graph.from_edge_index(src, dst, 2**scale)


def erdos(n: int, edges: int, rng: Rng = 0) -> Graph:
    """`edges` edges between uniformly drawn ends; repeats and self loops stay."""
    _require(n >= 1 or not edges, f"n={n}: edges need at least one node")
    generator = np.random.default_rng(rng)
    ends = generator.integers(0, max(n, 1), (2, int(edges)))
    return Graph.from_edge_index(ends[0], ends[1], n)


def grid(rows: int, cols: int) -> Graph:
    """A rows x cols mesh, each node joined to its (up to four) neighbours, numbered row by row."""
    _require(rows >= 1 and cols >= 1, f"rows={rows}, cols={cols}: a grid needs at least one of each")
    node = np.arange(rows * cols).reshape(rows, cols)
    right = np.stack([node[:, :-1].ravel(), node[:, 1:].ravel()])
    down = np.stack([node[:-1].ravel(), node[1:].ravel()])
    src, dst = np.concatenate([right, down], axis=1)
    return _both_ways(src, dst, rows * cols)


def cliques(count: int, size: int) -> Graph:
    """`count` disjoint complete graphs of `size` nodes, without self loops."""
    _require(count >= 1 and size >= 1, f"count={count}, size={size}: cliques need at least one node")
    first, second = np.nonzero(~np.eye(size, dtype=bool))
    base = size * np.arange(count)[:, None]
    return Graph.from_edge_index((base + second).ravel(), (base + first).ravel(), count * size)


def regular(n: int, degree: int, rng: Rng = 0) -> Graph:
    """Every node sends and receives exactly `degree` edges; no repeats, no self loops.

    A circulant graph on a random ring: node ring[i] has edges from ring[i - s] for `degree` random strides s.
    """
    _require(0 <= degree < n, f"degree={degree}: choose 0 .. n - 1 = {n - 1}")
    generator = np.random.default_rng(rng)
    ring = generator.permutation(n)
    strides = 1 + generator.choice(n - 1, degree, replace=False) if degree else np.zeros(0, np.int64)
    src = ring[(np.arange(n)[:, None] - strides) % n]
    return Graph.from_edge_index(src.ravel(), np.repeat(ring, degree), n)


def star(n: int) -> Graph:
    """Node 0 joined to all n - 1 others, in both directions."""
    _require(n >= 1, f"n={n}: a star needs its centre")
    leaves = np.arange(1, n)
    return _both_ways(leaves, np.zeros_like(leaves), n)


def sbm(
    num_nodes: int = 2000,
    classes: int = 4,
    degree_in: float = 8.0,
    degree_out: float = 4.0,
    features: int = 32,
    rng: Rng = 0,
    *,
    sizes: Sequence[int] | None = None,
    p_in: float | None = None,
    p_out: float | None = None,
    signal: float = 0.25,
    train: float = 0.3,
    val: float = 0.2,
) -> LoadedGraph:
    """A stochastic block model with planted labels y, features x and train/val/test masks.

    Nodes of one class are joined with chance p_in, others with p_out; when these are not given they follow
    from the mean number of neighbours inside (degree_in) and outside (degree_out) the class. `sizes` replaces
    num_nodes and classes. x[v] = signal * centre[y[v]] + noise, both standard normal: one node's features
    say little, its neighbourhood's mean says more. Undirected and simple; node numbers are shuffled. Takes
    time in proportion to nodes + edges.
    """
    generator = np.random.default_rng(rng)
    size = _class_sizes(num_nodes, classes, sizes)
    n = int(size.sum())
    src, dst = _block_edges(size, p_in, p_out, degree_in, degree_out, generator)
    names = generator.permutation(n)
    y = np.empty(n, np.int64)
    y[names] = np.repeat(np.arange(size.size), size)
    centre = generator.standard_normal((size.size, features), dtype=np.float32)
    x = np.float32(signal) * centre[y] + generator.standard_normal((n, features), dtype=np.float32)
    draw = generator.permutation(n) / max(n, 1)
    masks = {
        "train": draw < train,
        "val": (draw >= train) & (draw < train + val),
        "test": draw >= train + val,
    }
    graph = _both_ways(names[src], names[dst], n)
    meta = {
        "name": "sbm",
        "sizes": size.tolist(),
        "note": "stochastic block model, planted labels and features",
    }
    return LoadedGraph(graph, x, y, masks, meta=meta)


KINDS: dict[str, Callable[..., Graph | LoadedGraph]] = {
    "cliques": cliques,
    "erdos": erdos,
    "grid": grid,
    "regular": regular,
    "rmat": rmat,
    "sbm": sbm,
    "star": star,
}


def parse(text: str) -> LoadedGraph:
    """The graph that "kind:name=value,..." describes, such as "rmat:scale=14,edges=2e5,seed=1".

    Values are numbers (2e5 and 200_000 are whole), true or false; `seed` is the rng.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        names = ", ".join(sorted(KINDS))
        raise InputError(
            f"{text!r}: unknown kind of graph {kind!r}; {did_you_mean(kind, KINDS)}known are {names}"
        )
    known = inspect.signature(KINDS[kind]).parameters
    given: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        name = "rng" if name == "seed" else name
        if not equals or name not in known:
            names = ", ".join("seed" if known_name == "rng" else known_name for known_name in known)
            raise InputError(
                f"{text!r}: {item!r} is not one of {kind}'s settings; write name=value with {names}"
            )
        given[name] = _value(text, value)
    missing = [name for name, what in known.items() if what.default is what.empty and name not in given]
    if missing:
        raise InputError(f"{text!r}: {kind} needs {', '.join(missing)}; add {missing[0]}=...")
    try:
        made = KINDS[kind](**given)
    except GraphError as error:
        raise InputError(f"{text!r}: {error}") from error
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise InputError(
            f"{text!r}: {kind} cannot be generated from these settings ({error}); choose other numbers"
        ) from error
    return made if isinstance(made, LoadedGraph) else LoadedGraph(made, meta={"name": text})


def _value(text: str, value: str) -> int | float | bool | list[int]:
    if value in ("true", "false"):
        return value == "true"
    try:
        if "+" in value[1:] and "e" not in value:  # sizes=100+200+50
            return [int(part) for part in value.split("+")]
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{text!r}: {value!r} is not a number; write e.g. 2e5, 0.57 or true")
    return int(number) if number.is_integer() and "." not in value else number


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise GraphError(message)


def _both_ways(src: Ints, dst: Ints, num_nodes: int) -> Graph:
    """The graph of the edges and their reverses."""
    return Graph.from_edge_index(np.concatenate([src, dst]), np.concatenate([dst, src]), num_nodes)


def _class_sizes(num_nodes: int, classes: int, sizes: Sequence[int] | None) -> Ints:
    """Nodes per class: as given, or as equal as they can be."""
    if sizes is not None:
        _require(
            len(sizes) > 0 and min(sizes) >= 0, f"sizes={list(sizes)}: one count per class, none negative"
        )
        return np.asarray(sizes, np.int64)
    _require(1 <= classes <= num_nodes, f"classes={classes}: choose 1 .. num_nodes = {num_nodes}")
    return np.diff(num_nodes * np.arange(classes + 1, dtype=np.int64) // classes)


def _block_edges(
    size: Ints,
    p_in: float | None,
    p_out: float | None,
    degree_in: float,
    degree_out: float,
    generator: np.random.Generator,
) -> tuple[Ints, Ints]:
    """Both ends of the edges of a block model whose classes are runs of nodes, each pair at most once."""
    ends = np.cumsum(size)
    n = int(ends[-1])
    across = (n * n - int((size**2).sum())) // 2
    outside = min(1.0, degree_out * n / 2 / across) if p_out is None and across else (p_out or 0.0)
    sources, targets = [], []
    for count, end in zip(size.tolist(), ends.tolist(), strict=True):
        inside = min(1.0, degree_in / (count - 1)) if p_in is None and count > 1 else (p_in or 0.0)
        first, second = _triangle(_bernoulli(count * (count - 1) // 2, inside, generator))
        sources.append(end - count + first)
        targets.append(end - count + second)
        later = n - end
        pair = _bernoulli(count * later, outside, generator)
        sources.append(end + pair % max(later, 1))
        targets.append(end - count + pair // max(later, 1))
    return np.concatenate(sources), np.concatenate(targets)


def _bernoulli(count: int, chance: float, generator: np.random.Generator) -> Ints:
    """The numbers in 0 .. count - 1 that each come up with `chance`, ascending, in time of their number.

    The gaps between them are geometric, so those are drawn instead of `count` coins.
    """
    _require(0.0 <= chance <= 1.0, f"p_in and p_out are chances between 0 and 1, not {chance}")
    drawn = [np.zeros(0, np.int64)]
    position = -1
    while chance > 0.0 and position < count:
        left = (count - 1 - position) * chance
        gaps = generator.geometric(chance, int(left + 4 * np.sqrt(left)) + 8)
        # a gap beyond `count` ends the draw; cut it so that the sum cannot overflow
        drawn.append(position + np.cumsum(np.minimum(gaps, count + 1)))
        position = int(drawn[-1][-1])
    numbers = np.concatenate(drawn)
    return numbers[numbers < count]


def _triangle(pair: Ints) -> tuple[Ints, Ints]:
    """(i, j) with i > j >= 0 of the pair number i (i - 1) / 2 + j."""
    i = ((1 + np.sqrt(1 + 8 * pair.astype(np.float64))) / 2).astype(np.int64)
    # the root may be off by one in its last digit
    i -= i * (i - 1) // 2 > pair
    i += i * (i + 1) // 2 <= pair
    return i, pair - i * (i - 1) // 2
