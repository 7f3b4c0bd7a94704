"""Open a database and migrate its schema. `migrations/versions/` has one file per revision; the newest is current."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from trainmaster.core.errors import StoreError
from trainmaster.store import projection, tables
from trainmaster.store.database import Database, connect, describe_error

if TYPE_CHECKING:
    from alembic.config import Config

_FOLDER = Path(__file__).parent / "migrations"
_INCREMENTAL = "0003"  # the revision from which on records carry aggregates
# As Alembic makes it.
_VERSION_TABLE = """CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
)"""
_ONE_AT_A_TIME = threading.Lock()  # Alembic keeps what it works on in a global of the process


def open_database(where: str | Path) -> Database:
    """The database at a file path or a URL, created or migrated where needed; StoreError if it cannot be used."""
    engine = connect(where)
    db = Database(engine)
    try:
        upgrade(db)
    except SQLAlchemyError as error:
        engine.dispose()
        raise StoreError(f"{engine.url!r}: cannot be opened: {describe_error(error)}") from error
    except StoreError:
        engine.dispose()
        raise
    db.pin_file()
    return db


def upgrade(db: Database) -> None:
    """Bring the schema to this code's; nothing is touched where it is already so."""
    with db.read() as conn:
        _require_utf8(conn)
        if _is_current(conn):
            return
        before = _revision(conn)
    if before is None and _create(db):
        return
    # Imported where it is needed: it takes longer to load than most commands take, and hardly any needs it.
    from alembic import command

    _run(db, lambda config: command.upgrade(config, "head"))
    if before is not None and before < _INCREMENTAL:
        _rebuild_open(db)


def _create(db: Database) -> bool:
    """Make every table of this code in an empty SQLite file: in a third of the time of the migrations, which give the
    same tables. False where there is anything, or it is PostgreSQL."""
    if not db.has_one_writer:
        return False
    with db.write() as conn:
        if inspect(conn).get_table_names():
            return False
        tables.jobs.metadata.create_all(conn)
        conn.execute(text(_VERSION_TABLE))
        conn.execute(text("INSERT INTO alembic_version VALUES (:newest)"), {"newest": revisions()[-1]})
    return True


def downgrade(db: Database, revision: str) -> None:
    """Take the schema back to an older one. Tables that the older one does not have are dropped with their rows."""
    from alembic import command

    _run(db, lambda config: command.downgrade(config, revision))


def _run(db: Database, step: Callable[[Config], None]) -> None:
    # One write transaction: of two processes that open an old database at once, the second waits and finds it done.
    with _ONE_AT_A_TIME, db.write() as conn:
        _is_current(conn)
        config = _config()
        config.attributes["connection"] = conn
        step(config)


def _is_current(conn: Connection) -> bool:
    revision = _revision(conn)
    known = revisions()
    if revision is not None and revision not in known:
        raise StoreError(
            f"{conn.engine.url!r}: its schema {revision!r} is newer than this Trainmaster knows; "
            "install the newer release again (pip install -U trainmaster), or open another database"
        )
    return bool(revision == known[-1])


def _require_utf8(conn: Connection) -> None:
    """Refuse a database that cannot keep every character: a job whose log has another one would never end."""
    if conn.dialect.name != "postgresql":
        return
    encoding = conn.execute(text("SHOW server_encoding")).scalar_one()
    if encoding != "UTF8":
        raise StoreError(
            f"{conn.engine.url!r}: its encoding is {encoding}, and UTF8 is needed; "
            "create another database: createdb --encoding=UTF8 --template=template0 NAME"
        )


def _revision(conn: Connection) -> str | None:
    if not inspect(conn).has_table("alembic_version"):
        return None
    revision: str | None = conn.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return revision


def _rebuild_open(db: Database) -> None:
    """Derive the records of open jobs again: later lines are merged with aggregates, which older rows do not have."""
    for job_id in db.scalars(select(tables.jobs.c.id).where(tables.jobs.c.stage.is_not(None))):
        with db.write() as conn:
            projection.rebuild(conn, job_id)


def revisions() -> list[str]:
    """Every schema in its order, by the names of the files: 0001_straight_line.py is 0001."""
    return sorted(path.name.partition("_")[0] for path in (_FOLDER / "versions").glob("[0-9]*.py"))


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
