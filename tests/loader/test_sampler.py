"""Samples: PyG's contract, the law of every mode, and equality across threads and replays."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph import Graph
from plait.loader import Sample, Sampler, relation, space

SEEDS = np.array([3, 0, 7, 11])


def random_graph(
    rng: np.random.Generator, num_nodes: int = 40, num_edges: int = 300
) -> tuple[Graph, Any, Any]:
    """Repeated edges, self loops, isolated nodes and a hub, in an order that is not CSR's."""
    src, dst = rng.integers(0, num_nodes - 3, num_edges), rng.integers(0, num_nodes - 3, num_edges)
    dst[: num_edges // 5] = 3
    return Graph.from_edge_index(src, dst, num_nodes=num_nodes), src, dst


def star(degree: int) -> Graph:
    """Node 0 has in-neighbours 1..degree, listed backwards."""
    return Graph.from_edge_index(np.arange(degree, 0, -1), np.zeros(degree, np.int64), num_nodes=degree + 1)


def is_same(a: Sample, b: Sample) -> bool:
    pairs = [(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__]
    return all((x is None and y is None) or np.array_equal(x, y) for x, y in pairs)


def chi_square_passes(observed: list[float], expected: list[float]) -> bool:
    """True unless the sample is further off than one in a million; scipy is the reference for the tail."""
    stats = pytest.importorskip("scipy.stats")
    seen, wanted = np.asarray(observed, float), np.asarray(expected, float)
    return bool(stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-6)


MODES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "replace": {"replace": True},
    "weighted": {"weight": True},
    "weighted_replace": {"weight": True, "replace": True},
    "labor": {"method": "labor"},
    "labor_dependent": {"method": "labor", "batch_dependency": 4, "layer_dependency": True},
    "labor_weighted": {"method": "labor", "weight": True},
    "disjoint": {"disjoint": True},
    "node_time": {"node_time": True},
    "edge_time": {"edge_time": True, "temporal_strategy": "last"},
    "time_weighted": {"node_time": True, "weight": True},
    "time_last_replace": {"node_time": True, "weight": True, "replace": True, "temporal_strategy": "last"},
}


def build(
    graph: Graph, fanout: list[int], mode: str, seed: int = 0
) -> tuple[Sampler, dict[str, Any], dict[str, Any]]:
    """The sampler of that mode with random attributes, what `sample` needs besides, and the attributes."""
    rng = np.random.default_rng(5)
    given = dict(MODES[mode])
    made = {
        "weight": rng.integers(0, 4, graph.num_edges).astype(float),
        "node_time": rng.integers(0, 10, graph.num_nodes),
        "edge_time": rng.integers(0, 10, graph.num_edges),
    }
    given.update({k: made[k] for k in made if given.get(k) is True})
    extra = {"seed_time": np.array([5, 9, 2, 7])} if mode == "edge_time" else {}
    return Sampler(graph, fanout, seed=seed, **given), extra, made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fanout", [[3], [4, 2], [2, -1, 3], [0, 2], [100, 100]])
def test_samples_keep_the_contract_of_pyg(mode: str, fanout: list[int]) -> None:
    graph, src, dst = random_graph(np.random.default_rng(1))
    sampler_, extra, made = build(graph, fanout, mode)
    s = sampler_.sample(SEEDS, epoch=2, batch=3, **extra)
    assert np.array_equal(s.n_id[:4], SEEDS)
    assert s.num_sampled_nodes is not None
    assert s.num_sampled_edges is not None
    assert s.indptr is not None
    assert sum(s.num_sampled_nodes) == s.num_nodes
    assert sum(s.num_sampled_edges) == s.num_edges
    assert len(s.num_sampled_nodes) == len(fanout) + 1 == len(s.num_sampled_edges) + 1
    assert np.array_equal(src[s.e_id], s.n_id[s.row])
    assert np.array_equal(dst[s.e_id], s.n_id[s.col])
    assert np.array_equal(s.col, np.repeat(np.arange(s.indptr.size - 1), np.diff(s.indptr)))
    ends = np.cumsum(s.num_sampled_nodes)
    edge_ends = np.concatenate(([0], np.cumsum(s.num_sampled_edges)))
    for hop, fan in enumerate(fanout):
        e = slice(edge_ends[hop], edge_ends[hop + 1])
        first = ends[hop - 1] if hop else 0
        assert np.all((s.col[e] >= first) & (s.col[e] < ends[hop]))
        fresh = s.row[e][s.row[e] >= ends[hop]]
        assert np.array_equal(np.unique(fresh), np.arange(ends[hop], ends[hop + 1]))
        _, at = np.unique(fresh, return_index=True)
        assert np.all(np.diff(at) > 0), "places follow the order of discovery"
        if fan >= 0:
            assert max(Counter(s.col[e].tolist()).values(), default=0) <= fan
        if "replace" not in mode:
            assert np.unique(np.stack((s.col[e], s.e_id[e]), 1), axis=0).shape[0] == s.e_id[e].size
    names = s.n_id if s.batch is None else s.n_id + graph.num_nodes * s.batch
    assert np.unique(names).size == names.size
    if "weight" in MODES[mode]:
        assert np.all(made["weight"][s.e_id] > 0)
    if s.batch is not None:
        assert np.array_equal(s.batch[:4], np.arange(4))
        assert np.array_equal(s.batch[s.row], s.batch[s.col])
    if "node_time" in MODES[mode]:
        assert np.all(made["node_time"][src[s.e_id]] <= made["node_time"][SEEDS][s.batch[s.row]])
    if "edge_time" in MODES[mode]:
        assert np.all(made["edge_time"][s.e_id] <= extra["seed_time"][s.batch[s.row]])


@pytest.mark.parametrize("mode", MODES)
def test_every_neighbour_comes_when_the_fanout_allows(mode: str) -> None:
    graph, src, dst = random_graph(np.random.default_rng(2))
    sampler_, extra, made = build(graph, [-1], mode)
    s = sampler_.sample(SEEDS, **extra)
    allowed = np.ones(graph.num_edges, bool)
    if "weight" in MODES[mode]:
        allowed &= made["weight"] > 0
    wanted = []
    for place, v in enumerate(SEEDS):
        mine = (dst == v) & allowed
        if "node_time" in MODES[mode]:
            mine &= made["node_time"][src] <= made["node_time"][v]
        if "edge_time" in MODES[mode]:
            mine &= made["edge_time"] <= extra["seed_time"][place]
        wanted += [(place, e) for e in np.flatnonzero(mine)]
    assert sorted(zip(s.col.tolist(), s.e_id.tolist(), strict=True)) == sorted(wanted)


@pytest.mark.parametrize("mode", MODES)
def test_threads_and_replays_change_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation, "_THREAD_EDGES", 0)
    graph, _, _ = random_graph(np.random.default_rng(3), 200, 3000)
    sampler_, extra, _ = build(graph, [5, 70, 2], mode)
    wanted = [sampler_.sample(SEEDS, 1, b, **extra) for b in range(4)]
    again = build(graph, [5, 70, 2], mode)[0]
    for b in (2, 0, 3, 1):
        for threads in (3, 2, 1):
            assert is_same(wanted[b], again.sample(SEEDS, 1, b, threads=threads, **extra))
    if not extra:
        many = again.sample_many([SEEDS] * 4, epoch=1, threads=3)
        assert all(is_same(a, b) for a, b in zip(wanted, many, strict=True))


