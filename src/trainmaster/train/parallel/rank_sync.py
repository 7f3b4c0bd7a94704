"""What one rank finds out, all ranks act on. A rank that decided alone would leave the others waiting for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trainmaster.core.errors import TrainmasterError

T = TypeVar("T")


class RankError(Exception):
    """Something failed on a rank; raised on all of them, with the same words."""


def any_rank(flag: bool) -> bool:
    """Whether it holds on one rank or more. On the CPU, so that a GPU need not be waited for."""
    word = torch.tensor([int(flag)], dtype=torch.int32)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return bool(word.item())


def highest(numbers: Sequence[int]) -> list[int]:
    """The highest of each of these over the ranks, in one exchange."""
    words = torch.tensor(list(numbers), dtype=torch.int64)
    dist.all_reduce(words, op=dist.ReduceOp.MAX)
    return [int(word) for word in words.tolist()]


def any_of(flags: Sequence[bool]) -> list[bool]:
    """The same for several at once."""
    words = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
    dist.all_reduce(words, op=dist.ReduceOp.MAX)
    return [bool(word) for word in words.tolist()]


def mean(value: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks of a scalar; it stays on its device, and nobody waits for it."""
    total = value.detach().to(torch.float32).clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total / dist.get_world_size()


def total(value: float) -> float:
    """The sum over the ranks of a number that the host has."""
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word)
    return float(word.item())


def on_first(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0 acts; every rank gets its result, or its failure as a RankError.

    A thread beside the one that trains needs a group of its own: in one group ranks must agree on the order of calls.
    """
    box: list[Any] = [_attempt(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=group)
    result: T = _results(box)[0]
    return result


def on_all(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank acts; every rank gets all the results in rank order, or the failures as a RankError."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, _attempt(action), group=group)
    return _results(box)


def cause(wrong: BaseException) -> str:
    """The failure in one line; torch reports its own over many, with a traceback of every rank."""
    if isinstance(wrong, CheckpointException):
        faults = wrong.failures.items()
        return "; ".join(f"rank {rank}: {type(fault).__name__}: {fault}" for rank, (fault, _) in faults)
    return str(wrong)


def _attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return action(), None
    except Exception as wrong:
        return None, str(wrong) if isinstance(wrong, TrainmasterError) else f"{type(wrong).__name__}: {wrong}"


def _results(box: list[Any]) -> list[Any]:
    faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(box) if fault is not None]
    if faults:
        raise RankError("; ".join(faults))
    return [result for result, _ in box]
