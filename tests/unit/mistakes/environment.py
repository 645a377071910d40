"""Mistakes around the command: keys, ports, limits, directories."""

from __future__ import annotations

from insitu.database.url import check_url
from insitu.system.keys import check_key
from insitu.system.tls import check_listener, tls_files
from tests.unit.mistakes.desk import DRY_RUN, Desk, Mistake, Provoke, Said


def with_variable(name: str, value: str, *arguments: str) -> Provoke:
    def provoke(desk: Desk) -> Said:
        desk.monkeypatch.setenv(name, value)
        return desk.run(*(word.format(api=desk.doors.api_url) for word in arguments))

    return provoke


def few_open_files(desk: Desk) -> Said:
    desk.monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    return desk.run(*DRY_RUN)


def state_dir_is_a_file(desk: Desk) -> Said:
    desk.write("state", "")
    return desk.run("keys", "list", "--state-dir", "state")


def listening(host: str, key: str, *, certificate: str | None = None) -> Provoke:
    """The checks of `insitu serve` before it starts anything."""

    def provoke(_: Desk) -> Said:
        check_key(key, host)
        check_listener(host, tls_files(certificate, None), behind_proxy=False)
        return 0, ""

    return provoke


def database(url: str) -> Provoke:
    """The check of INSITU_DATABASE_URL."""

    def provoke(_: Desk) -> Said:
        return 0, check_url(url)

    return provoke


MISTAKES = [
    Mistake(
        "the key of the environment is wrong",
        with_variable("INSITU_API_KEY", "wrong", "runs", "list", "--url", "{api}"),
        "rejects the key",
        "http://127.0.0.1:",
        "export INSITU_API_KEY",
    ),
    Mistake(
        "the default key on a public address",
        listening("0.0.0.0", "default"),
        "refusing to listen on 0.0.0.0",
        "`default`",
        "export INSITU_API_KEY",
    ),
    Mistake(
        "a public address without TLS",
        listening("0.0.0.0", "k" * 40),
        "0.0.0.0",
        "0.0.0.0",
        "--tls-certificate",
    ),
    Mistake(
        "a certificate without its key",
        listening("127.0.0.1", "default", certificate="cert.pem"),
        "--tls-key",
        "--tls-certificate",
        "--tls-key",
    ),
    Mistake(
        "a database of another kind",
        database("mysql://me@host/insitu"),
        "not PostgreSQL",
        "mysql://",
        "postgresql+psycopg://",
    ),
    Mistake("too few open files", few_open_files, "open files", "64", "ulimit -n"),
    Mistake(
        "the state directory is a file",
        state_dir_is_a_file,
        "is a file, not a directory",
        "state",
        "--state-dir",
    ),
]
