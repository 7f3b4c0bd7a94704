"""The database: tables and migrations, all changes (writes), all queries (reads), frozen rows between them."""

from sqlalchemy import Connection

from trainmaster.store import house, records  # their tables belong to the same metadata
from trainmaster.store.database import Database

__all__ = ["Connection", "Database", "house", "records"]
