"""Runs: their list, the curves of one, and its alarms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from insitu.wire.message import Answer
from insitu.wire.values import AnyObject, Count

State = Literal["running", "ended", "stopped"]
"""`stopped`: no process works in the directory, and the run has not ended."""
StoreKind = Literal["training", "validation", "remeasured", "set_aside"]


@dataclass(frozen=True, slots=True)
class VerdictView(Answer):
    """The verdict on a run after a step."""

    code: str
    """`too_early`, `learning`, `level`, `not_learning` or `falling`."""
    causes: list[str]
    """Names of the rules that speak, the most important first; the keys of alarms."""
    sentence: str
    needs_change: bool
    """True if a setting should be changed."""


@dataclass(frozen=True, slots=True)
class RunSummary(Answer):
    """One run directory."""

    key: str
    """Names the run in addresses."""
    run_id: str
    name: str
    """The run's name on the backend; empty if its configuration gives none."""
    path: str
    base_model: str
    method: str
    state: State
    outcome: str | None
    """Of a run that is over: `succeeded`, or `failed` after a step that failed; null where none is known."""
    failure: str
    """Why it failed; empty otherwise."""
    started_at: float | None
    """Unix time, as all times."""
    updated_at: float | None
    """The last change of its files."""
    num_epochs: Count
    """Epochs that are over."""
    num_steps: Count
    """Steps that are over, trained or not."""
    step: Count
    """The step of the current weights."""
    num_rollouts: Count
    indexed: float
    """The share of its rollouts that pages show by now; 1 once all are read."""
    reward: float | None
    """The mean reward of the last step."""
    validation: float | None
    """The mean reward of the last validation."""
    verdict: VerdictView | None
    problems: list[str]
    """Files or lines that could not be read, in words."""


@dataclass(frozen=True, slots=True)
class RunListView(Answer):
    """`GET /view/v1/runs`: newest first."""

    runs: list[RunSummary]
    root: str
    problems: list[str]
    """Directories that look like runs and cannot be read, in words."""


@dataclass(frozen=True, slots=True)
class Spread(Answer):
    """A distribution, by its quantiles; they are null where only its ends are known."""

    mean: float
    std: float
    min: float
    p10: float | None
    p50: float | None
    p90: float | None
    max: float
    count: Count


@dataclass(frozen=True, slots=True)
class StepPoint(Answer):
    """One step: a point of every curve."""

    position: Count
    """Its place among the run's steps, from 0."""
    number: Count
    """The update that it made, or was to make: what people call it, and the x of curves."""
    epoch: Count
    step_of_epoch: Count
    step: Count | None
    """The step of the weights that it made; null if nothing was trained."""
    store: str
    """The file of its rollouts; names it in filters."""
    at: float | None
    reward: Spread | None
    """Over its rollouts that have a reward."""
    reward_selected: float | None
    """The mean reward of the rollouts that were selected for training."""
    fates: Mapping[str, Count]
    """Its rollouts by fate: `trained`, and the reasons for which others were dropped. They add up to
    `num_rollouts`."""
    endings: Mapping[str, Count]
    """Failed rollouts without a reward, by ending."""
    num_rollouts: Count
    num_groups: Count
    num_truncated: Count | None
    lengths: Spread | None
    """Sampled tokens of each rollout."""
    calls: Mapping[str, Count]
    """Model calls: `seen`, `trained`, `context_only`, `dropped`; empty if they were not counted."""
    entropy: float | None
    kl: float | None
    """Distance from the reference, or from the teacher."""
    mismatch: float | None
    """Distance between sampler and trainer, `mismatch/kl`."""
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    seconds: Mapping[str, float]
    """By phase, in order: `rollouts` on the harness's side, then those of the trainer."""
    tokens_per_second: float | None
    """Sampled tokens per second of `rollouts`."""
    metrics: Mapping[str, float]
    """Every figure that the backend reported."""
    verdict: VerdictView | None