@pytest.mark.parametrize("mode", ["uniform", "replace", "weighted", "labor", "disjoint"])
def test_seed_epoch_and_batch_each_change_the_sample(mode: str) -> None:
    graph, _, _ = random_graph(np.random.default_rng(3), 200, 3000)
    first = build(graph, [5, 5], mode)[0]
    base = first.sample(SEEDS)
    assert not is_same(base, first.sample(SEEDS, epoch=1))
    assert not is_same(base, first.sample(SEEDS, batch=1))
    assert not is_same(base, build(graph, [5, 5], mode, seed=1)[0].sample(SEEDS))


def test_what_a_node_draws_does_not_depend_on_its_companions() -> None:
    graph, _, _ = random_graph(np.random.default_rng(4))
    one = Sampler(graph, [3])
    alone, together = one.sample([3]), one.sample([9, 3, 5])
    assert np.array_equal(alone.e_id, together.e_id[together.col == 1])


def test_hashing_and_stamping_give_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _, _ = random_graph(np.random.default_rng(6), 300, 4000)
    stamped = Sampler(graph, [4, 3, 2]).sample(SEEDS)
    monkeypatch.setattr(space, "STAMP_LIMIT", 0)
    assert is_same(stamped, Sampler(graph, [4, 3, 2]).sample(SEEDS))


