"""What differs on PostgreSQL: settings of connections, the write lock, a server that comes and goes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from insitu.backend.ledger import Ledger, groups, jobs, schema
from insitu.database import engine as database
from insitu.database.postgres import write_lock
from insitu.database.writer import GroupCommitWriter
from insitu.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from insitu.records.store import RecordStore
from insitu.types import JobState, LoraSettings, StepSettings
from tests.support.postgres import Cluster


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[Ledger]:
    with Ledger(postgres_url) as opened:
        opened.register_run("project", "run", "model", LoraSettings(), {}, {})
        yield opened


@pytest.fixture
def other(postgres_url: str) -> Iterator[Ledger]:
    """The ledger of another process."""
    with Ledger(postgres_url) as opened:
        yield opened


def setting(connection: sa.Connection, name: str) -> object:
    return connection.exec_driver_sql(f"SHOW {name}").scalar()


def test_every_connection_is_durable_and_has_deadlines(ledger: Ledger) -> None:
    for engine, isolation in (
        (ledger._engine, "repeatable read"),
        (ledger._writer._engine, "read committed"),
    ):
        with engine.begin() as connection:
            assert setting(connection, "synchronous_commit") == "on"
            assert setting(connection, "search_path") == "insitu_ledger"
            assert setting(connection, "lock_timeout") == "30s"
            assert setting(connection, "statement_timeout") == "1min"
            assert setting(connection, "idle_in_transaction_session_timeout") == "1min"
            assert setting(connection, "transaction_isolation") == isolation


def test_a_weaker_setting_of_the_url_does_not_count(postgres_url: str) -> None:
    with Ledger(f"{postgres_url}&options=-c%20synchronous_commit%3Doff&connect_timeout=3") as ledger:
        with ledger._engine.begin() as connection:
            assert setting(connection, "synchronous_commit") == "on"


def test_ledger_and_records_share_a_database(ledger: Ledger, postgres_url: str) -> None:
    """Both have a table `rollouts`."""
    store = RecordStore(postgres_url)
    store.append([], ["rollout"])
    assert store.was_counted("rollout")
    store.close()
    with ledger._engine.begin() as connection:
        assert connection.execute(sa.select(schema.rollouts)).all() == []


def test_writers_of_several_processes_follow_one_another(ledger: Ledger, other: Ledger, make_group) -> None:
    """The second waits until the first has committed, so events are numbered in the order of commits."""
    ledger.register_run("project", "another", "model", LoraSettings(), {}, {})
    for name, run in (("a", "run"), ("b", "another")):
        ledger.put_group(make_group(name, run), "h")
    written, gate = threading.Event(), threading.Event()

    def create_slowly(connection: sa.Connection) -> str:
        job = jobs.create(connection, "run", "first", ["a"], StepSettings(), "h")
        written.set()
        assert gate.wait(30)
        return job.id

    first = ledger._writer.submit(create_slowly)
    assert written.wait(30)
    second = other._writer.submit(
        lambda connection: jobs.create(connection, "another", "second", ["b"], StepSettings(), "h").id
    )
    with pytest.raises(TimeoutError):
        second.result(0.5)
    assert other.next_jobs() == []  # readers do not wait
    gate.set()
    ids = [first.result(30), second.result(30)]
    (a,), (b,) = (ledger.events_since(job_id, 0) for job_id in ids)
    assert a.seq < b.seq
    assert [job.id for job in other.next_jobs()] == ids


def test_a_reader_sees_one_state_throughout(ledger: Ledger, other: Ledger) -> None:
    query = sa.select(sa.func.count()).select_from(schema.runs)
    with ledger._engine.begin() as connection:
        assert connection.execute(query).scalar() == 1
        other.register_run("project", "another", "model", LoraSettings(), {}, {})
        assert connection.execute(query).scalar() == 1
    assert len(ledger.list_runs()) == 2


def test_a_lock_that_is_never_released_has_a_deadline(ledger: Ledger, postgres_url: str) -> None:
    engine = schema.open_engine(postgres_url, busy_seconds=0.3)
    writer = GroupCommitWriter(engine)
    with database.writing(ledger._engine).begin():
        with pytest.raises(DeadlineExceeded):
            ledger.check_writable(0.1)
        with pytest.raises(Unavailable, match=r"lock timeout(.|\n)*PostgreSQL server"):
            writer.run(lambda _connection: None)
    writer.run(lambda _connection: None)
    writer.close()
    engine.dispose()


def test_a_connection_lost_in_the_middle_of_a_write_is_told(
    ledger: Ledger, other: Ledger, make_group
) -> None:
    """As if the server had been restarted: nothing of the batch is there, and the next write succeeds."""
    group = make_group("g")

    def lose(connection: sa.Connection) -> None:
        groups.put(connection, group, "h", groups.pack(group))
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        with other._engine.begin() as killer:
            killer.exec_driver_sql(f"SELECT pg_terminate_backend({pid}, 5000)")

    with pytest.raises(Unavailable, match="the ledger cannot write"):
        ledger._writer.run(lose)
    with pytest.raises(NotFound):
        ledger.group_record("run", "g")
    assert ledger.put_group(group, "h") is True


def test_idle_connections_that_were_lost_are_replaced(ledger: Ledger, other: Ledger) -> None:
    ledger.ping()
    with other._engine.begin() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    ledger.ping()
    ledger.check_writable(30)


def test_a_value_that_postgresql_does_not_take_spoils_no_neighbour(ledger: Ledger, make_group) -> None:
    with pytest.raises(InvalidRequest, match="NUL"):
        ledger.get_run("a\0b")
    gate = threading.Event()
    blocked = ledger._writer.submit(lambda _connection: gate.wait(30))
    group, bad = make_group("g"), make_group("a\0b")
    good = ledger._writer.submit(lambda c: groups.put(c, group, "h", groups.pack(group)))
    wrong = ledger._writer.submit(lambda c: groups.put(c, bad, "h", groups.pack(bad)))
    gate.set()
    with pytest.raises(InvalidRequest, match="NUL"):
        wrong.result(30)
    assert blocked.result(30)
    assert good.result(30)


def test_who_asks_for_health_learns_no_address(ledger: Ledger, postgres: Cluster) -> None:
    """`/health` and `/ready` need no key."""
    postgres.kill()
    try:
        for call in (ledger.ping, lambda: ledger.check_writable(30)):
            with pytest.raises(Unavailable) as raised:
                call()
            assert raised.value.message.endswith(": the PostgreSQL server does not answer")
    finally:
        postgres.start()
    ledger.ping()


@pytest.mark.parametrize("store", [Ledger, RecordStore])
def test_a_server_that_is_not_there_is_told_without_the_password(store: type) -> None:
    url = "postgresql+psycopg://me:geheim@127.0.0.1:1/insitu?connect_timeout=2"
    with pytest.raises(Unavailable, match=r"me:\*\*\*@127.0.0.1:1/insitu(.|\n)*psql") as raised:
        store(url)
    assert "geheim" not in "".join(traceback.format_exception(raised.value))


def test_a_user_without_the_right_to_create_is_told(postgres: Cluster) -> None:
    """Schemas that an administrator has created suffice."""
    with postgres.database(tables=False) as url:
        name = sa.make_url(url).database
        postgres.execute("DROP ROLE IF EXISTS visitor")
        postgres.execute("CREATE ROLE visitor LOGIN")
        theirs = url.replace("insitu@", "visitor@")
        with pytest.raises(Unavailable, match="permission denied for database"):
            Ledger(theirs)
        postgres.execute("CREATE SCHEMA insitu_ledger AUTHORIZATION visitor", name)
        with Ledger(theirs) as ledger:
            assert ledger.list_runs() == []


def test_the_write_locks_of_the_stores_differ() -> None:
    keys = {write_lock(name) for name in ("insitu_ledger", "insitu_records")}
    assert len(keys) == 2
    assert all(0 < key < 2**63 for key in keys)


def test_a_job_that_ran_when_the_process_died_is_queued_again(
    ledger: Ledger, postgres_url: str, make_group
) -> None:
    ledger.put_group(make_group("g"), "h")
    job = ledger.create_job("run", "k", ["g"], StepSettings(), "h")
    ledger.transition_job(job.id, JobState.RUNNING)
    with Ledger(postgres_url) as next_process:
        assert next_process.requeue_running() == [job.id]
