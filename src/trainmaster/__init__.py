"""Prove the cluster, train on it, never lose a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.client import Client as Client

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # On first use: a node imports this package too, and has nothing that a client needs.
    if name == "Client":
        from trainmaster.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
