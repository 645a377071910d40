"""Promotions: the last decision counts, a rollback returns to the one before, what is promoted is kept."""

from __future__ import annotations

import pytest

from insitu.backend.ledger import Ledger
from insitu.errors import Conflict, NotFound
from insitu.types import JobState, RunState, StepSettings


@pytest.fixture
def trained(ledger: Ledger, make_group) -> Ledger:
    """A ready run with five committed steps."""
    for state in (RunState.LOADING, RunState.READY):
        ledger.transition_run("run", state)
    for step in range(1, 6):
        train(ledger, make_group, step)
    return ledger


def train(ledger: Ledger, make_group, step: int, digest: str = "") -> None:
    ledger.put_group(make_group(f"g{step}"), "hash")
    job = ledger.create_job("run", f"key-{step}", [f"g{step}"], StepSettings(), "request")
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.commit_step(job.id, step, {}, f"runs/run/checkpoints/{step:06d}", digest or f"sha-{step}")


def roll_back(ledger: Ledger) -> int | None:
    return ledger.roll_back("run", ledger.current_promotions()["run"].id).step


def test_the_last_decision_counts_and_all_are_kept(trained: Ledger) -> None:
    assert trained.get_run("run").promoted is None
    for step in (3, 5, None):
        assert trained.promote("run", step).step == step
        assert trained.get_run("run").promoted == step
        assert [run.promoted for run in trained.list_runs()] == [step]
    assert [each.step for each in trained.promotions("run")] == [3, 5, None]
    assert [each.manifest_sha256 for each in trained.promotions("run")] == ["sha-3", "sha-5", None]


def test_the_same_decision_twice_is_one(trained: Ledger) -> None:
    first = trained.promote("run", 3)
    trained.explain_promotion(first, "")
    again = trained.promote("run", 3)
    assert (again.id, again.reason) == (first.id, "")
    assert len(trained.promotions("run")) == 1


def test_rollbacks_go_further_back_and_then_say_that_there_is_nothing(trained: Ledger) -> None:
    for step in (1, None, 4):
        trained.promote("run", step)
    assert [roll_back(trained), roll_back(trained)] == [None, 1]
    with pytest.raises(Conflict, match="nothing was promoted before run@1") as caught:
        roll_back(trained)
    assert caught.value.hint == "follow the newest step: insitu promote run --newest"
    trained.promote("run", 5)
    assert roll_back(trained) == 1, "the decision that counted before it"
    assert [each.step for each in trained.promotions("run")] == [1, None, 4, None, 1, 5, 1]


def test_a_repeated_rollback_is_one_and_an_outdated_one_is_rejected(trained: Ledger) -> None:
    first, second = trained.promote("run", 1), trained.promote("run", 2)
    done = trained.roll_back("run", second.id)
    assert (done.step, done.undoes) == (1, second.id)
    assert trained.roll_back("run", second.id) == done
    with pytest.raises(Conflict, match=f"promotion {first.id} of run 'run' is not the last one"):
        trained.roll_back("run", first.id)


def test_nothing_to_roll_back(trained: Ledger) -> None:
    with pytest.raises(Conflict, match="nothing is promoted of run 'run'") as caught:
        trained.roll_back("run", 1)
    assert caught.value.hint == "promote a step: insitu promote run@STEP"


def test_steps_that_are_not_kept_are_rejected(trained: Ledger) -> None:
    trained.prune_checkpoints("run", 2)
    with pytest.raises(NotFound, match="step 2 of run 'run' is not kept; kept are 0, 4, 5"):
        trained.promote("run", 2)
    with pytest.raises(NotFound, match="no run 'other'"):
        trained.promote("other", 1)
    assert trained.promote("run", 0).manifest_sha256 is None, "the base model"


def test_what_is_promoted_and_was_before_is_kept(trained: Ledger) -> None:
    for step in (1, 2, 3):
        trained.promote("run", step)
    assert [c.step for c in trained.checkpoints("run") if c.promoted] == [2, 3]
    assert trained.prune_checkpoints("run", 2) == [1]
    for step in (2, 3):
        with pytest.raises(Conflict, match=f"checkpoint {step} of run 'run' is promoted"):
            trained.forget_checkpoint("run", step)
    trained.promote("run", None)
    assert trained.prune_checkpoints("run", 2) == [2]
    assert roll_back(trained) == 3
    with pytest.raises(NotFound, match="step 2 of run 'run' is not kept"):
        roll_back(trained)


def test_a_step_that_was_trained_again_is_not_returned_to(trained: Ledger, make_group) -> None:
    """After its checkpoint was damaged, the number of a step may stand for other weights."""
    trained.promote("run", 5)
    trained.promote("run", 2)
    trained.fall_back("run", 4, "damaged")
    assert trained.get_run("run").promoted == 2
    with pytest.raises(NotFound, match="step 5 of run 'run' is not kept"):
        roll_back(trained)
    (job,) = trained.next_jobs()
    trained.transition_job(job.id, JobState.RUNNING)
    trained.commit_step(job.id, 5, {}, "runs/run/checkpoints/000005", "sha-other")
    with pytest.raises(Conflict, match="run@5 was trained again since it was promoted") as caught:
        roll_back(trained)
    assert caught.value.hint == "promote it as it is now: insitu promote run@5"
    assert trained.promote("run", 5).manifest_sha256 == "sha-other"


def test_a_promotion_outlives_closing_and_goes_with_the_run(trained: Ledger) -> None:
    trained.promote("run", 3)
    trained.transition_run("run", RunState.CLOSED)
    assert trained.get_run("run").promoted == 3
    trained.delete_run("run")
    assert trained.current_promotions() == {}
