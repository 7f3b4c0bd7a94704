"""Connections to a database, and short read and write transactions on them. migrate.open_database opens one.

    db = open_database(home / "trainmaster.db")     # or a URL: postgresql+psycopg://…
    with db.write() as conn: ...                    # commits at the end, rolls back on an error

SQLite runs in WAL mode: readers never wait for the writer. `synchronous=FULL` costs one fsync per commit and is paid
on purpose: a killed process loses nothing under NORMAL either, but a power cut could take back the commit that says
"we are about to launch this", and the launched machine would then have no owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, Executable, RowMapping, create_engine, event, make_url
from sqlalchemy import Connection as Connection  # noqa: PLC0414 (for packages that do not import SQLAlchemy)
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trainmaster.core.errors import MissingExtra, StoreError
from trainmaster.core.events import clean_value

_BUSY_MS = 15_000  # longest wait for another process's write; ours last milliseconds, and a caller waits for both
_CONNECT_S = 10  # longest wait for a connection to PostgreSQL, for each of its addresses
_RESERVE, _RESERVE_BYTES = "trainmaster_reserve", 4 << 20  # a table that is made and dropped, and its size
_WRITES = "trainmaster_writes"  # an option of a connection: its transaction takes the write lock
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class Database:
    """A pool of connections to one database whose schema is this code's. May be shared by threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # PostgreSQL else shows each query of a transaction what was committed before that query: a job could be read
        # as running and its attempt, a moment later, as over. SQLite's transactions see one state by themselves.
        postgresql = engine.dialect.name == "postgresql"
        self._reading = engine.execution_options(isolation_level="REPEATABLE READ") if postgresql else engine
        self._open = threading.local()  # the read of each thread, while it lasts
        # SQLite has one writer, and waiting connections poll for it: with a few of them in one process the
        # unlucky one waits for half a minute. Here they stand in line.
        self._line = None if postgresql else threading.Lock()
        self._file: tuple[int, int] | None = None  # device and inode of SQLite's file
        self.kept: dict[Hashable, tuple[Any, Any]] = {}  # of page_rows/kept_sums.py

    @property
    def has_one_writer(self) -> bool:
        """Whether writers wait for each other whatever they change, as in SQLite."""
        return self._line is not None

    def pin_file(self) -> None:
        """From now on the file has to be this one. Called once its schema is there; nothing to do on PostgreSQL."""
        if self._line is not None:
            self._file = _identify(self.engine.url.database)

    def _require_file(self) -> None:
        # Open connections would write into a file that is no longer in its folder, lost with this process, and a new
        # one would create an empty database beside it.
        if self._file is None or (identity := _identify(self.engine.url.database)) == self._file:
            return
        what = "deleted" if identity is None else "replaced"
        raise StoreError(
            f"{self.engine.url.database}: was {what} while in use, and nothing is written any more; "
            "restore a backup (trainmaster restore) and start again"
        )

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent view, as of its first query; whatever is written on it is rolled back.

        A read inside a read, in the same thread, is the same view. Never to be held over an `await`.
        """
        around: Connection | None = getattr(self._open, "conn", None)
        if around is not None:
            yield around
            return
        self._require_file()
        with self._reading.connect() as conn:
            self._open.conn = conn
            try:
                yield conn
            finally:
                self._open.conn = None

    def mappings(self, query: Executable, values: Mapping[str, Any] | None = None) -> Sequence[RowMapping]:
        """The rows of one query, by column."""
        with self.read() as conn:
            return conn.execute(query, values).mappings().all()

    def rows(self, query: Executable, values: Mapping[str, Any] | None = None) -> Sequence[Any]:
        with self.read() as conn:
            return conn.execute(query, values).all()

    def first(self, query: Executable, values: Mapping[str, Any] | None = None) -> RowMapping | None:
        with self.read() as conn:
            return conn.execute(query, values).mappings().first()

    def scalars(self, query: Executable, values: Mapping[str, Any] | None = None) -> list[Any]:
        """The first column of one query."""
        with self.read() as conn:
            return list(conn.execute(query, values).scalars())

    def scalar(self, query: Executable, values: Mapping[str, Any] | None = None) -> Any:
        """The first value of one query; None without a row."""
        with self.read() as conn:
            return conn.execute(query, values).scalar()

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction, committed at the end. Keep it short: SQLite has one writer at a time."""
        self._require_file()
        with self._turn(), self.engine.connect().execution_options(**{_WRITES: True}) as conn, conn.begin():
            yield conn

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Our turn among this process's writers, after at most as long as SQLite waits for other processes."""
        if self._line is None:
            yield
            return
        if not self._line.acquire(timeout=_BUSY_MS / 1000):
            raise StoreError(
                f"no turn to write within {_BUSY_MS / 1000:g} s: the database is locked; nothing was changed"
            )
        try:
            yield
        finally:
            self._line.release()

    def reserve_space(self) -> None:
        """Keep free pages inside SQLite's file and its log: short writes go on while the disk is full.

        A file is left at the size that it once had: what is written over needs no new block, whoever fills the disk.
        """
        if self._line is None:
            return
        with self._turn(), self.engine.connect() as conn:
            driver = conn.connection.cursor()
            (free,), (page,) = (driver.execute(f"PRAGMA {word}").fetchone() for word in ("freelist_count", "page_size"))
            room = os.statvfs(os.path.dirname(self.engine.url.database or ""))  # noqa: PTH120 (a Path has no statvfs)
            if free * page >= _RESERVE_BYTES / 2 or room.f_bavail * room.f_frsize < 10 * _RESERVE_BYTES:
                return
            driver.execute(f"CREATE TABLE IF NOT EXISTS {_RESERVE} (x BLOB)")
            driver.execute(f"INSERT INTO {_RESERVE} VALUES (randomblob(?))", (_RESERVE_BYTES,))  # noqa: S608 (ours)
            driver.execute("PRAGMA wal_checkpoint(RESTART)")  # the pages are in the file, not only in its log
            driver.execute(f"DROP TABLE {_RESERVE}")

    def close(self) -> None:
        self.engine.dispose()


