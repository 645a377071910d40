"""Metrics: the files that people and their scripts read, derived from the journal's events.

They are rewritten in full each time, so that every epoch appears once, however often the run was interrupted;
steps.jsonl and alarms.jsonl grow at each step and are rewritten when a run is resumed.
Keys that this release does not know, from a newer one, stay in training_metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import orjson

from insitu.harness.gains.gain import GainFields
from insitu.harness.gains.measurement import Measurement
from insitu.system.durable import write_atomic


class Statistics(TypedDict):
    """The rewards of an epoch; None if no rollout has one."""

    avg_reward: float | None
    min_reward: float | None
    max_reward: float | None
    num_trajectories: int
    num_groups: int


class CurriculumFields(TypedDict):
    """The state of the curriculum, without its settings."""

    current_percentile: float
    last_expansion_epoch: int
    total_groups: int
    included_groups: int


class AccountFields(TypedDict):
    """The outcome of an epoch's rollouts, see `insitu.harness.loop.account.Account`."""

    total: int
    trained: int
    truncated: int
    dropped: dict[str, int]
    endings: dict[str, int]
    rewarded_endings: NotRequired[dict[str, int]]
    """Missing in files of earlier releases."""
    calls: NotRequired[Mapping[str, object] | None]
    """Missing in files of earlier releases, as `calls_confirmed`."""
    calls_confirmed: NotRequired[bool | None]
    refilled: NotRequired[int]
    """Missing in files of earlier releases."""
    line: str


class VerdictFields(TypedDict):
    """The verdict on a run so far, see `insitu.harness.verdicts.verdict.Verdict`."""

    code: str
    causes: list[str]
    sentence: str


class EpochLine(Statistics):
    """A line of training_metrics.jsonl."""

    epoch: int
    timestamp: str
    run_id: str
    filtered_avg_reward: float | None
    filtered_min_reward: float | None
    filtered_max_reward: float | None
    filtered_num_trajectories: int
    filtered_num_groups: int
    curriculum_percentile: float
    curriculum_state: CurriculumFields
    account: AccountFields
    step: int | None
    training: NotRequired[Mapping[str, float | None]]
    """The backend's figures; missing when nothing was trained."""
    verdict: NotRequired[VerdictFields]
    """Missing in files of earlier releases; of an epoch, the verdict after its last step."""
    complete: NotRequired[bool]
    """False for an epoch that is under way, or that `max_steps` has ended."""


class StaleFields(TypedDict):
    """Groups of a step that are not trained on because they are too old."""

    bound: int
    """The age up to which groups were trained on, in steps."""
    by_age: int
    """Groups older than `training.max_staleness`."""
    by_kl: int
    """Groups older than `finetuning.max_mismatch_kl` allowed then."""
    length_deciles: list[int]
    """Both, by the length of their longest rollout among the epoch's groups so far; the shortest first."""


class AlarmLine(TypedDict):
    """A line of alarms.jsonl, see `insitu.harness.verdicts.alarms`."""

    event: Literal["began", "ended"]
    cause: str
    """The name of the rule."""
    epoch: int
    step_of_epoch: int
    step: int | None
    """As in the line of the step: None if nothing was trained."""
    timestamp: str
    sentence: str
    setting: str
    """The setting to try."""


class GroupRewards(TypedDict):
    """The rewards of one example's rollouts in a step."""

    mean: float | None
    """None if no rollout has a reward."""
    num_rewarded: int
    num_failed: int
    """Rollouts without a reward that the policy may have caused."""


class StepLine(EpochLine):
    """A line of steps.jsonl. The epochs of earlier releases, one step each, have none of its own keys."""

    step_of_epoch: NotRequired[int]
    """Its number within the epoch, from 0."""
    num_rewarded: NotRequired[int]
    """Rollouts that have a reward."""
    reward_std: NotRequired[float | None]
    """The standard deviation of their rewards."""
    num_truncated: NotRequired[int]
    """Rollouts that ended at the token limit, trained on or not."""
    temperature: NotRequired[float | None]
    """The mean temperature of the calls to train on, as the gateway recorded it."""
    num_examples: NotRequired[int]
    """Examples of the pass that it used up; missing when the epoch is one step, as the rest."""
    dataset: NotRequired[str]
    """Hash of the dataset's ids."""
    example_rewards: NotRequired[Mapping[str, float | None]]
    """Mean reward of each example, None without spread; only with a curriculum."""
    group_rewards: NotRequired[Mapping[str, GroupRewards]]
    """By example: what the verdict compares from pass to pass."""
    positions: NotRequired[list[int]]
    """asynchronous: the examples that it used up, by position in the dataset, in the order of their start."""
    stale: NotRequired[StaleFields]
    """asynchronous: groups that were too old."""
    alarms: NotRequired[Sequence[AlarmLine]]
    """The alarms that begin or end with it; missing without any."""


