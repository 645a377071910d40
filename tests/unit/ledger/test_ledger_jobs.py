from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from insitu.backend.ledger import Ledger
from insitu.errors import Cancelled, Conflict, InvalidRequest, NotFound
from insitu.types import GroupState, JobState, LoraSettings, RunState, StepSettings

SETTINGS = StepSettings(learning_rate=1e-3)


@pytest.fixture
def job(ledger: Ledger, make_group):
    for name in ("a", "b", "c"):
        ledger.put_group(make_group(name), "hash")
    return ledger.create_job("run", "key", ["b", "a"], SETTINGS, "request")


def state_of(ledger: Ledger, group_id: str) -> GroupState:
    return ledger.group_record("run", group_id).state


def test_a_job_claims_its_groups_in_its_order(ledger: Ledger, job):
    assert (job.state, job.settings, job.group_ids) == (JobState.QUEUED, SETTINGS, ["b", "a"])
    assert [group.id for group in ledger.groups_of_job(job.id)] == ["b", "a"]
    assert [state_of(ledger, g) for g in "abc"] == ["claimed", "claimed", "received"]


def test_the_same_request_gives_the_same_job(ledger: Ledger, job):
    assert ledger.create_job("run", "key", ["b", "a"], SETTINGS, "request") == job
    with pytest.raises(Conflict, match=job.id):
        ledger.create_job("run", "key", ["c"], SETTINGS, "another request")


def test_fifty_concurrent_duplicates_make_one_job(ledger: Ledger, make_group):
    ledger.put_group(make_group("g"), "hash")
    with ThreadPoolExecutor(50) as pool:
        made = list(pool.map(lambda _: ledger.create_job("run", "k", ["g"], SETTINGS, "h").id, range(50)))
    assert len(set(made)) == 1
    assert len(ledger.events_since(made[0], 0)) == 1


class CountedId(str):
    """A group's id that counts how often it is compared."""

    __slots__ = ()
    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedId.num_compared += 1
        return str.__eq__(self, other)


def test_groups_named_twice_are_found_without_comparing_all_with_all(ledger: Ledger):
    """The write lock is held meanwhile."""
    named = [CountedId(f"g{n // 2}") for n in range(1000)]
    with pytest.raises(InvalidRequest, match="named twice"):
        ledger.create_job("run", "k", named, SETTINGS, "h")
    assert CountedId.num_compared < 20 * len(named)


def test_fifty_rivals_for_one_group_make_one_job(ledger: Ledger, make_group):
    ledger.put_group(make_group("g"), "hash")

    def rival(n: int) -> str | None:
        try:
            return ledger.create_job("run", f"key-{n}", ["g"], SETTINGS, "h").id
        except Conflict:
            return None

    with ThreadPoolExecutor(50) as pool:
        winners = [made for made in pool.map(rival, range(50)) if made]
    assert len(winners) == 1
    assert ledger.group_record("run", "g").job_id == winners[0]


def test_groups_that_cannot_be_had_are_named_and_none_is_claimed(ledger: Ledger, job):
    with pytest.raises(Conflict, match=f"group 'a' of run 'run' \\(job {job.id}\\) is claimed"):
        ledger.create_job("run", "k2", ["c", "a"], SETTINGS, "h")
    with pytest.raises(NotFound, match="x, y"):
        ledger.create_job("run", "k2", ["c", "x", "y"], SETTINGS, "h")
    with pytest.raises(InvalidRequest, match="twice: c"):
        ledger.create_job("run", "k2", ["c", "c"], SETTINGS, "h")
    with pytest.raises(InvalidRequest, match="at least one"):
        ledger.create_job("run", "k2", [], SETTINGS, "h")
    assert state_of(ledger, "c") is GroupState.RECEIVED


@pytest.mark.timeout(10)
def test_a_group_named_very_often_is_rejected_at_once(ledger: Ledger, job):
    with pytest.raises(InvalidRequest, match="twice: c"):
        ledger.create_job("run", "k2", ["c"] * 20_000, SETTINGS, "h")


def test_a_failed_or_closed_run_takes_no_jobs(ledger: Ledger, make_group):
    ledger.put_group(make_group("g"), "hash")
    ledger.transition_run("run", RunState.FAILED, "out of memory")
    with pytest.raises(Conflict, match="out of memory"):
        ledger.create_job("run", "k", ["g"], SETTINGS, "h")


