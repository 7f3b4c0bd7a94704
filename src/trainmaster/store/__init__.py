"""The database: one module per entity with its queries and changes, tables, migrations, frozen rows."""

from sqlalchemy import Connection

from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

__all__ = ["Connection", "Database", "open_database"]
