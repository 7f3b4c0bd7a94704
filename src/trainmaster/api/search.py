"""Search over everything a caller may see: jobs, failures, nodes and GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from trainmaster.core.states import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One thing that was found. Nodes and GPUs name the job whose checks saw them last, or none: the operator's."""

    kind: Literal["job", "failure", "node", "gpu"]
    title: str  # name of the job or the node
    text: str  # the words around what was found
    job_id: str | None
    project: str | None
    status: Status | None  # of the job; null for a node or a GPU
    at: datetime | None
    gpu: str | None = None  # the GPU, as the page of its history asks for it


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """What was found, jobs first. `more`: there is more of some kind than is listed."""

    query: str
    hits: tuple[Hit, ...]
    more: bool