def test_stamps_start_over_before_they_run_out() -> None:
    graph, _, _ = random_graph(np.random.default_rng(6))
    one = Sampler(graph, [4, 3])
    wanted = one.sample(SEEDS)
    one._spare[0].nodes[0].base = np.uint32((1 << 31) - 5)
    assert is_same(wanted, one.sample(SEEDS))
    assert int(one._spare[0].nodes[0].base) == 1
    assert is_same(wanted, one.sample(SEEDS))


def subsets_of(
    graph: Graph, fanout: int, draws: int, seed: int = 0, **options: Any
) -> Counter[tuple[int, ...]]:
    """How often each set of in-neighbours of node 0 came up over many batches."""
    one = Sampler(graph, [fanout], seed=seed, **options)
    return Counter(tuple(sorted(one.sample([0], batch=b).n_id[1:].tolist())) for b in range(draws))


@pytest.mark.parametrize("options", [{}, {"method": "labor"}, {"disjoint": True}])
def test_every_subset_is_equally_likely(options: dict[str, Any]) -> None:
    seen = subsets_of(star(6), 3, 6000, **options)
    every = list(combinations(range(1, 7), 3))
    assert set(seen) <= set(every)
    assert chi_square_passes([seen[s] for s in every], [1.0] * len(every))


@pytest.mark.parametrize(("degree", "fanout"), [(5000, 10), (9000, 80), (200, 70)])
def test_inclusion_is_uniform_over_the_neighbours_of_a_hub(degree: int, fanout: int) -> None:
    one = Sampler(star(degree), [fanout])
    counts = np.zeros(degree)
    for b in range(400):
        e_id = one.sample([0], batch=b).e_id
        assert np.unique(e_id).size == fanout
        counts[e_id] += 1
    parts = counts.reshape(20, -1).sum(1)
    assert chi_square_passes(parts.tolist(), [1.0] * 20)


def test_draws_with_replacement_are_uniform_and_independent() -> None:
    one = Sampler(star(4), [2], replace=True)
    seen = Counter(tuple(one.sample([0], batch=b).e_id.tolist()) for b in range(6000))
    assert chi_square_passes([seen[(a, b)] for a in range(4) for b in range(4)], [1.0] * 16)


def successive(weight: list[float], subset: tuple[int, ...]) -> float:
    """P(subset) when edges are drawn one by one in proportion to the weights that are left."""
    if not subset:
        return 1.0
    total, out = sum(weight), 0.0
    for first in subset:
        left = [0.0 if e == first else w for e, w in enumerate(weight)]
        out += weight[first] / total * successive(left, tuple(e for e in subset if e != first))
    return out


@pytest.mark.parametrize("weight", [[1.0, 2.0, 3.0, 4.0, 5.0], [1e4, 1e4, 1.0, 2.0, 3.0]])
@pytest.mark.parametrize("options", [{}, {"method": "labor"}])
def test_weighted_subsets_follow_successive_draws(weight: list[float], options: dict[str, Any]) -> None:
    one = Sampler(star(5), [3], weight=weight, **options)
    seen = Counter(tuple(sorted(one.sample([0], batch=b).e_id.tolist())) for b in range(5000))
    every = [s for s in combinations(range(5), 3) if 5000 * successive(weight, s) > 5]
    assert chi_square_passes([seen[s] for s in every], [successive(weight, s) for s in every])


