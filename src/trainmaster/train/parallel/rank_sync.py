"""Collectives that carry decisions and failures. A rank that decided alone would leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trainmaster.core.errors import TrainmasterError

T = TypeVar("T")


class RankError(Exception):
    """A failure of one rank, raised on all with the same text. `kinds`: names of the exceptions behind it."""

    def __init__(self, text: str, *, kinds: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.kinds = kinds


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. On the CPU, so that no GPU is waited for."""
    word = torch.tensor([int(flag)], dtype=torch.int32)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return bool(word.item())


def highest(numbers: Sequence[int]) -> list[int]:
    """Maximum of each number over the ranks, in one collective."""
    words = torch.tensor(list(numbers), dtype=torch.int64)
    dist.all_reduce(words, op=dist.ReduceOp.MAX)
    return [int(word) for word in words.tolist()]


def any_of(flags: Sequence[bool]) -> list[bool]:
    """Whether each flag is set on any rank, in one collective."""
    words = torch.tensor([int(flag) for flag in flags], dtype=torch.int32)
    dist.all_reduce(words, op=dist.ReduceOp.MAX)
    return [bool(word) for word in words.tolist()]


def mean(value: torch.Tensor) -> torch.Tensor:
    """Mean of a scalar over the ranks; it stays on its device and is not waited for."""
    total = value.detach().to(torch.float32).clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total / dist.get_world_size()


def total(value: float) -> float:
    """Sum of a host number over the ranks."""
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word)
    return float(word.item())


def on_first(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run an action on rank 0; every rank gets its result, or its failure as a RankError.

    A thread beside the training thread needs its own group: within a group all ranks must call in the same order.
    """
    box: list[Any] = [_attempt(action) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=group)
    result: T = _results(box)[0]
    return result


def on_all(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Run an action on every rank; every rank gets all results in rank order, or the failures as a RankError."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, _attempt(action), group=group)
    return _results(box)


def cause(error: BaseException) -> str:
    """Failure in one line; torch's own has a traceback of every rank."""
    if isinstance(error, CheckpointException):
        faults = error.failures.items()
        return "; ".join(f"rank {rank}: {type(fault).__name__}: {fault}" for rank, (fault, _) in faults)
    return str(error)


def _attempt(action: Callable[[], T]) -> tuple[T | None, str | None, str]:
    try:
        return action(), None, ""
    except Exception as error:
        kind = type(error).__name__
        return None, str(error) if isinstance(error, TrainmasterError) else f"{kind}: {error}", kind


def _results(box: list[Any]) -> list[Any]:
    faults = [f"rank {rank}: {fault}" for rank, (_, fault, _) in enumerate(box) if fault is not None]
    if faults:
        raise RankError("; ".join(faults), kinds=frozenset(kind for *_, kind in box if kind))
    return [result for result, *_ in box]
