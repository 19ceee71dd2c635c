"""runtime/identity.py: another identity for another tensor, other memory, other contents."""

from __future__ import annotations

import gc

import pytest
import torch

from plait.runtime.identity import SAMPLES, Hold, identity


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
