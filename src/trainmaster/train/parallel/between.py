"""Collectives between replica groups: a process group of one epoch, made by hand and thrown away with it.

A rank talks to those of the same number in the other groups. Every wait ends at once when a member is lost, as the
agent or a peer says: whoever waits for a third need not be connected to the one that died. It goes over gloo; what is
on a GPU is copied to the host for it and back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainmaster.node.quorum import Quorum, View
from trainmaster.train.parallel.rank_info import RankInfo

_CONNECT_S = 10.0
_PASSED_S = 1.0  # to connect in an epoch that is not the newest any more: a peer may have gone on to that one
_LOOK_S = 0.05  # between two looks at the quorum
_LONGEST_SLEEP_S = 0.002


class PeerLost(Exception):
    """A group of this epoch is gone or cannot be reached. What was computed together counts for nothing."""


class Between:
    """This rank's connection to the other groups."""

    def __init__(self, quorum: Quorum, rank_info: RankInfo, *, step_s: float, copy_s: float) -> None:
        self._quorum, self._rank_info = quorum, rank_info
        self._step_s, self._copy_s = step_s, copy_s  # longest sum of a step, longest copy: others may load before it
        self._group: Any = None
        self._before: Any = None  # kept for an epoch: a peer may still read what was sent over it
        self._view: View | None = None
        self._members: list[int] = []

    def connect(self, view: View) -> None:
        """Connect to the members of an epoch, all of which have come to it."""
        self._before, self._group = self._group, None
        self._view, self._members = view, sorted(view.members)
        if len(self._members) == 1:
            return
        made: list[Any] = []

        def make() -> None:
            store = dist.FileStore(str(self._quorum.store(view, self._rank_info.rank)))  # type: ignore[attr-defined]
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=_CONNECT_S)
            place = self._members.index(self._rank_info.group)
            made.append(dist.ProcessGroupGloo(store, place, len(self._members), options))

        # In a thread: it waits inside of torch for peers that may be gone.
        making = threading.Thread(target=_quietly, args=(make,), daemon=True)
        making.start()
        self._wait(lambda: not making.is_alive(), passed_s=_PASSED_S)
        if not made:
            raise PeerLost(f"the groups of epoch {view.epoch} could not connect")
        self._group = made[0]

    def add(self, tensor: Tensor) -> None:
        """Sum over the groups, in place. All groups get the same bits."""
        if self._group is None:
            return
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self._step_s)
        host = tensor.cpu()  # itself, where it is there
        self._do(lambda: self._group.allreduce([host], options))
        if host is not tensor:
            tensor.copy_(host)

    def copy(self, tensor: Tensor, *, source: int) -> None:
        """Take over the tensor of one group, in place."""
        if self._group is None:
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._members.index(source), 0
        options.timeout = timedelta(seconds=self._copy_s)
        host = tensor.detach().cpu().contiguous()
        octets = host.flatten().view(torch.uint8)  # gloo does not know every type
        self._do(lambda: self._group.broadcast([octets], options))
        if host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)

    def copy_bytes(self, data: bytes, *, source: int) -> bytes:
        """The bytes of one group."""
        size = torch.tensor([len(data)], dtype=torch.int64)
        self.copy(size, source=source)
        box = torch.zeros(int(size.item()), dtype=torch.uint8)
        if self._rank_info.group == source:
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.copy(box, source=source)
        return bytes(box.numpy().tobytes())

    def _do(self, begin: Callable[[], Any]) -> None:
        """Begin a collective and wait for it. After a failure the group is kept and not closed: that could wait."""
        try:
            work = begin()
            self._wait(work.is_completed)
            work.wait()
        except RuntimeError as error:  # the type of all of gloo's errors
            _ABANDONED.append(self._group)
            self._group = None
            raise PeerLost(str(error)) from error
        except PeerLost:
            _ABANDONED.append(self._group)
            self._group = None
            raise

    def _wait(self, is_done: Callable[[], bool], *, passed_s: float | None = None) -> None:
        began = look_at = time.monotonic()
        pause_s = 0.0001
        while not is_done():
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_S
                self._look(passed=passed_s is not None and now - began > passed_s)
            time.sleep(pause_s)
            pause_s = min(_LONGEST_SLEEP_S, pause_s * 1.2)

    def _look(self, *, passed: bool) -> None:
        """PeerLost where a member of this epoch is lost."""
        view = self._view
        assert view is not None
        newest = self._quorum.read()
        lost = [group for group, start in view.members.items() if not newest.has(group, start)]
        if lost or (passed and newest.epoch > view.epoch) or self._quorum.list_broken(view):
            raise PeerLost(f"epoch {view.epoch} is over")


_ABANDONED: list[Any] = []  # their threads may still wait, and closing them would wait for these


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except RuntimeError:
        return
