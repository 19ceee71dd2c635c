"""runtime/identity.py: another identity for another tensor, other memory, other contents."""

from __future__ import annotations

import gc

import pytest
import torch

from plait.runtime.identity import SAMPLES, Hold, identity, is_identical


def test_it_stays_while_nothing_changes_and_reads_nothing_outside() -> None:
    base = torch.arange(3000.0).view(50, 60)
    for tensor in (base, base.t(), base[:, ::7], base[3:4, :1], base[:0], base[0, 0], base.expand(2, 50, 60)):
        assert identity(tensor, SAMPLES) == identity(tensor, SAMPLES)


def test_writes_memory_and_strides_count() -> None:
    x = torch.rand(40, 30)
    seen = {identity(x)}
    x.add_(0)
    seen.add(identity(x))
    x.data = torch.rand(40, 30)
    seen.add(identity(x))
    x.data.mul_(2)
    seen.add(identity(x))
    x.t_()
    seen.add(identity(x))
    assert len(seen) == 5


def test_a_tensor_without_a_counter_is_compared_with_a_copy() -> None:
    with torch.inference_mode():
        x = torch.rand(300, 30)
        x[7, 3] = float("nan")
        first = identity(x)
        assert identity(x) == first
        x[11, 5] = 2.0
        assert identity(x) != first


def test_a_hold_keeps_neither_the_tensor_nor_its_memory() -> None:
    dead: list[str] = []
    x = torch.rand(10)
    hold = Hold(x, dead, "x")
    assert hold() is x
    storage = x.untyped_storage()._weak_ref()
    del x
    gc.collect()
    assert hold() is None
    assert dead == ["x"]
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 2), (torch.float32, 1), (torch.float32, 7)])
def test_the_last_elements_of_less_than_a_word_are_looked_at(dtype: torch.dtype, count: int) -> None:
    tensor = torch.ones(count, dtype=dtype)
    before = identity(tensor)
    tensor.numpy()[-1] = 2
    assert identity(tensor) != before


def test_is_identical_says_what_comparing_identities_says() -> None:
    base = torch.arange(3000.0).view(50, 60)
    edges = torch.arange(40).view(2, 20)
    odd, sparse = torch.arange(7.0), base.relu().to_sparse_csr()
    with torch.inference_mode():
        uncounted = torch.rand(30)
    for tensor in (base, base.t(), base[:, ::7], base[:0], edges, odd, sparse, uncounted):
        known = identity(tensor)
        assert is_identical(tensor, known)
        if tensor.layout is torch.strided and not tensor.is_inference():
            tensor.data.add_(1)
            assert is_identical(tensor, known) == (identity(tensor) == known)
    known = identity(edges)
    edges.add_(0)
    assert not is_identical(edges, known)
    known = identity(edges)
    edges.data = edges.data.clone()
    assert not is_identical(edges, known)
    known = identity(edges)
    edges.t_()
    assert not is_identical(edges, known)
