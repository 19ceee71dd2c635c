"""Two processes over loopback: rows, batches and losses are those of one process."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.distributed import NeighborLoader, Parts, Session, init, partition
from plait.distributed.neighbor import joined
from plait.distributed.parts import shares
from plait.errors import ExchangeError, InputError
from plait.graph import generate
from plait.loader import Sampler
from tests.distributed.ranks import BATCH, FANOUT, SEED, abandoned, everything, loader, losses
from tests.distributed.shards import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    loaded = generate.sbm(400, 4, features=8, signal=1.0)
    loaded.masks["train"][:50] = False  # parts with unequal numbers of seeds
    part = np.r_[np.zeros(150, np.int64), np.ones(250, np.int64)]
    partition(loaded, 2, place / "parts", assignment=part, file=io.StringIO())
    large = replace(loaded, x=loaded.x.copy())
    large.x[200, 3] = 1e6  # of part 1
    partition(large, 2, place / "large", assignment=part, file=io.StringIO())
    return place


@pytest.fixture(scope="module")
def alone(folder: Path) -> Session:
    return init(folder / "parts")


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    run(everything, 2, folder)
    return folder


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_lose_what_one_loses(two: Path, alone: Session) -> None:
    expected = losses(alone, lambda model: model)
    both = [np.load(two / f"losses-{rank}.npy") for rank in range(2)]
    assert np.array_equal(*both)
    assert expected[-1] < 0.8 * expected[0]  # it learns
    np.testing.assert_allclose(both[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.load(two / "planned-0.npy"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_rows_in_16_bits_train_the_model_on_rounded_features(two: Path, tmp_path: Path, wire: str) -> None:
    whole = generate.sbm(400, 4, features=8, signal=1.0)
    parts = Parts(two / "parts")
    kind = getattr(torch, wire)
    rounded = torch.from_numpy(whole.x).to(kind).float().numpy()
    masks = {name: np.isin(np.arange(400), parts.nodes()[parts.split(name)]) for name in ("train", "val")}
    part = np.r_[np.zeros(150, np.int64), np.ones(250, np.int64)]
    partition(
        replace(whole, x=rounded, masks=masks), 2, tmp_path / "parts", assignment=part, file=io.StringIO()
    )
    with init(tmp_path / "parts") as before:
        expected = losses(before, lambda model: model)
    both = [np.load(two / f"losses-{wire}-{rank}.npy") for rank in range(2)]
    assert np.array_equal(*both)
    np.testing.assert_allclose(both[0], expected, rtol=1e-5, atol=1e-6)
    with init(two / "parts", wire=wire) as narrow:  # one process: to the bit
        assert losses(narrow, lambda model: model) == expected


@pytest.mark.processes
@pytest.mark.slow
def test_a_batch_of_one_process_is_those_of_two_side_by_side(two: Path, alone: Session) -> None:
    def read(rank: int) -> list[Any]:
        flat, found = np.load(two / f"batches-{rank}.npy"), []
        while flat.size:
            found.append(flat[1 : flat[0] + 1])
            flat = flat[flat[0] + 1 :]
        return found

    batches = loader(alone)
    whole = [batch.n_id.numpy() for _ in range(2) for batch in batches]
    halves = [read(0), read(1)]
    assert len(whole) == len(halves[0]) == len(halves[1])
    for one, first, second in zip(whole, *halves, strict=True):
        assert sorted(one) == sorted([*first, *second])


@pytest.mark.processes
@pytest.mark.slow
def test_every_node_is_evaluated_once(two: Path, alone: Session) -> None:
    seen = [np.load(two / f"evaluated-{rank}.npy") for rank in range(2)]
    assert sorted(np.concatenate(seen)) == alone.parts.split("val").tolist()


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_ends_is_noticed(folder: Path) -> None:
    run(abandoned, 2, folder)
    seconds, said = (folder / "told.txt").read_text().split(" ", 1)
    assert float(seconds) < 25
    assert "rank 0: feature rows could not be exchanged" in said


def test_smaller_parts_repeat_their_first_seeds(alone: Session) -> None:
    batches = loader(alone)
    counts = np.diff(np.searchsorted(alone.parts.split("train"), alone.parts.bounds))
    assert batches.padding == counts.max() - counts.min() > 0
    seeds = np.concatenate([b.n_id[: b.batch_size].numpy() for b in batches])
    assert seeds.size == 2 * counts.max()
    assert set(seeds) == set(alone.parts.split("train"))
    assert len(batches) == -(-counts.max() // BATCH)


def test_a_part_without_seeds_takes_those_of_others(alone: Session) -> None:
    only = np.arange(5) + alone.parts.bounds[1]
    seeds = np.concatenate([b.n_id[: b.batch_size].numpy() for b in loader(alone, input_nodes=only)])
    assert sorted(seeds) == sorted([*only, *only])


def test_epochs_differ_and_repeat(alone: Session) -> None:
    first, second = ([b.n_id.tolist() for b in loader(alone)] for _ in range(2))
    assert first == second
    batches = loader(alone)
    assert [b.n_id.tolist() for b in batches] != [b.n_id.tolist() for b in batches]
    batches.set_epoch(0)
    assert [b.n_id.tolist() for b in batches] == first


def test_an_epoch_may_begin_with_a_later_step(alone: Session) -> None:
    whole = [b.n_id.tolist() for b in loader(alone, cache=0.25)]
    batches = loader(alone, cache=0.25)
    for first in (2, len(whole)):
        batches.start_at(0, first)
        assert [b.n_id.tolist() for b in batches] == whole[first:]
    assert len(list(batches)) == len(whole)  # epoch 1, from its first step
    with pytest.raises(InputError, match="an epoch has"):
        batches.start_at(0, len(whole) + 1)


def test_rows_that_others_do_not_send_are_an_exchange_error(
    alone: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> Any:
        raise ExchangeError("rank 0: feature rows could not be exchanged")

    batches = loader(alone, prefetch=0)
    monkeypatch.setattr(batches._staging, "place", lost)
    with pytest.raises(ExchangeError, match="batch 0 of epoch 0: rank 0"):
        next(iter(batches))


def test_labels_and_features_come_with_their_nodes(alone: Session) -> None:
    rows = np.concatenate([alone.parts.x(p) for p in range(2)])
    labels = alone.parts.y()
    assert labels is not None
    for batch in loader(alone, prefetch=0):
        assert np.array_equal(batch.x.numpy(), rows[batch.n_id.numpy()])
        assert np.array_equal(batch.y.numpy(), labels[batch.n_id.numpy()])
        assert int(batch.edge_index.max()) < batch.num_nodes


def test_joined_samples_are_the_samples(alone: Session) -> None:
    sampler = Sampler(alone.graph, FANOUT, seed=SEED)
    samples = [sampler.sample(np.array(seeds), 0, k) for k, seeds in enumerate([[0, 5], [300], [7, 7, 9]])]
    whole = joined(samples)
    assert whole.n_id[:6].tolist() == [0, 5, 300, 7, 7, 9]
    edges = [[*zip(s.n_id[s.row], s.n_id[s.col], s.e_id, strict=True)] for s in (*samples, whole)]
    assert sorted([*edges[0], *edges[1], *edges[2]]) == sorted(edges[3])
    assert (np.diff(whole.col) >= 0).all()
    assert whole.indptr is not None
    assert np.array_equal(np.diff(whole.indptr), np.bincount(whole.col, minlength=whole.indptr.size - 1))
    assert whole.num_sampled_nodes == tuple(np.sum([s.num_sampled_nodes for s in samples], axis=0))


def test_one_process_takes_rows_without_a_group(alone: Session) -> None:
    rows = np.concatenate([alone.parts.x(p) for p in range(2)])
    ids = np.array([3, 399, 3, 200])
    assert np.array_equal(alone.exchange.take(ids), rows[ids])
    assert alone.sums([1.5]) == [1.5]
    assert not alone.halo.any()


def test_bad_arguments_are_refused(alone: Session, tmp_path: Path) -> None:
    for message, options in {
        "batch_size": {"batch_size": 0},
        "coalesce": {"coalesce": 0},
        "cache": {"cache": -1},
        "input_nodes holds no node": {"input_nodes": np.empty(0, np.int64)},
        "numbered 0 to 399": {"input_nodes": [400]},
        "input_nodes has shape": {"input_nodes": [0.5]},
        "no other mask": {"input_nodes": "other"},
    }.items():
        with pytest.raises(InputError, match=message):
            NeighborLoader(alone, FANOUT, **options)
    with pytest.raises(InputError, match="wire='int8'"):
        init(alone.parts.folder, wire="int8")
    plain = partition(generate.star(9), 2, tmp_path / "plain", method="random", file=io.StringIO())
    with pytest.raises(InputError, match="no features"):
        init(plain.folder)


def test_parts_are_shared_out_evenly_or_not_at_all() -> None:
    assert shares(6, 2) == [range(3), range(3, 6)]
    with pytest.raises(InputError, match="--parts 3"):
        shares(2, 3)
    with pytest.raises(InputError, match="--parts 4"):
        shares(5, 2)


def test_parts_that_are_verified_open_as_others_do(alone: Session) -> None:
    assert Parts(alone.parts.folder, verify=True).num_nodes == 400