def test_weighted_draws_with_replacement_follow_the_weights() -> None:
    one = Sampler(star(4), [3], weight=[1.0, 0.0, 3.0, 6.0], replace=True)
    seen = Counter(int(e) for b in range(3000) for e in one.sample([0], batch=b).e_id)
    assert seen[1] == 0
    assert chi_square_passes([seen[0], seen[2], seen[3]], [1.0, 3.0, 6.0])


def test_temporal_draws_are_uniform_over_what_is_early_enough() -> None:
    one = Sampler(star(8), [2], node_time=np.arange(9))
    draws = [one.sample([0], batch=b, seed_time=[5]).n_id[1:].tolist() for b in range(4000)]
    seen = Counter(tuple(sorted(pair)) for pair in draws)
    every = list(combinations(range(1, 6), 2))
    assert set(seen) <= set(every)
    assert chi_square_passes([seen[s] for s in every], [1.0] * len(every))


def test_the_last_strategy_takes_the_latest_that_are_early_enough() -> None:
    graph = star(8)
    one = Sampler(graph, [3], edge_time=np.array([4, 9, 1, 6, 2, 7, 3, 5]), temporal_strategy="last")
    assert sorted(one.sample([0], seed_time=[6]).e_id.tolist()) == [0, 3, 7]


def test_labor_targets_agree_on_their_sources() -> None:
    both = Graph.from_edge_index(np.tile(np.arange(2, 42), 2), np.repeat([0, 1], 40), num_nodes=42)
    labor, plain = Sampler(both, [5], method="labor"), Sampler(both, [5])
    for b in range(20):
        assert labor.sample([0, 1], batch=b).num_nodes == 7
    assert plain.sample([0, 1]).num_nodes > 7


def test_dependent_labor_batches_overlap_as_long_as_their_variates_live() -> None:
    one = Sampler(star(4000), [400], method="labor", batch_dependency=10)
    drawn = [set(one.sample([0], batch=b).e_id.tolist()) for b in range(30)]
    near = np.mean([len(drawn[b] & drawn[b + 1]) / 400 for b in range(29)])
    far = np.mean([len(drawn[b] & drawn[b + 12]) / 400 for b in range(18)])
    assert 0.87 < near < 0.95
    assert 0.05 < far < 0.15


def test_repeated_seeds_keep_their_places_and_get_the_same_edges() -> None:
    graph, _, _ = random_graph(np.random.default_rng(8))
    s = Sampler(graph, [3, 2]).sample([3, 5, 3])
    assert s.n_id[:3].tolist() == [3, 5, 3]
    assert np.array_equal(s.e_id[s.col == 0], s.e_id[s.col == 2])
    assert 2 not in s.row


def test_bidirectional_samples_are_the_coalesced_union_of_both_directions() -> None:
    graph, _, _ = random_graph(np.random.default_rng(9))
    one, both = (Sampler(graph, [3, 2], direction=d).sample(SEEDS) for d in ("directional", "bidirectional"))
    forth = set(zip(one.row.tolist(), one.col.tolist(), strict=True))
    wanted = forth | {(c, r) for r, c in forth}
    got = list(zip(both.row.tolist(), both.col.tolist(), strict=True))
    assert sorted(got) == sorted(wanted)
    assert got == sorted(got, key=lambda e: (e[1], e[0]))
    assert set(both.e_id.tolist()) <= set(one.e_id.tolist())
    assert both.num_sampled_nodes is None


def test_induced_samples_hold_every_edge_among_their_nodes() -> None:
    graph, src, dst = random_graph(np.random.default_rng(10))
    s = Sampler(graph, [2, 2], direction="induced").sample(SEEDS)
    inside = np.isin(src, s.n_id) & np.isin(dst, s.n_id)
    assert np.array_equal(np.sort(s.e_id), np.flatnonzero(inside))
    assert np.array_equal(src[s.e_id], s.n_id[s.row])
    assert np.array_equal(dst[s.e_id], s.n_id[s.col])


