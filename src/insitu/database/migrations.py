"""Bring a database to the schema of this release, inside the caller's transaction.

    empty                 create the tables, note the newest revision (Alembic is not imported)
    newest revision       nothing to do (Alembic is not imported)
    older, or unnumbered  run the missing revisions with Alembic; the first one creates only what is missing
    newer                 Conflict; the transaction is rolled back

Revisions are numbered `0001`, `0002`, … in a `versions` folder beside the tables. A database of a release
before migrations has tables but no number.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from insitu.errors import Conflict

Version = TypeVar("Version", int, str)
ENVIRONMENT = Path(__file__).parent / "environment"
NUMBER = sa.Table(
    # As Alembic declares it.
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
_ALEMBIC = threading.Lock()
"""Alembic keeps what it works on in its modules: one upgrade at a time in a process."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one store, and the revisions that lead to them."""

    name: str
    """Its name in messages."""
    tables: sa.MetaData
    versions: Path
    newest: str

    @property
    def place(self) -> str:
        """The schema in PostgreSQL; both stores have a table `rollouts`."""
        return f"insitu_{self.name}"


def bring_up(connection: sa.Connection, schema: Schema, shown_url: str) -> None:
    """Create or upgrade the tables of `schema`; the caller's transaction holds the write lock."""
    found = revision_of(connection)
    if found == schema.newest:
        return
    if found is not None and found > schema.newest:
        raise other_version(schema.name, shown_url, found, schema.newest)
    if found is None and not sa.inspect(connection).get_table_names():
        schema.tables.create_all(connection)
        NUMBER.create(connection)
        connection.execute(sa.insert(NUMBER).values(version_num=schema.newest))
    else:
        _upgrade(connection, schema)


def revision_of(connection: sa.Connection) -> str | None:
    """Return the revision of the connection's database; None before migrations."""
    if not sa.inspect(connection).has_table(NUMBER.name):
        return None
    return connection.execute(sa.select(NUMBER.c.version_num)).scalar()


def other_version(name: str, shown_url: str, found: Version, known: Version) -> Conflict:
    """Return the error for a database that no migration leads to this release."""
    age = "newer" if found > known else "older"
    return Conflict(
        f"the {name} {shown_url} has schema version {found}, {age} than this insitu's {known}",
        hint="use the insitu release that wrote it, or another state directory",
    )


def _upgrade(connection: sa.Connection, schema: Schema) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection, "tables": schema.tables})
    config.set_main_option("script_location", str(ENVIRONMENT).replace("%", "%%"))
    config.set_main_option("version_locations", str(schema.versions).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    with _ALEMBIC:
        command.upgrade(config, "head")
