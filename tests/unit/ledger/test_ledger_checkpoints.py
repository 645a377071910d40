"""Which checkpoints are kept: the newest always, pinned ones until they are unpinned."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from insitu.backend.ledger import Ledger, schema
from insitu.errors import Conflict, InvalidRequest, NotFound
from insitu.types import JobState, StepSettings


@pytest.fixture
def trained(ledger: Ledger, make_group) -> Ledger:
    """A run with six committed steps."""
    for step in range(1, 7):
        commit(ledger, make_group, step)
    return ledger


def commit(ledger: Ledger, make_group, step: int) -> None:
    ledger.put_group(make_group(f"g{step}"), "hash")
    job = ledger.create_job("run", f"key-{step}", [f"g{step}"], StepSettings(), "request")
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.commit_step(job.id, step, {}, f"runs/run/checkpoints/{step:06d}", f"sha-{step}")


def kept(ledger: Ledger) -> list[int]:
    return [checkpoint.step for checkpoint in ledger.checkpoints("run")]


def pinned(ledger: Ledger) -> list[int]:
    return [checkpoint.step for checkpoint in ledger.checkpoints("run") if checkpoint.pinned]


def test_pruning_keeps_the_newest_and_the_pinned(trained: Ledger, make_group):
    assert trained.pin_checkpoint("run", 2).pinned
    assert trained.prune_checkpoints("run", 3) == [1, 3]
    assert kept(trained) == [2, 4, 5, 6]
    assert trained.prune_checkpoints("run", 3) == []
    commit(trained, make_group, 7)
    assert trained.prune_checkpoints("run", 3) == [4]
    assert not trained.unpin_checkpoint("run", 2).pinned
    assert trained.prune_checkpoints("run", 3) == [2]
    assert kept(trained) == [5, 6, 7]
    assert len(trained.steps("run")) == 7  # what was trained stays known
    with pytest.raises(InvalidRequest, match="keep=1"):
        trained.prune_checkpoints("run", 1)


def test_pinning_twice_and_unpinning_twice_are_harmless(trained: Ledger):
    for _ in range(2):
        trained.pin_checkpoint("run", 6)
        assert pinned(trained) == [6]
    for _ in range(2):
        trained.unpin_checkpoint("run", 6)
        assert pinned(trained) == []


def test_one_checkpoint_is_forgotten(trained: Ledger):
    gone = trained.forget_checkpoint("run", 3)
    assert (gone.step, gone.manifest_sha256) == (3, "sha-3")
    assert kept(trained) == [1, 2, 4, 5, 6]
    for change in (trained.forget_checkpoint, trained.pin_checkpoint, trained.unpin_checkpoint):
        with pytest.raises(NotFound, match="no checkpoint of step 3"):
            change("run", 3)
        with pytest.raises(NotFound, match="no run 'nope'"):
            change("nope", 3)


def test_pinned_and_newest_checkpoints_are_not_forgotten(trained: Ledger):
    trained.pin_checkpoint("run", 1)
    with pytest.raises(Conflict, match="is pinned"):
        trained.forget_checkpoint("run", 1)
    for step in (5, 6):
        with pytest.raises(Conflict, match="among the newest 2"):
            trained.forget_checkpoint("run", step)
    assert kept(trained) == [1, 2, 3, 4, 5, 6]


def test_the_file_itself_holds_on_to_what_is_pinned(trained: Ledger):
    trained.pin_checkpoint("run", 1)
    future = trained._writer.submit(lambda c: c.execute(sa.delete(schema.checkpoints)))
    with pytest.raises(sa.exc.IntegrityError):
        future.result(30)


def test_a_ledger_older_than_pins_gets_them(database_url: str, trained: Ledger):
    with trained._engine.execution_options(insitu_write=True).begin() as connection:
        connection.exec_driver_sql("DROP TABLE pins")
        connection.exec_driver_sql("DROP TABLE alembic_version")
    trained.close()
    with Ledger(database_url) as reopened:
        assert pinned(reopened) == []
        reopened.pin_checkpoint("run", 1)
        assert pinned(reopened) == [1]