def _identify(path: str | None) -> tuple[int, int] | None:
    """Device and inode of a file; None where there is none, or it is not on disk."""
    try:
        stat = os.stat(path or "")  # noqa: PTH116 (before every transaction: a Path costs more than the call)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_dev, stat.st_ino


def connect(where: str | Path) -> Engine:
    """An engine for a path or a URL; touches nothing yet."""
    try:
        if isinstance(where, str) and "://" in where:
            url = make_url(where)
        else:
            url = make_url("sqlite+pysqlite://").set(database=str(Path(where).absolute()))
        if url.drivername in ("postgres", "postgresql"):  # SQLAlchemy would take the older driver
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() not in ("sqlite", "postgresql"):
            raise StoreError(f"{url.drivername}: not a database for Trainmaster; use postgresql+psycopg or sqlite")
        arguments = _arguments(url) if url.get_backend_name() == "postgresql" else {}
        # Values stay out of errors, and so out of logs: a spec or the hash of a token may be among them.
        engine = create_engine(
            url, json_serializer=_to_json, pool_size=8, max_overflow=56, hide_parameters=True, connect_args=arguments
        )
    except ModuleNotFoundError as missing:
        raise MissingExtra("PostgreSQL", "postgres") from missing
    except (ArgumentError, ValueError):  # whose words may hold the password
        raise StoreError("not the URL of a database; write postgresql+psycopg://USER:PASSWORD@HOST/NAME") from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
    elif "lock_timeout" not in str(url.query.get("options", "")):
        event.listen(engine, "connect", _limit_waits)
    return engine


def _arguments(url: URL) -> dict[str, Any]:
    """What libpq is told beside the URL, which goes first."""
    # libpq waits without end for a host that accepts and says nothing, and for hours for one that vanished.
    waits = {"connect_timeout": _CONNECT_S, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
    # Whatever PGCLIENTENCODING or the database says: with another one, text comes as bytes or cannot be sent.
    return {**{name: value for name, value in waits.items() if name not in url.query}, "client_encoding": "utf8"}


def _to_json(value: Any) -> str:
    """JSON that both databases accept: neither NUL nor half a surrogate pair, which logs and names may hold."""
    try:
        text = _encode(value)
        if "\\u0000" not in text:
            text.encode()
            return text
    except ValueError:  # also: not UTF-8, not a number
        pass
    return _encode(clean_value(value))


def _prepare(connection: Any, _record: object) -> None:
    # The driver's own transactions begin too late (at the first write, not the first read): BEGIN is ours, below.
    connection.isolation_level = None
    for pragma in (f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _limit_waits(connection: Any, _record: object) -> None:
    """As long as SQLite waits: PostgreSQL waits without end for a table that somebody has locked by hand."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = {_BUSY_MS}")
    connection.commit()


def _begin(conn: Connection) -> None:
    # IMMEDIATE takes the write lock at once and waits for it. A transaction that reads first and writes later would
    # be refused in the middle whenever another process wrote in between.
    if conn.get_execution_options().get(_WRITES):
        conn.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        # Takes no lock and so cannot fail; straight to the driver, because a page opens several of these.
        conn.connection.cursor().execute("BEGIN")


def describe_error(error: Exception) -> str:
    """The driver's own first line: the rest is SQL and a link to SQLAlchemy's pages."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def is_unavailable(error: Exception) -> bool:
    """Whether a statement failed because the database is away, full or busy, and not because of its values."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (PoolTimeout, StoreError))
    state = getattr(error.orig, "sqlstate", None) or ""
    if state[:2] in _VALUE_STATES:
        return False
    if state == READ_ONLY:
        return True
    return error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError))


READ_ONLY = "25006"  # SQLSTATE of a write on a standby, or where default_transaction_read_only is on
# SQLSTATE classes: data exception, integrity violation, program limit (an index entry that is too long).
_VALUE_STATES = ("22", "23", "54")
