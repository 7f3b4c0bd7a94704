"""Column types and upsert for SQLite and PostgreSQL, and the metadata of all tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Integer,
    MetaData,
    Select,
    Table,
    Text,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from trainmaster.core.events import clean_value

T = TypeVar("T")
_AT_ONCE = 500  # keys in one query


class UtcTime(TypeDecorator[datetime]):
    """An aware time, kept as UTC. SQLite has no zones: without this a local time would be kept as if it were UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        assert value.tzinfo is not None, "a time without its zone has no place in the database"
        return value.astimezone(UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        # SQLite gives text of one form; a page of jobs has hundreds of them.
        return _from_text if dialect.name == "sqlite" else super().result_processor(dialect, coltype)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class SafeText(TypeDecorator[str]):
    """Text from targets and jobs: NUL (PostgreSQL refuses it) and half a surrogate pair (no UTF-8) become U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else str(clean_value(value))


def _from_text(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(f"{value}+00:00")


# Names are given by rule, so that a later migration can speak of a constraint on both databases.
metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def json_column() -> JSON:
    return JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class Sound(FunctionElement[Any]):
    """A JSON column to look into; NULL where SQLite has a text that is no JSON, of which one row fails every query."""

    inherit_cache = True
    name = "sound"

    def __init__(self, column: ColumnElement[Any]) -> None:
        super().__init__(column)
        self.type = column.type


@compiles(Sound)
def _as_it_is(element: Sound, compiler: Any, **more: Any) -> str:
    return str(compiler.process(element.clauses, **more))


@compiles(Sound, "sqlite")
def _if_valid(element: Sound, compiler: Any, **more: Any) -> str:
    column = compiler.process(element.clauses, **more)
    return f"CASE WHEN json_valid({column}) THEN {column} END"


class Shapeless(FunctionElement[bool]):
    """Whether a JSON column has no mapping, so that nothing can be said of its fields: ask where NULL would be a no."""

    inherit_cache = True
    name = "shapeless"
    type = Boolean()


@compiles(Shapeless)
def _no_object(element: Shapeless, compiler: Any, **more: Any) -> str:
    return f"jsonb_typeof({compiler.process(element.clauses, **more)}) <> 'object'"


@compiles(Shapeless, "sqlite")
def _no_valid_object(element: Shapeless, compiler: Any, **more: Any) -> str:
    column = compiler.process(element.clauses, **more)
    return f"CASE WHEN json_valid({column}) THEN json_type({column}) <> 'object' ELSE 1 END"


def big() -> BigInteger:
    return BigInteger().with_variant(Integer(), "sqlite")


def word(kind: Any, value: str | None) -> Any:
    """A text column as a member of its enum; NULL stays None."""
    return kind(value) if value is not None else None


@functools.lru_cache(maxsize=256)  # each is asked again and again, and takes longer to build than to run
def upsert(
    dialect: str,
    table: Table,
    key: tuple[str, ...],
    changed: tuple[str, ...] = (),
    *,
    where: Callable[[Any, Any], ColumnElement[bool]] | None = None,
) -> Any:
    """INSERT … ON CONFLICT (key) DO UPDATE the changed columns; DO NOTHING without any.

    `where` takes the stored and the new columns and restricts the update.
    """
    row = (sqlite if dialect == "sqlite" else postgresql).insert(table)
    if not changed:
        return row.on_conflict_do_nothing()
    condition = where(table.c, row.excluded) if where is not None else None
    changes = {name: row.excluded[name] for name in changed}
    return row.on_conflict_do_update(index_elements=key, set_=changes, where=condition)


def slices(keys: Iterable[T]) -> Iterator[list[T]]:
    """The keys, in parts of which a query can name each."""
    listed = list(keys)
    for first in range(0, len(listed), _AT_ONCE):
        yield listed[first : first + _AT_ONCE]


def fetch_at_once(
    conn: Connection, query: Select[Any], values: Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """The rows of a query without numbers that have a fraction, in any order.

    SQLite's driver gives the interpreter up at every row and, beside a thread that computes, gets it back a millisecond
    later: a thousand rows took a second while the queue was decided. There they come as one text.
    """
    if conn.dialect.name != "sqlite":
        return [tuple(row) for row in conn.execute(query, values)]
    whole, types = _to_one_text(query)
    rows = json.loads(conn.execute(whole, values).scalar_one())
    for n, kind in enumerate(types):
        read = kind.dialect_impl(conn.dialect).result_processor(conn.dialect, None)
        if read is not None:
            for row in rows:
                row[n] = read(row[n])
    return [tuple(row) for row in rows]


@functools.lru_cache(maxsize=64)  # by the object: a query that is put together once is wrapped once
def _to_one_text(query: Select[Any]) -> tuple[Select[Any], list[Any]]:
    columns = query.subquery().c
    return select(func.json_group_array(func.json_array(*columns))), [column.type for column in columns]
