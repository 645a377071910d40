"""The ledger against a model in plain Python: any order of operations, with restarts in between."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from insitu.backend.ledger import Ledger, ledger_url
from insitu.errors import Conflict, NotFound
from insitu.types import JobState, LoraSettings, StepSettings, Trajectory, TrajectoryGroup
from tests.support.postgres import Cluster

GROUPS = st.sampled_from([f"g{n}" for n in range(6)])
KEYS = st.sampled_from([f"k{n}" for n in range(5)])
TERMINAL = ("succeeded", "failed", "cancelled")


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.url = self.new_database()
        self.ledger = Ledger(self.url)
        self.ledger.register_run("p", "run", "m", LoraSettings(), {}, {})
        self.groups: dict[str, str] = {}  # id → hash
        self.owner: dict[str, str] = {}  # claimed or consumed group → job
        self.jobs: dict[str, dict] = {}  # id → key, groups, state
        self.keys: dict[str, str] = {}  # key → job
        self.steps: list[str] = []  # job of each step
        self.asked: set[str] = set()  # running jobs that are to end

    def new_database(self) -> str:
        self.left = ExitStack()
        return ledger_url(Path(self.left.enter_context(tempfile.TemporaryDirectory())))

    def teardown(self) -> None:
        self.ledger.close()
        self.left.close()

    def in_state(self, *states: str) -> list[str]:
        return [job for job, fields in self.jobs.items() if fields["state"] in states]

    @rule(group=GROUPS, body=st.sampled_from(["h1", "h2"]))
    def put(self, group: str, body: str) -> None:
        value = TrajectoryGroup(group, "run", [Trajectory(f"{group}-r", ["c"], 1.0)])
        if self.groups.get(group, body) != body:
            with pytest.raises(Conflict):
                self.ledger.put_group(value, body)
        else:
            assert self.ledger.put_group(value, body) is (group not in self.groups)
            self.groups[group] = body

    @rule(key=KEYS, groups=st.lists(GROUPS, min_size=1, max_size=3, unique=True))
    def submit(self, key: str, groups: list[str]) -> None:
        def call():
            return self.ledger.create_job("run", key, groups, StepSettings(), ",".join(groups))

        if key in self.keys:
            job = self.keys[key]
            if self.jobs[job]["groups"] == groups:
                assert call().id == job
            else:
                with pytest.raises(Conflict):
                    call()
        elif any(group not in self.groups for group in groups):
            with pytest.raises(NotFound):
                call()
        elif any(group in self.owner for group in groups):
            with pytest.raises(Conflict):
                call()
        else:
            job = call().id
            self.keys[key] = job
            self.jobs[job] = {"groups": groups, "state": "queued", "attempt": 0}
            self.owner |= dict.fromkeys(groups, job)

    @rule()
    def start(self) -> None:
        jobs = self.ledger.next_jobs()
        assert [job.id for job in jobs] == self.in_state("queued")[:1]
        for job in jobs:
            self.ledger.transition_job(job.id, JobState.RUNNING)
            self.jobs[job.id]["state"] = "running"
            self.jobs[job.id]["attempt"] += 1

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), state=st.sampled_from(list(JobState)))
    def move(self, data: st.DataObject, state: JobState) -> None:
        job = data.draw(st.sampled_from(list(self.jobs)))
        fields = self.jobs[job]
        allowed = {
            "queued": ("running", "failed", "cancelled"),
            "running": ("queued", "failed", "cancelled"),
        }
        if state not in allowed.get(fields["state"], ()):
            with pytest.raises(Conflict):
                self.ledger.transition_job(job, state)
            return
        self.ledger.transition_job(job, state)
        if state == "queued" and job in self.asked:
            state = JobState.CANCELLED
        self.asked.discard(job)
        fields["state"] = state.value
        fields["attempt"] += state == "running"
        if state in ("failed", "cancelled"):
            self.release(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(list(self.jobs)))
        fields = self.jobs[job]
        if fields["state"] in ("succeeded", "failed"):
            with pytest.raises(Conflict):
                self.ledger.cancel_job(job)
            return
        self.ledger.cancel_job(job)
        if fields["state"] == "queued":
            fields["state"] = "cancelled"
            self.release(job)
        elif fields["state"] == "running":
            self.asked.add(job)

    def release(self, job: str) -> None:
        for group in self.jobs[job]["groups"]:
            del self.owner[group]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), ahead=st.sampled_from([1, 1, 1, 0, 2]))
    def commit(self, data: st.DataObject, ahead: int) -> None:
        job = data.draw(st.sampled_from(list(self.jobs)))
        step = len(self.steps) + ahead
        if self.jobs[job]["state"] == "running" and ahead == 1 and job not in self.asked:
            self.ledger.commit_step(job, step, {"n": step}, f"path-{step}", f"sha-{job}")
            self.jobs[job]["state"] = "succeeded"
            self.steps.append(job)
        elif self.steps and step == len(self.steps) and self.steps[-1] == job:
            assert self.ledger.commit_step(job, step, {}, "x", f"sha-{job}").step == step
        else:
            with pytest.raises(Conflict):
                self.ledger.commit_step(job, step, {}, f"path-{step}", f"sha-{job}")

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def fall_back(self, data: st.DataObject) -> None:
        """As when checkpoints are damaged: the steps after a whole one are trained again."""
        step = data.draw(st.integers(0, len(self.steps) - 1))
        self.ledger.fall_back("run", step, "damaged")
        for job in self.steps[step:]:
            self.jobs[job] |= {"state": "queued", "attempt": 0}
        del self.steps[step:]

    @rule()
    def restart(self) -> None:
        """As after kill -9 of the supervisor: what ran is queued again."""
        self.ledger.close()
        self.ledger = Ledger(self.url)
        running = self.in_state("running")
        assert self.ledger.requeue_running() == [job for job in running if job not in self.asked]
        for job in running:
            self.jobs[job]["state"] = "cancelled" if job in self.asked else "queued"
            if job in self.asked:
                self.release(job)
        self.asked.clear()

    @invariant()
    def ledger_equals_model(self) -> None:
        assert self.ledger.get_run("run").step == len(self.steps)
        assert [(s.step, s.job_id) for s in self.ledger.steps("run")] == list(enumerate(self.steps, 1))
        for group in self.groups:
            record = self.ledger.group_record("run", group)
            owner = self.owner.get(group)
            consumed = owner is not None and self.jobs[owner]["state"] == "succeeded"
            expected = "consumed" if consumed else "claimed" if owner else "received"
            assert (record.state, record.job_id) == (expected, owner)
            assert record.step == (self.steps.index(owner) + 1 if owner and consumed else None)
        for job, fields in self.jobs.items():
            found = self.ledger.get_job(job)
            assert (found.state, found.attempt) == (fields["state"], fields["attempt"])
            kinds = [event.kind for event in self.ledger.events_since(job, 0)]
            if "requeued" in kinds:
                kinds = kinds[len(kinds) - kinds[::-1].index("requeued") :]
            ends = [kind for kind in kinds if kind in TERMINAL]
            assert ends == ([fields["state"]] if fields["state"] in TERMINAL else [])


# More by hand: INSITU_EXAMPLES=300 makes more than 10,000 operations.
MACHINE = settings(
    max_examples=int(os.environ.get("INSITU_EXAMPLES", "8")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = MACHINE


def test_the_ledger_equals_the_model_on_postgresql(postgres: Cluster) -> None:
    class PostgresMachine(LedgerMachine):
        def new_database(self) -> str:
            self.left = ExitStack()
            return self.left.enter_context(postgres.database())

    run_state_machine_as_test(PostgresMachine, settings=settings(MACHINE, max_examples=2))
