"""Pre-flights of jobs as entries of the history of GPUs, beside those of the operator's own checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.pages.parts import node_health
from trainmaster.store import nodes as store
from trainmaster.store.database import Connection, Database

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry

_MOST = 50  # pre-flights of a node, as on its page
_MOST_NODES = 200


def list_failed(db: Database) -> list[Entry]:
    """The newest pre-flights of every node where one failed, also those that passed there."""
    with db.read() as conn:
        pairs = {
            (node, attempt)
            for node in store.list_failed_nodes(conn, limit=_MOST_NODES)
            for attempt in store.list_node_checks(conn, node, limit=_MOST)
        }
        return [entry for entry in _list(conn, {attempt for _, attempt in pairs}) if (entry.node, entry.run) in pairs]


def list_of_gpu(db: Database, word: str) -> list[Entry]:
    """The newest pre-flights that named a GPU by this serial number, UUID or bus."""
    with db.read() as conn:
        return _list(conn, set(store.list_gpu_checks(conn, word, limit=_MOST)))


def _list(conn: Connection, attempts: set[str]) -> list[Entry]:
    from trainmaster.cluster.health import history

    return [
        entry
        for checked in store.list_findings(conn, attempts)
        for entry in history.list_node(node_health.build(checked), run=checked.attempt, at=checked.at.isoformat())
    ]
