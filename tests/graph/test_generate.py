"""generate.py: each kind has the shape it promises, the same seed the same graph, the demo can be learnt."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import GraphError, InputError
from plait.graph import Graph, LoadedGraph, generate

from .reference import dense


@pytest.mark.parametrize(
    "text", ["rmat:scale=6,edges=200", "erdos:n=40,edges=90", "regular:n=30,degree=4", "sbm:num_nodes=80"]
)
def test_a_seed_decides_the_graph(text):
    first, again, other = (generate.parse(f"{text},seed={seed}").graph.fingerprint for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_generator_goes_on_where_it_was():
    rng = np.random.default_rng(0)
    assert generate.erdos(40, 90, rng).fingerprint != generate.erdos(40, 90, rng).fingerprint


def test_rmat_has_the_asked_edges_and_hubs():
    graph = generate.rmat(10, 20_000, 0)
    assert (graph.num_nodes, graph.num_edges) == (1024, 20_000)
    assert graph.stats.skew > 1.0
    assert generate.rmat(10, 5_000, 0, symmetric=True).is_symmetric
    even = generate.rmat(10, 20_000, 0, a=0.25, b=0.25, c=0.25)
    assert even.stats.skew < 0.3


def test_rmat_quadrants_come_up_with_their_chances():
    graph = generate.rmat(1, 40_000, 0, a=0.5, b=0.3, c=0.15, shuffle=False)
    shares = dense(graph).T / graph.num_edges  # [source, target]
    np.testing.assert_allclose(shares, [[0.5, 0.3], [0.15, 0.05]], atol=0.01)


def test_a_grid_joins_neighbours_only():
    graph = generate.grid(3, 4)
    node = [(r, c) for r in range(3) for c in range(4)]
    expected = [[int(abs(r - s) + abs(c - d) == 1) for s, d in node] for r, c in node]
    np.testing.assert_array_equal(dense(graph), expected)
    assert generate.grid(1, 1).num_edges == 0


def test_cliques_are_complete_and_apart():
    graph = generate.cliques(3, 4)
    np.testing.assert_array_equal(dense(graph), np.kron(np.eye(3, dtype=int), 1 - np.eye(4, dtype=int)))


@pytest.mark.parametrize("degree", [0, 1, 5, 19])
def test_regular_graphs_are_simple_and_regular_both_ways(degree):
    counts = dense(generate.regular(20, degree, 3))
    assert (counts.sum(0) == degree).all()
    assert (counts.sum(1) == degree).all()
    assert counts.max(initial=0) <= 1
    assert counts.diagonal().sum() == 0


def test_a_star_is_one_hub():
    graph = generate.star(6)
    assert graph.degrees.tolist() == [5, 1, 1, 1, 1, 1]
    assert graph.is_symmetric


def test_block_models_have_the_asked_degrees_inside_and_outside():
    made = generate.sbm(8000, 5, degree_in=10, degree_out=3, rng=1)
    graph = made.graph
    inside = made.y[graph.indices] == made.y[graph.edge_rows()]
    assert inside.sum() / 8000 == pytest.approx(10, rel=0.05)
    assert (~inside).sum() / 8000 == pytest.approx(3, rel=0.05)
    assert graph.is_symmetric
    assert graph.num_self_loops == 0


def test_block_models_take_sizes_and_chances():
    made = generate.sbm(sizes=[3, 5, 0, 2], p_in=1.0, p_out=0.0, features=4)
    same = made.y[:, None] == made.y[None]
    np.testing.assert_array_equal(dense(made.graph), same & ~np.eye(10, dtype=bool))
    assert np.bincount(made.y).tolist() == [3, 5, 0, 2]
    full = generate.sbm(sizes=[3, 4], p_in=1.0, p_out=1.0)
    assert full.graph.num_edges == 7 * 6


@pytest.mark.parametrize("chance", [0.003, 0.2, 0.9])
def test_drawn_numbers_are_distinct_and_as_many_as_their_chance(chance):
    numbers = generate._bernoulli(200_000, chance, np.random.default_rng(2))
    assert (np.diff(numbers) > 0).all()
    assert 0 <= numbers[0] <= numbers[-1] < 200_000
    assert numbers.size == pytest.approx(200_000 * chance, rel=0.15)
    assert numbers.mean() == pytest.approx(100_000, rel=0.05)


def test_pair_numbers_name_every_pair_once():
    first, second = generate._triangle(np.arange(45))
    assert list(zip(first, second, strict=True)) == [(i, j) for i in range(10) for j in range(i)]
    large = np.array([10**12 * (10**12 - 1) // 2 - 1, 10**12 * (10**12 - 1) // 2])
    first, second = generate._triangle(large // 10**6)
    np.testing.assert_array_equal(first * (first - 1) // 2 + second, large // 10**6)
    assert ((second >= 0) & (second < first)).all()


def accuracy(features, made):
    train, test = made.masks["train"], made.masks["test"]
    labels = range(made.y.max() + 1)
    centre = np.stack([features[train & (made.y == label)].mean(0) for label in labels])
    nearest = ((features[:, None] - centre) ** 2).sum(-1).argmin(1)
    return (nearest == made.y)[test].mean()


def test_the_demo_graph_is_learnt_better_with_its_edges_than_without():
    made = generate.sbm(rng=0)
    graph = made.graph
    heard = made.x.copy()
    np.add.at(heard, graph.edge_rows(), made.x[graph.indices])
    mean = heard / (graph.degrees + 1)[:, None]
    assert made.x.dtype == np.float32
    assert accuracy(made.x, made) > 1.5 / 4
    assert accuracy(mean, made) > accuracy(made.x, made) + 0.1
    assert accuracy(mean, made) > 0.85


def test_masks_split_the_nodes():
    masks = generate.sbm(1000, train=0.6, val=0.1).masks
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"train": 600, "val": 100, "test": 300}
    assert (sum(mask.astype(int) for mask in masks.values()) == 1).all()


def test_a_description_makes_the_same_graph_as_the_call():
    made = generate.parse("rmat:scale=8,edges=1e3,a=0.5,symmetric=true,seed=3")
    assert isinstance(made, LoadedGraph)
    assert made.graph.fingerprint == generate.rmat(8, 1000, 3, a=0.5, symmetric=True).fingerprint
    assert generate.parse("grid:rows=4,cols=5").graph.fingerprint == generate.grid(4, 5).fingerprint
    assert np.bincount(generate.parse("sbm:sizes=10+20").y).tolist() == [10, 20]
    assert generate.parse("sbm").y is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "rmt:scale=3",
            r"unknown kind of graph 'rmt'; did you mean 'rmat'\? known are cliques, erdos, grid, regular",
        ),
        ("rmat:scale=3", "rmat needs edges"),
        ("rmat:scale=3,edges", "'edges' is not one of rmat's settings"),
        (
            "grid:rows=3,columns=2",
            "'columns=2' is not one of grid's settings; write name=value with rows, cols",
        ),
        ("star:n=many", "'many' is not a number"),
        ("", "unknown kind of graph ''"),
        ("rmat:scale=3,edges=1e99", "rmat cannot be generated from these settings"),
        ("rmat:scale=3.5,edges=9", "rmat cannot be generated from these settings"),
        ("rmat:scale=3,edges=-5", "rmat cannot be generated from these settings"),
        ("star:n=nan", "'nan' is not a number"),
        ("erdos:n=5,edges=inf", "'inf' is not a number"),
        ("sbm:sizes=10+x", r"'10\+x' is not a number"),
        ("grid:rows=true,cols=1+2", "grid cannot be generated from these settings"),
    ],
)
def test_a_description_that_says_nothing_is_refused(text, says):
    with pytest.raises(InputError, match=says):
        generate.parse(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: generate.rmat(-1, 5),
        lambda: generate.rmat(3, 5, a=0.9, b=0.9),
        lambda: generate.grid(0, 5),
        lambda: generate.cliques(1, 0),
        lambda: generate.regular(5, 5),
        lambda: generate.star(0),
        lambda: generate.erdos(0, 3),
        lambda: generate.sbm(3, 5),
        lambda: generate.sbm(sizes=[3, -1]),
        lambda: generate.sbm(10, 2, p_in=1.5),
    ],
)
def test_sizes_that_make_no_graph_are_refused(make):
    with pytest.raises(GraphError):
        make()


def test_every_kind_is_reachable_by_name():
    assert set(generate.KINDS) == set(generate.__all__) - {"parse"}
    assert isinstance(generate.star(2), Graph)