def test_the_oldest_job_of_each_run_waits_for_its_turn(ledger: Ledger, make_group, job):
    ledger.register_run("project", "other", "model", LoraSettings(), {}, {})
    ledger.put_group(make_group("g", "other"), "hash")
    second = ledger.create_job("other", "key", ["g"], SETTINGS, "request")
    ledger.put_group(make_group("later"), "hash")
    later = ledger.create_job("run", "later", ["later"], SETTINGS, "request")
    assert ledger.next_jobs() == [job, second]
    assert ledger.next_jobs(["other"]) == [second]
    assert ledger.next_jobs([]) == []
    ledger.transition_job(job.id, JobState.RUNNING)
    assert ledger.next_jobs() == [second, later]


def test_a_failed_job_releases_its_groups(ledger: Ledger, job):
    ledger.transition_job(job.id, JobState.RUNNING)
    failed = ledger.fail_job(job.id, "probe failed")
    assert (failed.state, failed.error) == (JobState.FAILED, "probe failed")
    assert state_of(ledger, "a") is GroupState.RECEIVED
    assert ledger.create_job("run", "k2", ["a", "b"], SETTINGS, "h").state is JobState.QUEUED
    assert [group.id for group in ledger.groups_of_job(job.id)] == ["b", "a"]
    assert ledger.events_since(job.id, 0)[-1].data == {"error": "probe failed"}


def test_a_running_job_is_cancelled_at_its_next_safe_point(ledger: Ledger, job):
    ledger.transition_job(job.id, JobState.RUNNING)
    asked = ledger.cancel_job(job.id)
    assert (asked.state, asked.phase) == (JobState.RUNNING, "cancelling")
    assert ledger.cancel_job(job.id) == asked, "repeating it is harmless"
    assert ledger.is_cancelled(job.id)
    with pytest.raises(Cancelled):
        ledger.set_progress(job.id, "train", 0.5, {})
    with pytest.raises(Cancelled):
        ledger.commit_step(job.id, 1, {}, "path", "sha")
    assert ledger.get_run("run").step == 0
    ended = ledger.transition_job(job.id, JobState.CANCELLED)
    assert ended.state is JobState.CANCELLED
    assert not ledger.is_cancelled(job.id)
    assert ledger.group_record("run", job.group_ids[0]).state is GroupState.RECEIVED
    again = ledger.create_job("run", "again", job.group_ids, StepSettings(), "again")
    ledger.transition_job(again.id, JobState.RUNNING)
    assert ledger.commit_step(again.id, 1, {}, "path", "sha").step == 1
    with pytest.raises(Conflict, match="succeeded and cannot become cancelled"):
        ledger.cancel_job(again.id)


def test_a_job_that_was_to_end_does_not_run_again_after_a_restart(ledger: Ledger, job):
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.cancel_job(job.id)
    assert ledger.requeue_running() == []
    assert ledger.get_job(job.id).state is JobState.CANCELLED


def test_success_is_by_commit_only(ledger: Ledger, job):
    ledger.transition_job(job.id, JobState.RUNNING)
    with pytest.raises(Conflict, match="only when its step is committed"):
        ledger.transition_job(job.id, JobState.SUCCEEDED)


def test_running_jobs_are_queued_again_on_start(ledger: Ledger, job):
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.set_progress(job.id, "train", 0.5, {"tokens": 3})
    assert ledger.requeue_running() == [job.id]
    assert ledger.requeue_running() == []
    (again,) = ledger.next_jobs()
    assert (again.id, again.attempt, again.progress, again.phase) == (job.id, 1, 0.0, "")
    assert state_of(ledger, "a") is GroupState.CLAIMED
    assert ledger.transition_job(job.id, JobState.RUNNING).attempt == 2


def test_progress_is_an_event_of_a_running_job(ledger: Ledger, job):
    with pytest.raises(Conflict, match="only a running job"):
        ledger.set_progress(job.id, "train", 0.5, {})
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.set_progress(job.id, "train", 0.25, {"tokens": 3})
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidRequest):
            ledger.set_progress(job.id, "train", wrong, {})
    events = ledger.events_since(job.id, 0)
    assert [event.kind for event in events] == ["queued", "running", "progress"]
    assert events[-1].data == {"tokens": 3, "phase": "train", "progress": 0.25}
    assert ledger.events_since(job.id, events[1].seq) == events[2:]
    assert (ledger.get_job(job.id).phase, ledger.get_job(job.id).progress) == ("train", 0.25)
