"""The inputs of a run: which files and datasets they are, and what a change of them outdates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.cli.finetune import resume_arguments
from insitu.config.curriculum import CurriculumConfig
from insitu.config.load import load_config
from insitu.datasets.example import Example
from insitu.errors import Conflict
from insitu.harness.assembly import Assembly
from insitu.harness.files.ahead_stores import Slot
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.interfaces import events
from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run_input import Role, RunInput, dataset_input
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.harness.interfaces.training_job import TrainingJobRef
from insitu.harness.loop.input_changes import InputChanges
from insitu.harness.loop.state import LoopState, fold
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.run_inputs import run_inputs
from insitu.types import Ending
from tests.support.finetuning import Project

OFF = CurriculumConfig()
START = CurriculumState(1.0)
REWARD = RunInput(Role.REWARD, "my_reward", "my_reward.py", "0" * 64, 3)
TRAINING = RunInput(Role.TRAINING, "", "", "1" * 64, 8)
OTHER_REWARD = replace(REWARD, sha256="2" * 64, count=4)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.open(tmp_path / "run", {}) as directory:
        yield directory


def settle(run: RunDirectory, *inputs: RunInput, accept: bool = False) -> LoopState:
    InputChanges(run, OFF, inputs).settle(Progress(), "insitu finetune", accept=accept)
    return fold(events.read(run.journal), OFF)


def trained(run: RunDirectory, step: int) -> None:
    line: Any = {"epoch": step - 1, "step": step}
    events.note(run.journal, events.StepEnded(step - 1, line, START))
    events.note(run.journal, events.EpochEnded(step - 1, line, START))


def submitted(run: RunDirectory, epoch: int) -> None:
    line: Any = {"epoch": epoch}
    events.note(run.journal, events.Submitted(epoch, TrainingJobRef("run", "insitu", {}), line, START))


def rolled_out(run: RunDirectory, name: str) -> None:
    run.store(name).append(Rollout("r", "e", 0, Ending.COMPLETED, 1.0))


def test_a_journal_without_hashes_resumes_as_before(run: RunDirectory) -> None:
    trained(run, 1)
    settle(run, OTHER_REWARD, TRAINING)
    with pytest.raises(Conflict, match=r"reward, my_reward\.py: 3 lines, 4 before"):  # known from now on
        settle(run, REWARD, TRAINING)


def test_the_same_inputs_are_noted_once(run: RunDirectory) -> None:
    for _ in range(3):
        settle(run, REWARD, TRAINING)
    assert [record["event"] for record in run.journal.records()] == ["inputs"]
    settle(run, REWARD)
    settle(run, REWARD, TRAINING)  # an input that another release adds is no change
    assert all(record["changed"] == [] for record in run.journal.records())


def test_what_is_submitted_is_awaited_and_rolled_out_again_if_it_fails(run: RunDirectory) -> None:
    settle(run, REWARD, TRAINING)
    trained(run, 1)
    rolled_out(run, "epoch-0001")
    submitted(run, 1)
    state = settle(run, OTHER_REWARD, TRAINING, accept=True)
    assert state.submitted is not None
    assert state.outdated
    assert run.store_names() == ["epoch-0001"]
    events.note(run.journal, events.Failed(1, "out of memory"))
    state = settle(run, OTHER_REWARD, TRAINING)
    assert not state.outdated
    assert run.store_names() == ["epoch-0001-outdated-1"]
    rolled_out(run, "epoch-0001")
    settle(run, OTHER_REWARD, TRAINING)
    assert run.store_names() == ["epoch-0001", "epoch-0001-outdated-1"]


def test_a_submission_that_went_through_is_not_set_aside(run: RunDirectory) -> None:
    settle(run, REWARD, TRAINING)
    trained(run, 1)
    rolled_out(run, "epoch-0001")
    submitted(run, 1)
    settle(run, OTHER_REWARD, TRAINING, accept=True)
    trained(run, 2)
    assert not settle(run, OTHER_REWARD, TRAINING).outdated
    assert run.store_names() == ["epoch-0001"]


def admitted(run: RunDirectory, epoch: int) -> None:
    line: Any = {"epoch": epoch, "positions": [3]}
    events.note(run.journal, events.Admitted(epoch, [3], line, START))


def rolled_out_ahead(run: RunDirectory, slot: Slot) -> None:
    with run.ahead.open(slot) as store:
        store.append(Rollout("r", "e", 0, Ending.COMPLETED, 1.0, index=slot.index))


def test_groups_ahead_and_a_step_that_was_not_submitted_are_outdated(run: RunDirectory) -> None:
    settle(run, REWARD, TRAINING)
    trained(run, 1)
    rolled_out(run, "epoch-0001-step-0000")
    rolled_out_ahead(run, Slot(1, 5))
    admitted(run, 1)
    events.note(run.journal, events.Validating(1, 1, None))
    state = settle(run, OTHER_REWARD, TRAINING, accept=True)
    assert (state.admitted, state.validating) == (None, None)
    assert run.ahead.found() == []
    assert run.store_names() == ["epoch-0001-example-000005-outdated-1", "epoch-0001-step-0000-outdated-1"]


def test_groups_ahead_of_a_submitted_step_are_outdated_and_the_step_is_not(run: RunDirectory) -> None:
    settle(run, REWARD, TRAINING)
    trained(run, 1)
    rolled_out(run, "epoch-0001-step-0000")
    rolled_out_ahead(run, Slot(1, 5))
    admitted(run, 1)
    submitted(run, 1)
    state = settle(run, OTHER_REWARD, TRAINING, accept=True)
    assert state.admitted is not None
    assert run.store_names() == ["epoch-0001-example-000005-outdated-1", "epoch-0001-step-0000"]
    events.note(run.journal, events.Failed(1, "out of memory"))
    assert settle(run, OTHER_REWARD, TRAINING).admitted is None
    assert "epoch-0001-step-0000-outdated-1" in run.store_names()


def test_groups_ahead_begin_anew_before_the_first_update(run: RunDirectory) -> None:
    settle(run, REWARD, TRAINING)
    rolled_out_ahead(run, Slot(0, 5))
    settle(run, OTHER_REWARD, TRAINING)
    assert run.ahead.found() == []
    assert run.store_names() == ["epoch-0000-example-000005-outdated-1"]


def test_a_step_that_is_given_up_has_another_attempt(run: RunDirectory) -> None:
    settle(run, REWARD, TRAINING)
    trained(run, 1)
    assert settle(run, OTHER_REWARD, TRAINING, accept=True).failures[1] == 1
    assert settle(run, OTHER_REWARD, TRAINING).failures[1] == 1


def test_before_the_first_update_only_what_the_change_outdates_is_made_again(run: RunDirectory) -> None:
    validation = RunInput(Role.VALIDATION, "", "", "3" * 64, 4)
    settle(run, REWARD, TRAINING, validation)
    rolled_out(run, "epoch-0000")
    rolled_out(run, "validation-0000")
    events.note(run.journal, events.Validated({"epoch": 0, "step": 0, "avg_reward": 0.5}))  # type: ignore[typeddict-item]
    state = settle(run, REWARD, TRAINING, replace(validation, sha256="4" * 64))
    assert state.validations == []
    assert run.store_names() == ["epoch-0000", "validation-0000-outdated-1"]
    state = settle(run, REWARD, replace(TRAINING, count=9, sha256="5" * 64), validation)
    assert run.store_names() == ["epoch-0000-outdated-1", "validation-0000-outdated-1"]


def test_a_run_that_trained_nothing_begins_anew(run: RunDirectory) -> None:
    settle(run, REWARD, TRAINING)
    rolled_out(run, "validation-0000")
    rolled_out(run, "epoch-0000")
    run.write_dropped("epoch-0000", {"r": "zero_variance"})
    line: Any = {"epoch": 0, "step": None}
    events.note(run.journal, events.StepEnded(0, line, START))
    assert settle(run, REWARD, TRAINING).steps == [line]  # not over yet
    events.note(run.journal, events.EpochEnded(0, line, START))
    events.note(run.journal, events.Ended("succeeded", 1))
    state = settle(run, REWARD, TRAINING)
    assert (state.next_epoch, state.steps, state.validations) == (0, [], [])
    assert run.store_names() == ["epoch-0000-outdated-1", "validation-0000-outdated-1"]
    assert [path.name for path in (run.path / "left_out").iterdir()] == ["epoch-0000-outdated-1.json"]
    trained(run, 1)
    events.note(run.journal, events.Ended("succeeded", 1))
    assert settle(run, REWARD, TRAINING).step == 1


async def test_scripts_of_commands_and_members_of_rewards_are_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    project = Project(tmp_path, 1, "http://127.0.0.1:1", num_examples=2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.sh").write_text("echo 1\n")
    (tmp_path / "agent.log").write_text("")
    (tmp_path / "inner_reward.py").write_text("def score(item):\n    return 1.0\n")
    (tmp_path / "outer_reward.py").write_text("from inner_reward import score\n")
    text = project.configure(finetuning={"output_dir": "out"}).read_text()
    text = text.replace("entry: small_agent:answer", "command: [sh, agent.sh, agent.log]").replace(
        "_type: python\n  command", "_type: command\n  command"
    )
    text = text.replace(
        "      _type: python\n      entry: small_agent:reward",
        "      _type: weighted\n      evaluators: {part: 1.0}\n"
        "    part:\n      _type: python\n      entry: outer_reward:score",
    )
    (tmp_path / "config.yml").write_text(text)
    async with Assembly(load_config("config.yml")) as parts:
        task = await parts.training_task(TrainedModel("small", "tiny", "http://127.0.0.1:1", "k", 8))
        found = {(each.role, each.path, each.count) for each in run_inputs(parts, task, None)}
    assert found == {
        (Role.AGENT, "agent.sh", 1),
        (Role.REWARD, "outer_reward.py", 1),
        (Role.REWARD, "inner_reward.py", 2),
        (Role.TRAINING, "", 2),
    }


@pytest.mark.parametrize("value", [{1, 2, 3}, 10**30, "\ud800", {"b": 1, 2: "a"}, object()])
def test_the_hash_of_a_dataset_takes_any_value(value: Any) -> None:
    def made(given: Any) -> str:
        return dataset_input(Role.TRAINING, [Example("a", given, None, {})]).sha256

    assert made(value) == made(value)
    assert made(value) != made("another")
    assert made(object()) == made(object())


def test_the_printed_command_does_not_accept_later_changes() -> None:
    given = ["finetune", "--config_file=c.yml", "--accept-changes", "--dataset", "d.json"]
    assert resume_arguments(given) == ["finetune", "--config_file=c.yml", "--dataset", "d.json"]
