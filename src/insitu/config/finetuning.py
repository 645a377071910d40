"""`finetuning`: what is trained, with which parts, for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from insitu.config.curriculum import CurriculumConfig
from insitu.config.ending_rewards import EndingRewards
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
    dataset: str | None = None
    result_json_path: str = "$"
    endpoint: str | None = None
    endpoint_timeout: float = Field(default=300, gt=0)
    override: list[tuple[str, str]] = Field(default_factory=list[tuple[str, str]])
    validation_dataset: str | None = None
    validation_interval: int = Field(default=5, ge=1)
    """Epochs between two validations."""
    validation_steps: int | None = Field(default=None, ge=1)
    """Updates between two validations, besides those of `validation_interval`."""
    validation_config_file: Path | None = None
    validation_samples: int | None = Field(default=None, ge=1)
    """Rollouts of each validation example; None: one."""
    validation_temperature: float | None = Field(default=None, ge=0)
    """The trained model's temperature in validations, 0 for greedy answers; None: as in `llms`."""


class FinetuningConfig(Section):
    """The three parts name entries in the maps of their kind and are required when `enabled`."""

    enabled: bool = False
    trainer: str | None = None
    trajectory_builder: str | None = None
    trainer_adapter: str | None = None
    reward_function: RewardFunction | None = None
    target_functions: list[str] = Field(default_factory=lambda: [WORKFLOW_FUNCTION], min_length=1)
    """Only the model calls of these functions are trained on."""
    target_model: str | None = None
    """A key of `llms`: only its calls are trained on."""
    curriculum_learning: CurriculumConfig = CurriculumConfig()
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset."""
    groups_per_step: int | None = Field(default=None, ge=1)
    """Groups that are rolled out for one update; None: the whole dataset."""
    max_refill: int | None = Field(default=None, ge=1)
    """Most groups a step rolls out in place of groups whose rewards are all equal; None: none."""
    max_steps: int | None = Field(default=None, ge=1)
    """End the run after this many updates."""
    output_dir: Path = Path("./.tmp/insitu/finetuning/")
    run_configuration: RunConfiguration = RunConfiguration()
    seed: int = Field(default=0, ge=0)
    """Seeds the order of the examples and the curriculum's random choices."""
    rollout_timeout_seconds: float = Field(default=600.0, gt=0)
    ending_rewards: EndingRewards = EndingRewards()
    early_stopping: EarlyStopping | None = None

    @model_validator(mode="after")
    def _something_to_refill_from(self) -> Self:
        if self.max_refill is not None and self.groups_per_step is None:
            text = "max_refill needs groups_per_step: a step over the whole dataset leaves no other example"
            raise PydanticCustomError("insitu", "{text}", {"text": text})
        return self
