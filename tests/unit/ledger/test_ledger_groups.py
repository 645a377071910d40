from __future__ import annotations

import zlib
from dataclasses import asdict

import orjson
import pytest

from insitu.backend.ledger import Ledger, groups
from insitu.errors import Conflict, NotFound
from insitu.types import Ending, GroupState, RunState, Trajectory, TrajectoryGroup


def test_a_group_comes_back_as_it_was(ledger: Ledger):
    group = TrajectoryGroup(
        "g",
        "run",
        [
            Trajectory("a", ["c1", "c2"], 0.5, Ending.LENGTH, {"task": {"id": 3, "text": "é\u2028"}}),
            Trajectory("b", ["c3"], -1e-9, step_rewards=[0.25]),
        ],
    )
    assert ledger.put_group(group, "hash") is True
    assert ledger.group_record("run", "g").group == group
    record = ledger.group_record("run", "g")
    assert (record.state, record.job_id, record.step) == (GroupState.RECEIVED, None, None)


def test_a_group_of_a_release_without_step_rewards_is_read_without_them(ledger: Ledger, make_group):
    group = make_group("g")
    fields = [asdict(trajectory) for trajectory in group.trajectories]
    for each in fields:
        del each["step_rewards"]
    packed = zlib.compress(orjson.dumps(fields))
    ledger._writer.submit(lambda c: groups.put(c, group, "hash", packed)).result(30)
    assert ledger.group_record("run", "g").group == group
    assert [t.step_rewards for t in ledger.group_record("run", "g").group.trajectories] == [None, None]


def test_the_same_body_again_is_no_news_and_another_is_a_conflict(ledger: Ledger, make_group):
    assert ledger.put_group(make_group("g"), "hash") is True
    assert ledger.put_group(make_group("g"), "hash") is False
    with pytest.raises(Conflict, match="a different body"):
        ledger.put_group(make_group("g"), "other")


def test_a_rollout_is_in_one_group_only(ledger: Ledger, make_group):
    ledger.put_group(make_group("g"), "hash")
    stolen = TrajectoryGroup("g2", "run", [Trajectory("new", ["c"], 1.0), make_group("g").trajectories[1]])
    with pytest.raises(Conflict, match="rollout 'g-1' of run 'run' is already in group 'g'"):
        ledger.put_group(stolen, "hash")
    with pytest.raises(NotFound):
        ledger.group_record("run", "g2")
    double = TrajectoryGroup("g3", "run", [Trajectory("x", ["c"], 1.0)] * 2)
    with pytest.raises(Conflict, match="twice: x"):
        ledger.put_group(double, "hash")


def test_rollouts_of_different_runs_do_not_meet(ledger: Ledger, make_group):
    run = ledger.get_run("run")
    ledger.register_run("project", "run2", "model", run.lora, {}, {})
    assert ledger.put_group(make_group("g"), "hash")
    assert ledger.put_group(make_group("g", "run2"), "other hash")


def test_a_closed_run_takes_no_groups_but_knows_the_old_ones(ledger: Ledger, make_group):
    ledger.put_group(make_group("g"), "hash")
    ledger.transition_run("run", RunState.CLOSED)
    assert ledger.put_group(make_group("g"), "hash") is False
    with pytest.raises(Conflict, match="closed"):
        ledger.put_group(make_group("g2"), "hash")