def test_a_graph_without_edges_gives_its_seeds() -> None:
    graph = Graph.from_edge_index(np.empty(0, np.int64), np.empty(0, np.int64), num_nodes=5)
    for options in ({}, {"replace": True}, {"weight": []}, {"method": "labor"}, {"disjoint": True}):
        s = Sampler(graph, [3, -1], **options).sample([4, 1])
        assert s.n_id.tolist() == [4, 1]
        assert s.num_sampled_nodes == (2, 0, 0)
        assert s.num_edges == 0


def test_weights_that_are_all_zero_leave_no_edges() -> None:
    s = Sampler(star(4), [2], weight=np.zeros(4)).sample([0])
    assert s.num_edges == 0


@pytest.mark.parametrize("fanout", [[], 5, "10,10", [10, -2], [2.5], [True], [None]])
def test_a_malformed_fanout_is_named(fanout: Any) -> None:
    with pytest.raises(InputError, match="fanout"):
        Sampler(star(3), fanout)


@pytest.mark.parametrize(
    ("seeds", "options", "word"),
    [
        ([], {}, "seeds"),
        ([[0]], {}, "seeds"),
        ([0.5], {}, "seeds"),
        ([True], {}, "seeds"),
        ([4], {}, "0 to 3"),
        ([-1], {}, "-1"),
        ([0], {"epoch": -1}, "epoch"),
        ([0], {"batch": 1.5}, "batch"),
        ([0], {"threads": 0}, "threads"),
        ([0], {"seed_time": [1]}, "seed_time"),
    ],
)
def test_bad_arguments_of_sample_are_named(seeds: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        Sampler(star(3), [2]).sample(seeds, **options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"weight": [1.0]}, "weight"),
        ({"weight": [1.0, -1.0, 2.0]}, "weight"),
        ({"weight": [1.0, np.nan, 2.0]}, "weight"),
        ({"node_time": [1, 2]}, "node_time"),
        ({"edge_time": ["a", "b", "c"]}, "edge_time"),
        ({"node_time": [1] * 4, "edge_time": [1] * 3}, "both"),
        ({"method": "walk"}, "method"),
        ({"direction": "up"}, "direction"),
        ({"temporal_strategy": "first"}, "temporal_strategy"),
        ({"method": "labor", "replace": True}, "replace"),
        ({"batch_dependency": 4}, "labor"),
        ({"method": "labor", "batch_dependency": 0}, "batch_dependency"),
        ({"direction": "induced", "disjoint": True}, "induced"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments_of_the_sampler_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        Sampler(star(3), [2], **options)


def test_dated_edges_want_a_time_for_every_seed() -> None:
    one = Sampler(star(3), [2], edge_time=[1, 2, 3])
    with pytest.raises(InputError, match="seed_time is missing"):
        one.sample([0])
    with pytest.raises(InputError, match="one number per seed"):
        one.sample([0], seed_time=[1, 2])


def test_graphs_between_two_node_sets_are_refused() -> None:
    graph = Graph.from_edge_index([0, 4], [1, 0], num_nodes=2, num_sources=5)
    with pytest.raises(InputError, match="one node set"):
        Sampler(graph, [2])


def test_an_error_in_a_helper_thread_reaches_the_caller() -> None:
    with pytest.raises(InputError, match="0 to 3"):
        Sampler(star(3), [2]).sample_many([[99], [0], [0]], threads=2)


def test_a_sampler_travels_to_another_process_without_its_buffers() -> None:
    graph, _, _ = random_graph(np.random.default_rng(11))
    one = Sampler(graph, [4, 3])
    wanted = one.sample(SEEDS)
    copy = pickle.loads(pickle.dumps(one))
    assert copy._spare == []
    assert is_same(wanted, copy.sample(SEEDS))


def test_the_sampler_and_the_rules_are_had_without_torch() -> None:
    code = "import sys, plait.features; from plait.loader import Sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
