"""Enough files may be open at once. Data loaders pass tensors as files, and many ranks hold many sockets."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.checks import system_files
from trainmaster.checks.comparison import setting
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("open_files",)
COMPARES = (setting("limit", "open-files limit"),)
METRICS: dict[str, str] = {}
# A shell's default of 1,024 is where PyTorch's data loaders fail with "Too many open files".
WARN_BELOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    limit: int | None  # None is unlimited
    gpus: bool


def read(host: Host) -> Files:
    return Files(limit=system_files.read_limit(host, "Max open files"), gpus=system_files.has_gpus(host))


def judge(files: Files, expect: Expect) -> Finding:
    if files.limit is None:
        return ok("unlimited", limit=None)
    summary = f"{files.limit} files may be open"
    action = "set `* - nofile 1048576` in /etc/security/limits.conf, or give the container --ulimit nofile=1048576"
    if expect.open_files is not None:
        if files.limit < expect.open_files:
            return fail(f"{summary}, not {expect.open_files}", action=action, limit=files.limit)
        return ok(summary, limit=files.limit)
    # Without a GPU the shell's default is what everybody has, and what small work on a CPU gets by with.
    if files.gpus and files.limit < WARN_BELOW:
        return warn(summary, action=action, limit=files.limit)
    return ok(summary, limit=files.limit)
