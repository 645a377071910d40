"""Database URLs: which ones can be honoured, and how they are shown without their password."""

from __future__ import annotations

from importlib.util import find_spec

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from insitu.errors import CannotHonour
from insitu.system.torch_builds.installing import install_command

VARIABLE = "INSITU_DATABASE_URL"
EXAMPLE = "postgresql+psycopg://user:password@host/database"
_DRIVER = "postgresql+psycopg"
_SECRET = ("password", "sslpassword")
"""The parameters of libpq that are secrets."""


def check_url(text: str) -> str:
    """Return the URL of a PostgreSQL database that this installation can open, or raise CannotHonour."""
    url = _parsed(text)
    if url.get_backend_name() != "postgresql":
        raise CannotHonour(
            f"the database URL {shown(text)} names {url.get_backend_name()}, not PostgreSQL",
            hint=f"leave it out for SQLite in the state directory, or write {EXAMPLE}",
        )
    if url.drivername not in ("postgresql", _DRIVER):
        raise CannotHonour(
            f"the database URL {shown(text)} names the driver {url.get_driver_name()}, insitu uses psycopg",
            hint=f"let it begin with {_DRIVER}://",
        )
    if find_spec("psycopg") is None:
        raise CannotHonour(
            f"the database URL {shown(text)} needs psycopg, which is not installed",
            hint=install_command("insitu[postgres]"),
        )
    return url.set(drivername=_DRIVER).render_as_string(hide_password=False)


def shown(text: str) -> str:
    """Return a URL for messages: every secret in it is `***`."""
    url = _parsed(text)
    hidden = {name: "***" for name in _SECRET if name in url.query}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def without_secrets(message: str, text: str) -> str:
    """Return a driver's message with the secrets of the URL replaced."""
    url = _parsed(text)
    secrets = [url.password, *(url.query.get(name) for name in _SECRET)]
    for secret in secrets:
        if isinstance(secret, str) and secret:
            message = message.replace(secret, "***")
    return message


def is_sqlite(text: str) -> bool:
    """Return True for the URL of a SQLite file."""
    return text.startswith("sqlite:")


def _parsed(text: str) -> URL:
    try:
        return make_url(text)
    except (ArgumentError, ValueError):
        # Neither the text nor the cause is shown: an unescaped password ends up in both.
        raise CannotHonour(
            "the database URL cannot be read; it is not shown here, since it may hold a password",
            hint=f"write {EXAMPLE}, and characters such as @ : / % in the password as %40 %3A %2F %25",
        ) from None
