"""A PostgreSQL server of the tests' own: a private cluster in memory, on a unix socket, never as root.

The first test that asks for it starts it, and the process that started it ends it. If that process is killed,
the kernel ends the server, and the next start removes its files.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import sqlalchemy as sa

from insitu.backend.ledger import Ledger
from insitu.records.store import RecordStore

INSTALL = "apt-get install --no-install-recommends postgresql"
OFF = "INSITU_NO_POSTGRES"
_MEMORY = Path("/dev/shm")
_PREFIX = "insitu-postgres-"
_START_SECONDS = 60
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def binaries() -> Path:
    """The directory of `initdb` and `postgres`: Debian's newest, or the one on the PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    found = str(debian[-1]) if debian else shutil.which("initdb")
    if found is None or not (Path(found).resolve().parent / "postgres").exists():
        raise FileNotFoundError(f"PostgreSQL is not installed: {INSTALL}, or set {OFF}=1")
    return Path(found).resolve().parent


@cache
def _user() -> str | None:
    """Whom the server runs as: `initdb` refuses root."""
    if os.geteuid() != 0:
        return None
    import pwd

    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class Cluster:
    """One server with any number of databases."""

    def __init__(self, *, durable: bool) -> None:
        _remove_left()
        parent = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        if _user() is not None:
            shutil.chown(self.folder, _user())
        self._durable = durable
        self._numbers = itertools.count()
        self._has_template = False
        self._server: subprocess.Popen[bytes] | None = None
        initdb = [binaries() / "initdb", "-D", self.folder / "data", "-U", "insitu", "-A", "trust", "-N"]
        subprocess.run(
            [*initdb, "-E", "UTF8", "--locale=C"],
            check=True,
            capture_output=True,
            user=_user(),
            cwd=self.folder,
            timeout=_START_SECONDS,
        )
        self.start()

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://insitu@/{database}?host={self.folder}"

    def start(self) -> None:
        """Start the server and wait until it answers; after a kill it recovers first."""
        options = {"listen_addresses": "", "unix_socket_directories": self.folder, "shared_buffers": "16MB"}
        options |= {"max_connections": 100, "fsync": "on" if self._durable else "off"}
        command: list[str | Path] = [binaries() / "postgres", "-D", self.folder / "data"]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                command, user=_user(), cwd=self.folder, stdout=log, stderr=log, preexec_fn=_end_with_parent
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.execute("SELECT 1")
                return
            except sa.exc.OperationalError:
                if time.monotonic() > deadline or self._server.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.05)

    def kill(self) -> None:
        """`kill -9` of the postmaster; its children notice and end."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(_START_SECONDS)
        # A new postmaster starts only once the old one's children have let go of the shared memory.
        deadline = time.monotonic() + _START_SECONDS
        while _running_in(self.folder / "data"):
            assert time.monotonic() < deadline, "the server's children do not end"
            time.sleep(0.02)

    def stop(self) -> None:
        """End the server and remove its files."""
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGQUIT)  # at once, without a checkpoint
            self._server.wait(_START_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Run a statement outside any transaction."""
        engine = sa.create_engine(
            self.url(database),
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"connect_timeout": 5},
        )
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)

    @contextmanager
    def database(self, *, tables: bool = True) -> Iterator[str]:
        """Yield the URL of a new database, with or without insitu's tables; it is removed afterwards."""
        name, template = f"test{next(self._numbers)}", self._template() if tables else "template0"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _template(self) -> str:
        """Make the database that others are copied from: faster than creating every table each time."""
        if not self._has_template:
            self.execute("CREATE DATABASE with_tables TEMPLATE template0 STRATEGY file_copy")
            Ledger(self.url("with_tables")).close()
            RecordStore(self.url("with_tables")).close()
            self._has_template = True
        return "with_tables"


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _running_in(folder: Path) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "cwd") == str(folder):
                    return True
    return False


def _remove_left() -> None:
    """Remove the files of processes that were killed."""
    for parent in (_MEMORY, Path(tempfile.gettempdir())):
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).split("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                shutil.rmtree(folder, ignore_errors=True)
