"""The database: one module per entity with its queries and changes, tables, migrations, frozen rows."""
