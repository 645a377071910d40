"""`finetuning`: what is trained, with which parts, for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from insitu.config.curriculum import CurriculumConfig
from insitu.config.ending_rewards import EndingRewards
from insitu.given import Name
from insitu.plugins import Section
from insitu.types import WORKFLOW_FUNCTION


class RewardFunction(Section):
    """The evaluator whose score is the reward."""

    name: str
    """A key of `eval.evaluators`."""


class EarlyStopping(Section):
    """Stop when the validation reward has not risen for a while."""

    patience: int = Field(ge=1)
    """Validations without a rise before the run stops."""
    min_delta: float = Field(default=0.0, ge=0)
    """A smaller rise counts as none."""


class RunConfiguration(Section):
    """Command-line options of one run."""

    config_file: Path | None = None
    """The configuration itself; set by the command line."""
    dataset: str | None = None
    """Train on this file instead of `eval.general.dataset`."""
    result_json_path: str = "$"
    """JSONPath of the answer in the response of `endpoint`."""
    endpoint: str | None = None
    """Call the agent at this URL instead of running `workflow`."""
    endpoint_timeout: float = Field(default=300, gt=0)
    """Seconds that `endpoint` may take to answer."""
    override: list[tuple[str, str]] = Field(default_factory=list[tuple[str, str]])
    """Settings overridden on the command line."""
    validation_dataset: Name | None = None
    """Validate on this file."""
    validation_interval: int = Field(default=5, ge=1)
    """Epochs between two validations."""
    validation_steps: int | None = Field(default=None, ge=1)
    """Updates between two validations, besides those of `validation_interval`."""
    validation_config_file: Path | None = None
    """Validate with the workflow, reward and dataset of this configuration."""
    validation_samples: int | None = Field(default=None, ge=1)
    """Rollouts of each validation example; None: one."""
    validation_temperature: float | None = Field(default=None, ge=0)
    """The trained model's temperature in validations, 0 for greedy answers; None: as in `llms`."""


class FinetuningConfig(Section):
    """The three parts name entries in the maps of their kind and are required when `enabled`."""

    enabled: bool = False
    """Must be true to train."""
    trainer: str | None = None
    """A key of `trainers`."""
    trajectory_builder: str | None = None
    """A key of `trajectory_builders`."""
    trainer_adapter: str | None = None
    """A key of `trainer_adapters`."""
    reward_function: RewardFunction | None = None
    """The evaluator whose score is the reward."""
    target_functions: list[str] = Field(default_factory=lambda: [WORKFLOW_FUNCTION], min_length=1)
    """Only the model calls of these functions are trained on."""
    target_model: str | None = None
    """A key of `llms`: only its calls are trained on."""
    curriculum_learning: CurriculumConfig = CurriculumConfig()
    """Train on easy examples first."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset."""
    groups_per_step: int | None = Field(default=None, ge=1)
    """Groups that are rolled out for one update; None: the whole dataset."""
    max_refill: int | None = Field(default=None, ge=1)
    """Most groups a step rolls out in place of groups whose rewards are all equal; None: none."""
    max_steps: int | None = Field(default=None, ge=1)
    """End the run after this many updates."""
    schedule: Literal["synchronous", "asynchronous"] = "synchronous"
    """`asynchronous`: roll out while a step trains, up to `training.max_staleness` steps ahead."""
    max_mismatch_kl: float | None = Field(default=None, gt=0)
    """asynchronous: train on newer rollouts only while `mismatch/kl` is above this; None: any KL."""
    output_dir: Path = Path("./.tmp/insitu/finetuning/")
    """The run's files."""
    run_configuration: RunConfiguration = RunConfiguration()
    """Command-line options, as settings."""
    seed: int = Field(default=0, ge=0)
    """Seeds the order of the examples and the curriculum's random choices."""
    rollout_timeout_seconds: float = Field(default=600.0, gt=0)
    """A rollout that takes longer ends as `timeout`."""
    ending_rewards: EndingRewards = EndingRewards()
    """Rewards of failed rollouts."""
    early_stopping: EarlyStopping | None = None
    """End the run when validations stop improving; None: never."""

    @model_validator(mode="after")
    def _something_to_refill_from(self) -> Self:
        if self.max_refill is not None and self.groups_per_step is None:
            text = "max_refill needs groups_per_step: a step over the whole dataset leaves no other example"
            raise PydanticCustomError("insitu", "{text}", {"text": text})
        return self

    @model_validator(mode="after")
    def _a_schedule_that_can_be_kept(self) -> Self:
        if text := self._schedule_problem():
            raise PydanticCustomError("insitu", "{text}", {"text": text})
        return self

    def _schedule_problem(self) -> str | None:
        if self.schedule == "synchronous":
            if self.max_mismatch_kl is not None:
                return "max_mismatch_kl needs schedule: asynchronous; otherwise rollouts are never old"
            return None
        if self.groups_per_step is None:
            return (
                "schedule: asynchronous needs groups_per_step: a step over the whole dataset leaves no other"
            )
        if self.max_refill is not None:
            return (
                "schedule: asynchronous replaces every group that teaches nothing, so max_refill has no "
                "meaning: remove it"
            )
        if self.curriculum_learning.enabled:
            return (
                "schedule: asynchronous trains on groups in the order of their start, a curriculum by their "
                "rewards: set curriculum_learning.enabled to false, or schedule to synchronous"
            )
        return None
