"""The typed events of a run, read from its journal: also from one of an earlier or a newer release."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.files.journal import Journal
from insitu.harness.files.json_lines import DamagedFile
from insitu.harness.interfaces import events
from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.interfaces.training_job import TrainingJobRef
from insitu.harness.loop.account import Account
from insitu.harness.loop.state import fold

OFF = CurriculumConfig()
CURRICULUM = '{"current_percentile":1.0,"last_expansion_epoch":-1,"total_groups":2,"included_groups":2}'
COLLECTED = (
    '"epoch":0,"timestamp":"2026-11-15T21:17:04.099831+00:00","run_id":"run_8699c163"'
    ',"avg_reward":0.59,"min_reward":0.53,"max_reward":0.62,"num_trajectories":4,"num_groups":2'
    ',"filtered_avg_reward":0.59,"filtered_min_reward":0.53,"filtered_max_reward":0.62'
    ',"filtered_num_trajectories":4,"filtered_num_groups":2,"curriculum_percentile":1.0'
    f',"curriculum_state":{CURRICULUM}'
)
ACCOUNT = (
    '{"total":4,"trained":4,"truncated":0,"dropped":{},"endings":{}'
    ',"calls":{"seen":4,"uncounted":0,"trained":4,"context_only":{},"dropped":{}},"calls_confirmed":null'
    ',"line":"trained 4/4; calls 4 seen = 4 trained"}'
)
FIGURES = '{"account/calls":4.0,"account/calls_trained":4.0,"loss/total":1.0,"mismatch/kl":null}'
VALIDATION = (
    '"run_id":"run_8699c163","timestamp":"2026-11-15T21:17:02.463452+00:00","avg_reward":0.5,"min_reward":0.5'
    ',"max_reward":0.5,"num_examples":1,"num_failed":0,"endings":{"completed":1}'
)
WRITTEN_BEFORE_EVENTS_HAD_TYPES = f"""\
{{"event":"registered","at":1794777422.400532,"name":"small","url":"http://127.0.0.1:7623"}}
{{"event":"validated","at":1794777422.4635644,"entry":{{"epoch":0,"step":0,{VALIDATION}}}}}
{{"event":"submitted","at":1794777423.1,"epoch":0,"ref":{{"run_id":"run_8699c163","backend":"insitu","metadata":\
{{"job_id":"job-1","epoch":0}}}},"line":{{{COLLECTED},"account":{ACCOUNT},"step":null}},"curriculum":{CURRICULUM}}}
{{"event":"failed","at":1794777423.5,"epoch":0,"message":"out of memory"}}
{{"event":"submitted","at":1794777424.1258898,"epoch":0,"ref":{{"run_id":"run_8699c163","backend":"insitu","metadata":\
{{"job_id":"job-2","epoch":0}}}},"line":{{{COLLECTED},"account":{ACCOUNT},"step":null}},"curriculum":{CURRICULUM}}}
{{"event":"epoch","at":1794777424.6388502,"epoch":0,"line":{{{COLLECTED},"account":{ACCOUNT},"step":1,"training":\
{FIGURES}}},"curriculum":{CURRICULUM}}}
{{"event":"validated","at":1794777424.9782183,"entry":{{"epoch":1,"step":1,{VALIDATION}}}}}
{{"event":"best","at":1794777425.0365105,"step":1,"reward":0.5,"path":"/state/runs/small/checkpoints/000001"}}
{{"event":"ended","at":1794777425.490697,"outcome":"succeeded","num_epochs":1}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def read(path: Path) -> list[events.Event]:
    with Journal(path) as journal:
        return events.read(journal)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_journal_written_before_events_had_types_opens(path: Path) -> None:
    path.write_text(WRITTEN_BEFORE_EVENTS_HAD_TYPES)
    found = read(path)
    assert [event.kind for event in found] == [line["event"] for line in lines(path)]
    assert found[0] == events.Registered("small", "http://127.0.0.1:7623")
    state = fold(found, OFF)
    assert (state.next_epoch, state.step, state.submitted, state.failures) == (1, 1, None, {0: 1})
    assert state.best == events.Best(1, 0.5, "/state/runs/small/checkpoints/000001")
    assert state.curriculum == CurriculumState(1.0, -1, 2, 2)
    assert [state.validated_at(epoch) for epoch in (0, 1, 2)] == [True, True, False]
    assert state.epochs[0].get("training") == json.loads(FIGURES)


def test_an_epoch_of_an_earlier_release_counts_as_one_step(path: Path) -> None:
    path.write_text(WRITTEN_BEFORE_EVENTS_HAD_TYPES)
    state = fold(read(path), OFF)
    assert [(line["epoch"], line["step"]) for line in state.steps] == [(0, 1)]
    assert (state.num_updates, state.open_steps) == (1, [])


def test_the_steps_of_an_open_epoch_are_found_again(path: Path) -> None:
    curriculum = CurriculumState(0.3, -1, 2, 2)
    with Journal(path) as journal:
        for number, step in enumerate([1, None, 2]):
            line: Any = {"epoch": 0, "step_of_epoch": number, "step": step}
            events.note(
                journal, events.StepEnded(0, {**line, "example_rewards": {"a": number / 2}}, curriculum)
            )
    state = fold(read(path), OFF)
    assert [line.get("step_of_epoch") for line in state.open_steps] == [0, 1, 2]
    assert (state.next_epoch, state.step, state.num_updates) == (0, 2, 2)
    assert state.example_rewards == {"a": 1.0}
    assert state.curriculum == curriculum


def test_a_step_in_progress_is_found_again(path: Path) -> None:
    submitted = WRITTEN_BEFORE_EVENTS_HAD_TYPES.splitlines(keepends=True)[:5]
    path.write_text("".join(submitted))
    state = fold(read(path), OFF)
    assert state.submitted is not None
    assert state.submitted.ref == TrainingJobRef("run_8699c163", "insitu", {"job_id": "job-2", "epoch": 0})
    account = Account.from_dict(state.submitted.line["account"])
    assert account.after_training({"account/calls": 4, "account/calls_trained": 4}).calls_confirmed
    assert (state.next_epoch, state.step, state.failures[0]) == (0, 0, 1)


def test_an_asynchronous_step_and_a_validation_in_progress_are_found_again(path: Path) -> None:
    line: Any = {"epoch": 0, "positions": [4, 2, 7], "step": None}
    admitted = events.Admitted(0, [4, 7], line, CurriculumState(1.0, -1, 2, 2))
    with Journal(path) as journal:
        events.note(journal, admitted)
        events.note(journal, events.Validating(0, 3, 0.5))
    state = fold(read(path), OFF)
    assert (state.admitted, state.validating) == (admitted, events.Validating(0, 3, 0.5))
    with Journal(path) as journal:
        entry: Any = {"epoch": 0, "step": 3, "avg_reward": 0.5}
        events.note(journal, events.Validated(entry))
        events.note(journal, events.StepEnded(0, {**line, "step": 1}, CurriculumState(1.0)))
    state = fold(read(path), OFF)
    assert (state.admitted, state.validating) == (None, None)


def test_events_are_written_as_before(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text(WRITTEN_BEFORE_EVENTS_HAD_TYPES)
    with Journal(new) as journal:
        for event in read(old):
            assert events.note(journal, event) == event
    assert [{**line, "at": 0} for line in lines(new)] == [{**line, "at": 0} for line in lines(old)]


def test_figures_that_are_no_numbers_are_null_at_once_and_not_only_after_a_resume(path: Path) -> None:
    with Journal(path) as journal:
        noted = events.note(journal, events.Best(3, math.nan, None))
        assert noted == events.Best(3, None, None)
        assert events.read(journal) == [noted]


def test_what_a_newer_release_adds_is_passed_over_and_kept(path: Path) -> None:
    newer = {"event": "best", "at": 1.0, "step": 2, "reward": 1, "path": None, "why": "largest reward"}
    state = json.loads(CURRICULUM) | {"stage": 4}
    ended = {"event": "epoch", "at": 2.0, "epoch": 0, "line": {"epoch": 0, "new": 1}, "curriculum": state}
    written = [newer, {"event": "paused", "at": 1.5}, {"at": 1.7}, ended]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in written))
    found = read(path)
    assert [event.kind for event in found] == ["best", "epoch"]
    assert fold(found, OFF).epochs == [{"epoch": 0, "new": 1}]
    assert lines(path) == written


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"event":"best","step":1,"reward":0.5}', "'path'"),
        ('{"event":"best","step":"1","reward":0.5,"path":null}', "step is '1', not a whole number"),
        ('{"event":"best","step":1,"reward":"much","path":null}', "reward is 'much', not a number"),
        ('{"event":"registered","name":1,"url":""}', "name is 1, not a string"),
        ('{"event":"validated","entry":{"epoch":1}}', "entry.step"),
        ('{"event":"epoch","epoch":0,"line":[],"curriculum":{}}', "line is not a JSON object"),
        ('{"event":"epoch","epoch":0,"line":{"epoch":0},"curriculum":{"current_percentile":null}}', "null"),
    ],
)
def test_an_event_that_cannot_be_read_is_reported_with_its_file(path: Path, line: str, reason: str) -> None:
    path.write_text(f"{line}\n")
    with Journal(path) as journal, pytest.raises(DamagedFile, match=reason) as caught:
        events.read(journal)
    assert str(path) in str(caught.value)
    assert "restore the file" in caught.value.hint
