"""What runs start from: their source is kept until it is copied, and their step 0 as long as they are."""

from __future__ import annotations

import pytest

from insitu.backend.ledger import Ledger, Run
from insitu.backend.ledger.rows import Origin
from insitu.errors import CannotHonour, Conflict, NotFound
from insitu.types import JobState, LoraSettings, RunState, StepSettings

UPLOAD = "sha256:" + "a" * 64


@pytest.fixture
def trained(ledger: Ledger, make_group) -> Ledger:
    """A run with three steps, of which the first is not kept."""
    for step in (1, 2, 3):
        commit(ledger, make_group, "run", step)
    ledger.forget_checkpoint("run", 1)
    return ledger


def commit(ledger: Ledger, make_group, run: str, step: int) -> None:
    ledger.put_group(make_group(f"{run}-g{step}", run), "hash")
    job = ledger.create_job(run, f"key-{step}", [f"{run}-g{step}"], StepSettings(), "request")
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.commit_step(job.id, step, {}, f"runs/{run}/checkpoints/{step:06d}", f"sha-{step}")


def start(
    ledger: Ledger,
    init: str | None = None,
    fork: str | None = None,
    lora: LoraSettings | None = None,
    uploaded: LoraSettings | None = None,
    model: str = "model",
) -> Run:
    origin = Origin(init, fork, uploaded) if init or fork else None
    return ledger.register_run("project", "new", model, lora, {}, {}, origin)


def test_a_run_starts_from_a_kept_step(trained: Ledger):
    run = start(trained, "run@2")
    assert (run.init_from, run.fork_from, run.source, run.step) == ("run@2", None, "run@2", 0)
    assert trained.list_runs() == [trained.get_run("run"), run]
    assert trained.get_run("run").source is None


def test_a_run_alone_is_its_newest_step_at_the_first_registration(trained: Ledger, make_group):
    assert start(trained, fork="run").source == "run@3"
    commit(trained, make_group, "run", 4)
    assert start(trained, fork="run").source == "run@3"


@pytest.mark.parametrize(
    ("init", "error", "said"),
    [
        ("run@1", NotFound, "step 1 of run 'run' is not kept; kept are 2, 3"),
        ("run@9", NotFound, "step 9"),
        ("run@0", CannotHonour, "is the base model itself"),
        ("nope@1", NotFound, "no run 'nope'"),
        ("new@1", NotFound, "no run 'new'"),
        (UPLOAD, NotFound, "no adapter sha256:aaaa"),
    ],
)
def test_what_is_not_there_is_refused_and_leaves_no_run(trained: Ledger, init, error, said):
    with pytest.raises(error, match=said):
        start(trained, init)
    with pytest.raises(NotFound):
        trained.get_run("new")


def test_another_base_model_is_refused(trained: Ledger):
    with pytest.raises(CannotHonour, match="is on model, not on other") as refused:
        start(trained, "run@2", model="other")
    assert "base_model model" in refused.value.hint


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (LoraSettings(rank=4), "lora.rank is 8 there, asked 4"),
        (LoraSettings(alpha=32), "lora.alpha is 16 there, asked 32"),
    ],
)
def test_other_lora_settings_are_refused_by_name(trained: Ledger, asked, said):
    with pytest.raises(CannotHonour, match=said):
        start(trained, "run@2", lora=asked)


def test_the_seed_belongs_to_the_run_but_not_to_a_fork(trained: Ledger):
    with pytest.raises(CannotHonour, match=r"lora\.seed is 0 there, asked 5"):
        start(trained, fork="run@2", lora=LoraSettings(seed=5))
    assert start(trained, "run@2", lora=LoraSettings(seed=5)).lora.seed == 5


def test_settings_come_from_the_source_where_none_are_given(ledger: Ledger):
    uploaded = LoraSettings(4, 8, target_modules=["q_proj"])
    assert start(ledger, UPLOAD, uploaded=uploaded).lora == uploaded
    origin, other = Origin(UPLOAD, None, uploaded), LoraSettings(4, 8, 0, ["k_proj"])
    with pytest.raises(CannotHonour, match=r"target_modules is \['q_proj'\] there, asked \['k_proj'\]"):
        ledger.register_run("p", "more", "model", other, {}, {}, origin)
    assert ledger.awaited_sources() == {UPLOAD}


