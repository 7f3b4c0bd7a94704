"""Copies in host memory: the places are found once for a run's tensors, and found again for others."""

from __future__ import annotations

import gc
import weakref

import torch

from trainmaster.train.checkpoint.host_copy import HostCopy


def _tensors(count: int = 5) -> list[torch.Tensor]:
    return [torch.full((number + 1, 3), float(number)) for number in range(count)]


def test_a_copy_holds_the_values_of_its_own_time() -> None:
    tensors, copy = _tensors(), HostCopy(torch.device("cpu"), [])
    first = copy.copy(tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, tensors, strict=True))
    for tensor in tensors:
        tensor.add_(10)
    second = copy.copy(tensors)
    assert [one.data_ptr() for one in second] == [one.data_ptr() for one in first]
    assert all(torch.equal(one, other) for one, other in zip(second, tensors, strict=True))


def test_other_and_larger_tensors_get_places_of_their_own() -> None:
    copy = HostCopy(torch.device("cpu"), [])
    copy.copy(_tensors())
    larger = [torch.arange(3000.0), torch.tensor(1.0, dtype=torch.float64), torch.zeros(0)]
    copies = copy.copy(larger)
    assert [one.dtype for one in copies] == [one.dtype for one in larger]
    assert all(torch.equal(one, other) for one, other in zip(copies, larger, strict=True))


def test_a_copy_that_was_told_to_forget_keeps_no_tensor() -> None:
    tensors, copy = _tensors(), HostCopy(torch.device("cpu"), [])
    copy.copy(tensors)
    kept = weakref.ref(tensors[0])
    copy.forget()
    del tensors
    gc.collect()
    assert kept() is None
