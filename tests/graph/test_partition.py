"""Parts that are whole, level and cut few edges; a missing pymetis says what to install."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph import Graph, partition
from plait.graph.partition import has_metis, metis


def two_rings(size: int) -> Graph:
    node = np.arange(size)
    source = np.concatenate((node, size + node, [0, 3]))
    target = np.concatenate(((node + 1) % size, size + (node + 1) % size, [size, 3]))
    return Graph.from_any(np.stack((source, target)), 2 * size)


@pytest.mark.skipif(not has_metis(), reason="pymetis is not installed")
@pytest.mark.parametrize("recursive", [True, False])
def test_two_rings_are_two_parts(recursive: bool) -> None:
    part = metis(two_rings(20), 2, recursive=recursive)
    assert len(set(part[:20])) == len(set(part[20:])) == 1
    assert part[0] != part[20]


def test_one_part_needs_no_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "has_metis", lambda: False)
    assert metis(two_rings(3), 1).tolist() == [0] * 6


def test_a_missing_pymetis_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "has_metis", lambda: False)
    with pytest.raises(InputError, match=r"plait\[partition\]"):
        metis(two_rings(3), 2)


@pytest.mark.parametrize("parts", [0, 7, 1.5, True])
def test_bad_numbers_of_parts_are_refused(parts: int) -> None:
    with pytest.raises(InputError, match="parts="):
        metis(two_rings(3), parts)