def test_the_same_again_is_harmless_and_another_start_a_conflict(trained: Ledger):
    first = start(trained, "run@2")
    assert start(trained, "run@2") == first
    assert start(trained, "run@2", lora=LoraSettings()) == first
    for other in ({"init": "run@3"}, {"fork": "run@2"}, {}):
        with pytest.raises(Conflict, match="init_from is 'run@2', asked"):
            start(trained, **other)


def test_the_source_is_kept_until_it_is_copied(trained: Ledger, make_group):
    start(trained, "run@2")
    for step in (4, 5, 6):
        commit(trained, make_group, "run", step)
    assert trained.prune_checkpoints("run", 2) == [3, 4]
    with pytest.raises(Conflict, match="another run starts from it"):
        trained.forget_checkpoint("run", 2)
    trained.commit_start("new", "runs/new/checkpoints/000000", "sha-0")
    assert trained.prune_checkpoints("run", 2) == [2]


def test_a_failed_run_does_not_hold_its_source_and_says_so_when_it_is_gone(trained: Ledger, make_group):
    start(trained, "run@2")
    trained.transition_run("new", RunState.FAILED, "why")
    for step in (4, 5):
        commit(trained, make_group, "run", step)
    assert 2 in trained.prune_checkpoints("run", 2)
    with pytest.raises(NotFound, match="step 2 of run 'run' is not kept"):
        start(trained, "run@2")


def test_step_0_is_a_checkpoint_that_stays(trained: Ledger, make_group):
    start(trained, "run@2")
    assert trained.checkpoints("new") == []
    trained.commit_start("new", "runs/new/checkpoints/000000", "sha-0")
    for state in (RunState.LOADING, RunState.READY):
        trained.transition_run("new", state)
    with pytest.raises(Conflict, match="step 0 already"):
        trained.commit_start("new", "elsewhere", "sha-other")
    for step in (1, 2, 3, 4):
        commit(trained, make_group, "new", step)
    assert trained.prune_checkpoints("new", 2) == [1, 2]
    (first, *_) = kept = trained.checkpoints("new")
    assert [checkpoint.step for checkpoint in kept] == [0, 3, 4]
    assert (first.path, first.manifest_sha256, first.pinned) == ("runs/new/checkpoints/000000", "sha-0", True)
    assert trained.pin_checkpoint("new", 0) == first
    for change in (trained.forget_checkpoint, trained.unpin_checkpoint):
        with pytest.raises(Conflict, match="where the run starts: it is always kept"):
            change("new", 0)
    assert trained.take_lease("new", "lease", 0, 9).model == "new@0"
    # Its start is a source like any other step.
    further = trained.register_run("p", "further", "model", None, {}, {}, Origin("new@0", None))
    assert further.source == "new@0"
    with pytest.raises(Conflict, match="starts from the base model"):
        trained.commit_start("run", "p", "sha")


def test_a_started_run_opens_again_without_its_source(trained: Ledger, make_group):
    start(trained, "run@2")
    trained.commit_start("new", "path", "sha-0")
    trained.transition_run("new", RunState.CLOSED)
    for step in (4, 5):
        commit(trained, make_group, "run", step)
    trained.prune_checkpoints("run", 2)
    assert start(trained, "run@2").state is RunState.REGISTERED


def test_a_ledger_older_than_origins_gets_them(database_url: str, trained: Ledger):
    with trained._engine.execution_options(insitu_write=True).begin() as connection:
        connection.exec_driver_sql("DROP TABLE origins")
        connection.exec_driver_sql("DROP TABLE alembic_version")
    trained.close()
    with Ledger(database_url) as reopened:
        assert [run.source for run in reopened.list_runs()] == [None]
        assert start(reopened, "run@3").source == "run@3"
