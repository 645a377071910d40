"""Migrations: what earlier releases wrote opens with nothing lost, on SQLite and on PostgreSQL."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from insitu.backend.ledger import Ledger, ledger_url, schema
from insitu.backend.ledger.schema import LEDGER
from insitu.database import engine as database
from insitu.database.migrations import NUMBER, Schema, bring_up, revision_of
from insitu.errors import Conflict
from insitu.records.store import RecordStore
from insitu.records.tables import RECORDS
from insitu.types import JobState, LoraSettings, StepSettings, Trajectory, TrajectoryGroup
from tests.support.postgres import Cluster

WRITTEN = Path(__file__).parents[1] / "fixtures" / "written_by_f14bd25"
WITHOUT_PROMOTIONS = WRITTEN.with_name("written_by_6a4aa06")
FILES = {"ledger": "ledger", "records": "calls"}
STORES = pytest.mark.parametrize("store", [LEDGER, RECORDS], ids=lambda store: store.name)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/new.db"
        return
    cluster: Cluster = request.getfixturevalue("postgres")
    with cluster.database(tables=False) as url:
        yield url


@contextmanager
def opened(url: str, schema: Schema) -> Iterator[sa.Engine]:
    engine = database.open_engine(url, schema, pool_size=1, max_overflow=1, busy_seconds=10)
    try:
        yield engine
    finally:
        engine.dispose()


def make_unnumbered(engine: sa.Engine) -> None:
    with database.writing(engine).begin() as connection:
        NUMBER.drop(connection)


Rows = dict[str, list[tuple[object, ...]]]


def rows_of(url: str) -> Rows:
    """All rows of a SQLite file, but for the revision."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {
            name: connection.execute(f"SELECT * FROM {name}").fetchall()
            for (name,) in names
            if name != NUMBER.name
        }


def kept_rows(rows: Rows, before: Rows) -> Rows:
    """The tables that were there before, without the number that keeps older releases out."""
    return {name: rows[name] for name in before if name != "meta"}


@pytest.fixture(params=["ledger", "records"])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Schema]:
    """A database that the last release before migrations wrote."""
    url = f"sqlite:///{tmp_path}/earlier.db"
    with closing(sqlite3.connect(tmp_path / "earlier.db")) as connection:
        connection.executescript((WRITTEN / f"{FILES[request.param]}.sql").read_text())
    return url, {"ledger": LEDGER, "records": RECORDS}[request.param]


def test_a_database_of_the_last_release_opens_with_every_row(earlier: tuple[str, Schema]) -> None:
    url, store = earlier
    before = rows_of(url)
    assert all(before[name] for name in ("runs", "groups", "jobs", "pins") if name in before)
    for _ in range(2):
        with opened(url, store) as engine, engine.begin() as connection:
            assert revision_of(connection) == store.newest
        assert kept_rows(rows_of(url), before) == kept_rows(before, before)


def test_the_ledger_of_the_last_release_goes_on(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.executescript((WRITTEN / "ledger.sql").read_text())
    with Ledger(ledger_url(tmp_path)) as ledger:
        assert [(step.step, step.metrics) for step in ledger.steps("run")] == [
            (1, {"loss": 0.25}),
            (2, {"loss": 0.25}),
        ]
        assert [checkpoint.pinned for checkpoint in ledger.checkpoints("run")] == [True, False]
        assert ledger.requeue_running() == []  # the job under way was being cancelled, so its group is free
        assert ledger.create_job("run", "k4", ["g3"], StepSettings(), "h").state is JobState.QUEUED


def test_the_calls_of_the_last_release_go_on(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "calls.db")) as connection:
        connection.executescript((WRITTEN / "calls.sql").read_text())
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    first, *_ = calls = store.by_rollout("ro")
    assert [call.output_ids for call in calls] == [[4, 1], [4, 2], [4, 3]]
    assert store.append([first], ["ro", "new"]) == {"ro"}
    assert store.count() == 3
    store.close()


def make_of_revision_1(engine: sa.Engine) -> None:
    """Take away what the second revision adds."""
    with database.writing(engine).begin() as connection:
        schema.promotions.drop(connection)
        connection.execute(sa.update(NUMBER).values(version_num="0001"))
        connection.execute(
            sa.update(schema.meta).values(value=1).where(schema.meta.c.key == "schema_version")
        )


def test_a_ledger_without_promotions_gets_them_and_keeps_its_steps(empty_url: str) -> None:
    with Ledger(empty_url) as ledger:
        ledger.register_run("project", "run", "model", LoraSettings(), {}, {})
        for step in (1, 2, 3):
            ledger.put_group(TrajectoryGroup(f"g{step}", "run", [Trajectory(f"r{step}", ["c"], 1.0)]), "hash")
            job = ledger.create_job("run", f"k{step}", [f"g{step}"], StepSettings(), "h")
            ledger.transition_job(job.id, JobState.RUNNING)
            ledger.commit_step(job.id, step, {"loss": 0.25}, f"checkpoints/{step}", f"sha-{step}")
        ledger.pin_checkpoint("run", 1)
        before = ledger.steps("run"), ledger.checkpoints("run"), ledger.get_run("run")
        make_of_revision_1(ledger._engine)
    for _ in range(2):
        with Ledger(empty_url) as ledger:
            assert (ledger.steps("run"), ledger.checkpoints("run"), ledger.get_run("run")) == before
            assert ledger.promotions("run") == []
    with Ledger(empty_url) as ledger:
        assert ledger.promote("run", 2).step == 2
    with Ledger(empty_url) as ledger:
        assert ledger.get_run("run").promoted == 2
        with ledger._engine.begin() as connection:
            number = sa.select(schema.meta.c.value).where(schema.meta.c.key == "schema_version")
            found = connection.execute(number).scalar()
            assert found == schema.SCHEMA_VERSION, "releases before migrations look at it"


