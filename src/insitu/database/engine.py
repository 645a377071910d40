"""Open a store's database: create it if it is new, upgrade it if it is older.

A connection with the option `insitu_write` takes the write lock when its transaction begins, on SQLite as on
PostgreSQL. So writers follow one another, and numbers that count up are in the order of the commits. A reader
never waits for a writer and sees one state of the database throughout its transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import ExitStack

import orjson
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DataError, DBAPIError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from insitu.database import postgres, sqlite
from insitu.database.migrations import Schema, bring_up
from insitu.database.url import is_sqlite, shown, without_secrets
from insitu.errors import InvalidRequest, Unavailable, Undecided, one_line

BUSY_SECONDS = 30.0
WRITE_OPTION = "insitu_write"

OUTAGES = (OperationalError, InternalError, PoolTimeout)
"""Failures of the disk, a lock or the server, which may pass (InternalError: the server is read-only)."""

Check = Callable[[Connection, str], None]


def open_engine(
    url: str,
    schema: Schema,
    check: Check | None = None,
    *,
    pool_size: int,
    max_overflow: int,
    busy_seconds: float = BUSY_SECONDS,
) -> Engine:
    """Open the database of a store; `check` may reject it, after the tables are up to date."""
    arguments = {} if is_sqlite(url) else postgres.arguments(url, schema.place, busy_seconds)
    if is_sqlite(url):
        arguments["connect_args"] = {"timeout": busy_seconds, "check_same_thread": False}
    engine = create_engine(
        url,
        json_serializer=_dump_json,
        json_deserializer=orjson.loads,
        pool_size=pool_size,
        max_overflow=max_overflow,
        pool_timeout=busy_seconds,
        **arguments,
    )
    with ExitStack() as on_failure:
        on_failure.callback(engine.dispose)
        if is_sqlite(url):
            sqlite.prepare(engine, WRITE_OPTION)
        else:
            postgres.prepare(engine, WRITE_OPTION, schema.place)
        _set_up(engine, schema, check, url, busy_seconds)
        on_failure.pop_all()
    return engine


def writing(engine: Engine) -> Engine:
    """Return the engine whose transactions take the write lock."""
    options = {WRITE_OPTION: True}
    return engine.execution_options(**(options if _on_sqlite(engine) else options | postgres.WRITER))


def advice(engine: Engine) -> str:
    """Return what to do when the database fails."""
    if _on_sqlite(engine):
        return "free space on the disk of the state directory or end the process that locks it, then retry"
    return "check the PostgreSQL server and the network to it, then retry"


def cause_of(error: BaseException) -> str:
    """Return the database's own words; where they would name a server's address and user, only the fact.

    `/health` and `/ready` show it without a key.
    """
    found = error.orig if isinstance(error, DBAPIError) else error
    if getattr(found, "sqlstate", "") is None:  # psycopg: no answer of the server, so there is no code
        return "the PostgreSQL server does not answer"
    return str(found)


def is_outage(error: BaseException) -> bool:
    """Return True if an error of a store, or its cause, is one of the database and may pass by itself.

    Such an error does not say that nothing was written: the acknowledgement of a commit may be what was lost.
    """
    found = error.__cause__ if isinstance(error, Unavailable) else error
    return isinstance(found, (*OUTAGES, Undecided))


def unstorable(error: DataError) -> InvalidRequest:
    """Return the error for a value that the database does not take; PostgreSQL takes no NUL in texts."""
    return InvalidRequest(f"a value cannot be stored or looked up: {one_line(str(error.orig))}")


def _set_up(engine: Engine, schema: Schema, check: Check | None, url: str, busy_seconds: float) -> None:
    try:
        if _on_sqlite(engine):
            sqlite.enter_wal(engine, busy_seconds)
        with writing(engine).begin() as connection:
            if not _on_sqlite(engine):
                postgres.create_schema(connection, schema.place)
                postgres.take_time(connection)
            bring_up(connection, schema, shown(url))
            if check is not None:
                check(connection, shown(url))
    except (DBAPIError, sqlite3.OperationalError) as error:
        cause = str(error.orig if isinstance(error, DBAPIError) else error)
        raise _unavailable(schema.name, url, cause, busy_seconds) from error


def _unavailable(name: str, url: str, cause: str, busy_seconds: float) -> Unavailable:
    if not is_sqlite(url):
        reason = one_line(without_secrets(cause, url))
        return Unavailable(
            f"cannot open the {name} in {shown(url)}: {reason}",
            hint="check that the server runs and lets this user in and create tables: "
            f"psql '{shown(url).replace('+psycopg', '')}'",
        )
    if "locked" in cause:
        return Unavailable(
            f"the {name} {url} stayed locked for {busy_seconds:.0f} s",
            hint=f"find the process that holds it: fuser {url.removeprefix('sqlite:///')}",
        )
    return Unavailable(
        f"cannot open the {name} {url}: {cause}",
        hint="check that the state directory exists, is writable and has free space",
    )


def _on_sqlite(engine: Engine) -> bool:
    return engine.dialect.name == "sqlite"


def _dump_json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
