"""Process groups beside the one that trains, each with a time limit of its own."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def open_group(timeout_s: float, name: str) -> dist.ProcessGroup:
    """A group on the CPU for one thread: within a group all ranks must make their calls in the same order."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=name)
    return group
