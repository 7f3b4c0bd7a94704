"""Targets that are known or granted, without what their settings hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGrant:
    """A project that may use a target."""

    project: str
    user: str | None  # as which its jobs run there; None: the account of the settings
    account: str  # as the target says it: a user, a namespace, a role
    fault: str  # why its jobs cannot run there now; empty: nothing is wrong
    note: str = ""  # what the machine does not limit, as the memory of a job; empty: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTarget:
    """A target: what a spec writes, what it stands for, and who may use it."""

    name: str
    word: str  # kind and file, as ssh:/etc/trainmaster/lab.yaml; a target that names no file stands for itself
    granted: tuple[TargetGrant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTargets:
    targets: tuple[KnownTarget, ...]