@dataclass(frozen=True, slots=True)
class GainView(Answer):
    """A paired difference on the same examples."""

    difference: float
    low: float | None
    """The interval; null with too few examples."""
    high: float | None
    confidence: float
    num_examples: Count
    num_unpaired: Count
    """Examples that only one side has a reward for."""
    verdict: str
    """`better`, `worse`, `unclear` or `too_few`."""
    sentence: str


@dataclass(frozen=True, slots=True)
class ValidationPoint(Answer):
    """One validation."""

    epoch: Count
    step: Count
    store: str | None
    """The file of its rollouts, if it is there."""
    at: float | None
    reward: float | None
    low: float | None
    """Of the 95 % interval: the mean ± 1.96 standard errors; null if no error is known."""
    high: float | None
    standard_error: float | None
    num_examples: Count
    num_samples: Count
    num_failed: Count
    remeasured: bool
    gain: GainView | None


@dataclass(frozen=True, slots=True)
class Alarm(Answer):
    """A cause that a verdict names, from the step where it began to the last one where it held."""

    rule: str
    active: bool
    """True if it holds after the last step."""
    first_step: Count
    last_step: Count
    sentence: str
    """The cause, with the figures of the last step where it held."""
    setting: str
    """The change to try."""
    source: str
    """The reason for the limit."""


@dataclass(frozen=True, slots=True)
class AlarmList(Answer):
    """`GET /view/v1/runs/{run}/alarms`: active ones first, then by the step where they last held."""

    alarms: list[Alarm]
    failures: list[str]
    """Jobs of the backend that failed, in words, oldest first."""


@dataclass(frozen=True, slots=True)
class StoreView(Answer):
    """One file of rollouts."""

    name: str
    label: str
    """The name as people say it: `step 24`, `validation after step 20`."""
    kind: StoreKind
    epoch: Count | None
    step_of_epoch: Count | None
    position: Count | None
    """Of the step in the run, for training that is over."""
    policy_step: Count | None
    """The weights that made the rollouts, if they are the same for all."""
    num_rollouts: Count
    num_groups: Count


@dataclass(frozen=True, slots=True)
class TextsView(Answer):
    """The source of the tokens' texts."""

    available: bool
    source: str
    """The tokenizer's directory, or the reason why there is none and the option to give."""


@dataclass(frozen=True, slots=True)
class RunView(Answer):
    """`GET /view/v1/runs/{run}`: everything that the run's first page shows."""

    run: RunSummary
    points: list[StepPoint]
    validations: list[ValidationPoint]
    best_step: Count | None
    alarms: list[Alarm]
    """Those that are active."""
    reasons: list[str]
    """Every key of the points' `fates`, `trained` first, then by their sum."""
    phases: list[str]
    """Every key of the points' `seconds`, in order."""
    stores: list[StoreView]
    texts: TextsView
    cursor: str
    """`Last-Event-ID` to continue from this state at `/events`."""
    rescoring: str | None = None
    """The secret with which a page asks for a new score or a fork; null at a backend and in a report."""
    configured: bool = False
    """True if the user named a configuration, whose reward and backend serve both."""


@dataclass(frozen=True, slots=True)
class ConfigView(Answer):
    """`GET /view/v1/runs/{run}/config`: the configuration without secrets, as stored with the run."""

    config: AnyObject
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class RunEvent(Answer):
    """The data of an event of `GET /view/v1/runs/{run}/events`."""

    kind: str
    """`rollouts`, `changed` or a kind of the run's journal: `submitted`, `step`, `epoch`, `validated`, …"""
    num_rollouts: Count
    """Rollouts in the index by now."""
    at: float | None = None
    store: str | None = None
    """The file that grew."""
    point: StepPoint | None = None
    """Of `step`."""
    text: str = ""
    """Of a failure or the end, in words."""
    stores: list[str] = field(default_factory=list[str])
    """Of `rollouts`: the files that grew."""