class ValidationEntry(TypedDict):
    """An entry of validation_history.json, and a few figures that only the journal keeps."""

    epoch: int
    step: int
    run_id: str
    timestamp: str
    avg_reward: float | None
    min_reward: float | None
    max_reward: float | None
    num_examples: int
    num_failed: int
    endings: dict[str, int]
    pass_share: NotRequired[float]
    """The share of the epoch's examples that had been used; missing at the end of an epoch."""
    standard_error: NotRequired[float | None]
    """Of `avg_reward`, over examples; missing in files of earlier releases, as the rest."""
    num_samples: NotRequired[int]
    """Rollouts per example."""
    rewards: NotRequired[Mapping[str, Sequence[float]]]
    """Of each example; only in the journal."""
    failed: NotRequired[Mapping[str, int]]
    """Rollouts without a reward, by example; only in the journal."""
    clusters: NotRequired[Mapping[str, str]]
    """The cluster of each example, with `eval.general.cluster_key`; only in the journal."""
    remeasured: NotRequired[bool]
    """True if the step was measured again because it was the best."""
    gain: NotRequired[GainFields | None]
    """The difference from step 0, of a step that was measured again."""


def measurement_of(entry: ValidationEntry) -> Measurement:
    """Return what a validation in the journal has measured."""
    return Measurement(entry.get("rewards", {}), entry.get("failed", {}))


STEPS_FILE, ALARMS_FILE = "steps.jsonl", "alarms.jsonl"
_STATISTICS = tuple(Statistics.__annotations__)
_EPOCH_FIELDS = (
    *("epoch", "timestamp", "run_id"),
    *_STATISTICS,
    *(f"filtered_{name}" for name in _STATISTICS),
    *("curriculum_percentile", "curriculum_state", "account", "step"),
)
_REWARD_FIELDS = ("epoch", "avg_reward", "min_reward", "max_reward", "filtered_avg_reward", "timestamp")
_VALIDATION_FIELDS = ("epoch", "step", "avg_reward", "num_examples", "num_failed", "endings", "timestamp")
_MORE_VALIDATION_FIELDS = ("standard_error", "num_samples", "pass_share", "remeasured", "gain")
_CURRICULUM_FIELDS = (*CurriculumFields.__annotations__, "config")


def write_metrics(
    directory: Path,
    epochs: Sequence[EpochLine],
    validations: Sequence[ValidationEntry],
    curriculum: Mapping[str, object],
) -> None:
    """Write the four files by epoch. The last of several lines of one epoch (or validation) counts."""
    trained = _in_order({(line["epoch"],): line for line in epochs})
    checked = _in_order(
        {(each["epoch"], each["step"], each.get("remeasured", False)): each for each in validations}
    )
    lines = [_pick(line, _EPOCH_FIELDS) | line for line in trained]
    write_atomic(directory / "training_metrics.jsonl", b"".join(map(_line, lines)))
    _write_json(directory / "reward_history.json", [_pick(line, _REWARD_FIELDS) for line in trained])
    _write_json(directory / "validation_history.json", [validation_fields(entry) for entry in checked])
    _write_json(directory / "curriculum_state.json", _pick(curriculum, _CURRICULUM_FIELDS))


def write_steps(directory: Path, steps: Sequence[StepLine]) -> None:
    """Write steps.jsonl and alarms.jsonl from their first lines."""
    write_atomic(directory / STEPS_FILE, b"".join(map(_line, steps)))
    write_atomic(directory / ALARMS_FILE, b"".join(map(_alarm_lines, steps)))


def append_step(directory: Path, step: StepLine) -> None:
    """Add a step to both files. If a crash cuts it off, `write_steps` restores it on resumption."""
    with (directory / STEPS_FILE).open("ab") as file:
        file.write(_line(step))
    with (directory / ALARMS_FILE).open("ab") as file:
        file.write(_alarm_lines(step))


def _alarm_lines(step: StepLine) -> bytes:
    return b"".join(map(_line, step.get("alarms", ())))


def _in_order(lines: Mapping[tuple[int, ...], Mapping[str, object]]) -> list[dict[str, object]]:
    return [dict(lines[place]) for place in sorted(lines)]


def _pick(record: Mapping[str, object], fields: Iterable[str]) -> dict[str, object]:
    return {name: record.get(name) for name in fields}


def validation_fields(entry: Mapping[str, object]) -> dict[str, object]:
    """Return a validation as validation_history.json has it."""
    return _pick(entry, _VALIDATION_FIELDS) | _pick(
        entry, (name for name in _MORE_VALIDATION_FIELDS if name in entry)
    )


def _line(record: Mapping[str, object]) -> bytes:
    # orjson writes null for NaN: a missing figure must not make the file invalid.
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _write_json(path: Path, content: object) -> None:
    write_atomic(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