def test_the_file_of_the_release_before_promotions_opens(tmp_path: Path) -> None:
    url = ledger_url(tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.executescript((WITHOUT_PROMOTIONS / "ledger.sql").read_text())
    before = rows_of(url)
    assert all(before[name] for name in ("runs", "groups", "jobs", "steps", "checkpoints", "pins"))
    with Ledger(url) as ledger:
        assert kept_rows(rows_of(url), before) == kept_rows(before, before)
        assert ledger.promote("run", 1).manifest_sha256 == "sha-1"


def test_a_crash_in_the_middle_of_an_upgrade_leaves_the_old_database(earlier: tuple[str, Schema]) -> None:
    """The first revision runs, then the process fails before its commit."""
    url, store = earlier
    before = rows_of(url)

    def fail(connection: sa.Connection, _url: str) -> None:
        assert revision_of(connection) == store.newest
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        database.open_engine(url, store, fail, pool_size=1, max_overflow=1)
    assert rows_of(url) == before
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert NUMBER.name not in tables


@STORES
def test_a_crash_while_a_new_database_is_set_up_leaves_nothing(empty_url: str, store: Schema) -> None:
    def fail(_connection: sa.Connection, _url: str) -> None:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        database.open_engine(empty_url, store, fail, pool_size=1, max_overflow=1)
    with opened(empty_url, store) as engine, engine.begin() as connection:
        assert revision_of(connection) == store.newest


@STORES
@pytest.mark.parametrize("made_by", ["models", "revisions"])
def test_models_and_revisions_agree(empty_url: str, store: Schema, made_by: str) -> None:
    """A new database is made from the models, an older one by the revisions: both are the same."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with opened(empty_url, store) as engine:
        if made_by == "revisions":
            with database.writing(engine).begin() as connection:
                store.tables.drop_all(connection)
                NUMBER.drop(connection)
                sa.Table("left", sa.MetaData(), sa.Column("x", sa.Integer)).create(connection)
            with database.writing(engine).begin() as connection:
                bring_up(connection, store, "url")
                sa.Table("left", sa.MetaData(), sa.Column("x", sa.Integer)).drop(connection)
        with engine.begin() as connection:
            context = MigrationContext.configure(
                connection, opts={"compare_type": True, "compare_server_default": True}
            )
            assert compare_metadata(context, store.tables) == []


@STORES
def test_the_newest_revision_is_the_one_that_is_noted(store: Schema) -> None:
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(store.versions, version_locations=[str(store.versions)])
    assert scripts.get_current_head() == store.newest


@STORES
def test_a_newer_revision_is_rejected_and_stays(empty_url: str, store: Schema) -> None:
    with opened(empty_url, store) as engine, database.writing(engine).begin() as connection:
        connection.execute(sa.update(NUMBER).values(version_num="0099"))
    with pytest.raises(Conflict, match=f"the {store.name} .* has schema version 0099, newer than"):
        with opened(empty_url, store):
            pass


@STORES
def test_an_unnumbered_database_gets_what_it_lacks(empty_url: str, store: Schema) -> None:
    """As an old SQLite file, also where an upgrade was interrupted on PostgreSQL."""
    with opened(empty_url, store) as engine:
        make_unnumbered(engine)
        with database.writing(engine).begin() as connection:
            store.tables.sorted_tables[-1].drop(connection)
    with opened(empty_url, store) as engine, engine.begin() as connection:
        assert sa.inspect(connection).has_table(store.tables.sorted_tables[-1].name)
        assert revision_of(connection) == store.newest


def test_those_who_open_a_database_together_do_not_race(empty_url: str) -> None:
    """First an empty one, then one to upgrade. Connections hold locks, so threads stand for processes."""
    together = threading.Barrier(4)

    def open_ledger(_number: int) -> None:
        together.wait(30)
        Ledger(empty_url).close()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(open_ledger, range(4))) == [None] * 4
            with Ledger(empty_url) as ledger:
                make_unnumbered(ledger._engine)


def test_a_new_or_current_database_needs_no_alembic(tmp_path: Path) -> None:
    """Its import takes a while; opening a database of today must not pay for it."""
    program = (
        "import sys; from insitu.backend.ledger import Ledger\n"
        "for _ in range(2): Ledger(sys.argv[1]).close()\n"
        "assert 'alembic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, ledger_url(tmp_path)], check=True, timeout=60)
