"""Databases by URL: SQLite in the state directory, or a PostgreSQL server; their migrations."""
