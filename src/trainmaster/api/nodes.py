"""Machines: checked nodes and rented instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.core.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node with the result of its newest checks."""

    node: str
    attempt: str
    job_id: str
    project: str
    at: datetime | None
    verdict: Verdict  # the worst of its checks
    checks: Mapping[str, int]  # number of checks by verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    nodes: tuple[Node, ...]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A machine that was, is or may be rented."""

    id: int
    attempt: str
    target: str
    nonce: str
    provider_id: str | None
    kind: str | None
    region: str | None
    state: str
    price_cents_per_hour: float | None
    address: str | None
    created_at: datetime
    launched_at: datetime | None
    gone_at: datetime | None
    detail: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    instances: tuple[Instance, ...]
    limit: int
    offset: int
