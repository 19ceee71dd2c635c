"""A topology in parts over 2 and 4 processes: batches and losses are those of one process with all of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.distributed import init, partition
from plait.distributed.frontier import FrontierExchange, Question
from plait.errors import ExchangeError, InputError
from plait.loader.owned import Frontier, OwnedEdges
from tests.distributed import topologies
from tests.distributed.shards import graph, run, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("topologies")
    data = graph()
    data.val_mask = ~data.train_mask
    partition(data, 4, place / "parts", file=io.StringIO())
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    with init(folder / "parts") as session:
        return topologies.losses(session, topology="replicated")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_topology_in_parts_gives_the_batches_of_the_whole(
    folder: Path, expected: list[float], size: int
) -> None:
    run(topologies.everything, size, folder)
    for rank in range(size):
        found = np.load(folder / f"losses-{size}-{rank}.npy")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_one_process_asks_nobody(folder: Path, expected: list[float]) -> None:
    with init(folder / "parts") as session:
        for options in topologies.OPTIONS:
            parted = topologies.batches(session, topology="partitioned", **options)
            topologies.same(parted, topologies.batches(session, topology="replicated", **options))
        assert topologies.losses(session, topology="partitioned") == expected
        assert session.frontiers().counters.rounds == 0
        assert session.traffic() == (0, 0)


def ended(scenario: Any, folder: Path) -> dict[str, tuple[float, str]]:
    """What rank 0 was told by calls that failed, and after how many seconds; rank 1 does not answer."""
    ranks = start(scenario, 2, folder)
    ranks[0].join(120)
    code = ranks[0].exitcode
    for process in ranks:
        process.kill()
    said = "\n".join(path.read_text() for path in sorted(folder.glob("failed-*.txt")))
    assert code == 0, said or f"rank 0 ended with {code}"
    texts = [(path.stem, path.read_text().split(" ", 1)) for path in folder.glob("*.txt")]
    return {name: (float(seconds), text) for name, (seconds, text) in texts}


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_killed_ends_the_others_with_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").symlink_to(folder / "parts")
    told = ended(topologies.killed, tmp_path)
    seconds, text = told["killed-0"]
    assert seconds < 4 * topologies.TIMEOUT
    assert "rank 0: " in text
    assert "could not be exchanged" in text
    assert "rank 0: neighbours could not be exchanged" in told["told-neighbours-0"][1]


@pytest.mark.processes
@pytest.mark.slow
def test_a_machine_cut_off_is_given_up_after_the_timeout(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").symlink_to(folder / "parts")
    told = ended(topologies.cut_off, tmp_path)
    for name, said in {
        "features": "feature rows could not be exchanged|no answer for 1 rows",
        "neighbours": "neighbours could not be exchanged|no answer for 1 nodes",
        "shard": "rank 0: all_to_all failed",
    }.items():
        seconds, text = told[f"told-{name}"]
        assert seconds < 4 * topologies.TIMEOUT, name
        assert any(part in text for part in said.split("|")), (name, text)


@pytest.mark.parametrize(("free", "fits"), [(None, True), (10**9, True), (1000, False)])
def test_auto_asks_whether_the_structure_fits(
    folder: Path, free: int | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.distributed.session.available_bytes", lambda: free)
    with init(folder / "parts") as session:
        assert session.topology_fits == fits
        assert topologies.loader(session).topology == "replicated"  # one process has nobody to share it with


def edges() -> OwnedEdges:
    """Nodes 2 and 3 of 6: one in-edge from node 0, two from 4 and 5; they are edges 7 to 9."""
    return OwnedEdges(np.array([7, 8, 10], np.int32), np.array([0, 4, 5], np.int32), 2, 6)


def test_questions_are_sorted_by_owner() -> None:
    nodes = np.array([5, 0, 2, 1, 4])
    question = Question(Frontier(nodes, 2**64 - 1, 3, True), np.array([0, 1, 3, 4]), np.array([0, 2, 4, 6]))
    assert question.nodes.tolist() == [0, 1, 5, 4]
    assert question.at.tolist() == [1, 3, 0, 4]
    assert question.words(1) == []
    head, asked = question.words(2)
    assert head.tolist() == [-1, 3, 1, 2]
    assert asked.tolist() == [5, 4]


def test_what_others_ask_is_checked() -> None:
    own = FrontierExchange(edges(), np.array([0, 6]))
    counts, source, edge = own._drawn(np.array([9, -1, 0, 2, 3, 2, 9, 0, 0, 1, 3]))
    assert (counts.tolist(), source.tolist(), edge.tolist()) == ([2, 1, 0], [4, 5, 0], [8, 9, 7])
    for words in ([1, 2, 0], [1, 2, 0, 3, 2], [1, -2, 0, 1, 2], [1, 2, 0, 0]):
        with pytest.raises(ExchangeError, match="another format"):
            own._drawn(np.array(words))
    with pytest.raises(InputError, match="owns the nodes 2 to 3"):
        own._drawn(np.array([1, 2, 0, 1, 4]))


def test_answers_of_others_are_checked() -> None:
    own = FrontierExchange(edges(), np.array([0, 6]))
    question = Question(Frontier(np.array([2]), 1, 3), np.array([0]), np.array([0, 6]))
    with pytest.raises(ExchangeError, match="nodes that are none"):
        own._share_out([question], np.array([1]), np.array([0, 1]), np.array([6, 0]), np.array([1]))


def test_bad_arguments_are_refused(folder: Path) -> None:
    with init(folder / "parts") as session:
        with pytest.raises(InputError, match="topology='split' is unknown"):
            topologies.loader(session, topology="split")
        session.size = 2
        with pytest.raises(InputError, match="policy='vip'"):
            topologies.loader(session, topology="partitioned", cache=5, policy="vip")
        session.size = 1
