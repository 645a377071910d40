"""A database URL: what is refused before anything runs, and that its password is never shown."""

from __future__ import annotations

import traceback
from importlib import util
from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.backend.api.settings import ApiSettings
from insitu.backend.http.app import build_api
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.precision import kept_precision
from insitu.backend.state_database import NUMBER_FILE, bind, database_of
from insitu.cli.serve import serve
from insitu.database.url import check_url, shown, without_secrets
from insitu.errors import CannotHonour, Conflict
from insitu.gateway.process import settings_from
from insitu.types import LoraSettings

URL = "postgresql+psycopg://me:geheim@db.example.com/insitu"


def test_a_url_is_shown_without_its_secrets() -> None:
    assert shown(URL) == "postgresql+psycopg://me:***@db.example.com/insitu"
    assert "geheim" not in shown("postgresql://db/x?password=geheim&sslpassword=geheim")
    assert without_secrets("wrong: geheim", URL) == "wrong: ***"
    assert "geheim" not in without_secrets("wrong: geheim", "postgresql://db/x?password=geheim")


def test_the_driver_may_be_left_out() -> None:
    assert check_url(URL.replace("+psycopg", "")) == URL


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (URL.replace("psycopg", "psycopg2"), "driver psycopg2"),
        (URL.replace("psycopg", "asyncpg"), "driver asyncpg"),
        ("mysql://me:geheim@db/insitu", "names mysql"),
        ("sqlite:////geheim.db", "names sqlite"),
        ("postgresql://me:geh:eim@ge@heim:x/insitu", "cannot be read"),
        ("geheim", "cannot be read"),
    ],
)
def test_what_cannot_be_honoured_is_refused(url: str, said: str) -> None:
    with pytest.raises(CannotHonour, match=said) as raised:
        check_url(url)
    assert raised.value.hint
    if not url.startswith("sqlite"):
        told = str(raised.value) + "".join(traceback.format_exception_only(raised.value))
        assert "geh" not in told.replace("geheim.db", "")
        assert raised.value.__cause__ is None


def test_a_missing_driver_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.database.url.find_spec", lambda name: None)
    with pytest.raises(CannotHonour, match=r"psycopg, which is not installed(.|\n)*insitu\[postgres\]"):
        check_url(URL)
    assert util.find_spec("psycopg") is not None


def test_a_directory_with_runs_in_sqlite_keeps_them(tmp_path: Path) -> None:
    assert database_of(tmp_path, None) is database_of(tmp_path, "") is None
    assert database_of(tmp_path, URL) == URL
    Ledger(ledger_url(tmp_path)).close()
    with pytest.raises(CannotHonour, match="are in SQLite"):
        database_of(tmp_path, URL)


def test_a_directory_with_runs_in_postgresql_needs_the_url(tmp_path: Path, postgres_url: str) -> None:
    with Ledger(postgres_url) as ledger:
        for _ in range(2):
            bind(tmp_path, ledger, postgres_url)
        assert database_of(tmp_path, postgres_url) == check_url(postgres_url)
        with pytest.raises(CannotHonour, match="are in PostgreSQL"):
            database_of(tmp_path, None)
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(Conflict, match="belongs to another state directory"):
            bind(other, ledger, postgres_url)
        assert not (other / NUMBER_FILE).exists()
        assert database_of(other, None) is None


def test_the_kept_precision_is_read_from_the_database(tmp_path: Path, postgres_url: str) -> None:
    assert kept_precision(tmp_path, postgres_url) is None
    with Ledger(postgres_url) as ledger:
        ledger.register_run("p", "run", "m", LoraSettings(), {}, {})
    assert not list(tmp_path.glob("*.db"))


@pytest.mark.parametrize("by", ["option", "environment"])
def test_serve_says_before_anything_runs_that_the_server_is_not_there(tmp_path: Path, by: str) -> None:
    pytest.importorskip("ray", reason="the supervisor starts Ray")
    url = "postgresql://me:geheim@127.0.0.1:1/insitu?connect_timeout=2"
    state = tmp_path / "state"
    result = CliRunner().invoke(
        serve,
        ["--device", "cpu", "--state-dir", str(state), *(["--database-url", url] * (by == "option"))],
        env={"INSITU_DATABASE_URL": url} if by == "environment" else {},
    )
    assert result.exit_code != 0
    assert result.exception is not None
    told = result.output + "".join(traceback.format_exception(result.exception))
    assert "cannot open the ledger in postgresql+psycopg://me:***@127.0.0.1:1/insitu" in told
    assert "geheim" not in told
    assert not state.exists()


def test_api_and_gateway_use_the_database(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ApiSettings(tmp_path, b"", database_url=postgres_url)
    services = build_api(settings).state.services
    services.ledger.register_run("p", "run", "m", LoraSettings(), {}, {})
    assert services.records.exists(["a"]) == set()
    assert not list(tmp_path.glob("*.db"))
    with Ledger(postgres_url) as ledger:
        assert [run.name for run in ledger.list_runs()] == ["run"]
    services.ledger.close()
    services.records.close()
    monkeypatch.setenv("INSITU_DATABASE_URL", URL)
    assert settings_from(["--managed"]).records_url == URL
    assert "geheim" not in repr(settings_from(["--managed"])) + repr(
        ApiSettings(tmp_path, b"", database_url=URL)
    )
    assert settings_from(["--managed", "--records", "sqlite://"]).records_url == "sqlite://"
    monkeypatch.delenv("INSITU_DATABASE_URL")
    with pytest.raises(SystemExit):
        settings_from(["--managed"])


def test_the_children_get_the_url_by_environment_alone(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the supervisor starts Ray")
    from insitu.backend.plan.compute import Asked, choose
    from insitu.backend.plan.cpu import read_cpu
    from insitu.backend.plan.settings import ServeSettings
    from insitu.backend.serve import Supervisor

    def supervisor(url: str | None) -> Supervisor:
        compute = choose(read_cpu(), "cpu", Asked())
        settings = ServeSettings(tmp_path, "cpu", compute, "merged", "shared", "default", database_url=url)
        assert "geheim" not in repr(settings)
        return Supervisor(settings, tmp_path, lambda _line: None)

    with_url, without = supervisor(URL), supervisor(None)
    for child in with_url._children:
        assert child.env["INSITU_DATABASE_URL"] == URL
        assert "geheim" not in repr(child) + " ".join(child.arguments)
    for child in without._children:
        assert "INSITU_DATABASE_URL" not in child.env
    assert with_url._records_url == URL
    assert without._records_url == f"sqlite:///{tmp_path}/calls.db"
