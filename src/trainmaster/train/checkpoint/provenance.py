"""Provenance of a checkpoint: config, commit, versions, hosts. For debugging; no code reads it.

What could be a secret stays out: no environment, and no URL with its user, password or query.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import torch
import torch.distributed as dist

from trainmaster import __version__
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import HostError
from trainmaster.core.schema import to_plain
from trainmaster.node.host import Host
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.rank_info import RankInfo

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


def collect_provenance(
    config: TrainConfig, rank_info: RankInfo, host: Host, *, group: dist.ProcessGroup
) -> dict[str, Any]:
    """The same on all ranks; asked once a run."""
    ranks = rank_sync.on_all(
        lambda: {"rank": rank_info.rank, "node": rank_info.node_rank, "host": host.hostname()}, group=group
    )
    git, driver = rank_sync.on_first(lambda: (_commit(host), _driver(host)), group=group)
    return {
        "config": redact(to_plain(config)),
        "git": git,
        "versions": {
            "trainmaster": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "driver": driver,
        },
        "ranks": ranks,
        "random": {"seed": config.seed, "scheme": "every step draws from sha256('step SEED STEP RANK')"},
    }


def redact(value: Any) -> Any:
    """The same data, its URLs without credentials."""
    if isinstance(value, Mapping):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    return _URL.sub(lambda match: _bare(match[0]), value) if isinstance(value, str) else value


def _bare(url: str) -> str:
    parts = urlsplit(url)
    # A query may be a signature that lets anyone in.
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _commit(host: Host) -> dict[str, Any] | None:
    """Of the working folder, if it is in a git checkout."""
    try:
        head = host.run("git", "rev-parse", "HEAD", timeout_s=10)
        if head.exit_code != 0:
            return None
        changed = host.run("git", "status", "--porcelain", "--untracked-files=no", timeout_s=10)
    except HostError:
        return None
    return {"commit": head.stdout.strip(), "changed": bool(changed.stdout.strip()) if changed.exit_code == 0 else None}


def _driver(host: Host) -> str | None:
    try:
        match = re.search(r"Kernel Module\D*([\d.]+)", host.read("/proc/driver/nvidia/version"))
    except HostError:
        return None
    return match[1] if match else None
