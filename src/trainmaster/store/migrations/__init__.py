"""Schema changes, in order, run by `Database.open`. `versions/` holds one file each; the newest is this code's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from trainmaster.core.errors import StoreError

if TYPE_CHECKING:
    from trainmaster.store.database import Database


def upgrade(db: Database) -> None:
    """Bring the schema to this code's; nothing is touched where it is already so."""
    with db.read() as conn:
        if _is_current(conn):
            return
    _run(db, lambda config: command.upgrade(config, "head"))


def downgrade(db: Database, revision: str) -> None:
    """Take the schema back to an older one. Tables that the older one does not have are dropped with their rows."""
    _run(db, lambda config: command.downgrade(config, revision))


def _run(db: Database, step: Callable[[Config], None]) -> None:
    # One write transaction: of two processes that open an old database at once, the second waits and finds it done.
    with db.write() as conn:
        _is_current(conn)
        config = _config()
        config.attributes["connection"] = conn
        step(config)


def _is_current(conn: Connection) -> bool:
    script = ScriptDirectory.from_config(_config())
    found = MigrationContext.configure(conn).get_current_revision()
    known = {revision.revision for revision in script.walk_revisions()}
    if found is not None and found not in known:
        raise StoreError(
            f"{conn.engine.url!r}: its schema {found!r} is newer than this Trainmaster knows; "
            "install the newer release again (pip install -U trainmaster), or open another database"
        )
    return found == script.get_current_head()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
