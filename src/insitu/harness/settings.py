"""The configuration of the harness's own components."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SecretStr, field_validator
from pydantic_core import PydanticCustomError

from insitu.config.problems import NOT_HONOURED
from insitu.plugins import ComponentConfig, Section
from insitu.types import NAME_PATTERN, AdvantageKind, Loss, StepSettings

Scalar = str | int | float | bool | None
_STEP = StepSettings()


class BuilderConfig(ComponentConfig):
    """`trajectory_builders.X`."""

    num_generations: int = Field(default=2, ge=1)
    """Rollouts per example; they are compared with each other."""


class BackendSettings(Section):
    """Where `insitu serve` runs, and what the run is called there."""

    ip: str
    port: int = Field(ge=1, le=65535)
    name: str = "trainer_run"
    project: str = "trainer_project"
    base_model: str = "Qwen/Qwen2.5-7B-Instruct"
    api_key: SecretStr = SecretStr("default")
    delete_old_checkpoints: bool = False
    """Delete the run's checkpoints but the newest two before training."""
    init_args: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    engine_args: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    server_config: dict[str, Any] | None = None

    @field_validator("name", "project")
    @classmethod
    def _names(cls, value: str) -> str:
        if not NAME_PATTERN.match(value):
            raise ValueError(
                "must start with a-z or 0-9 and go on with a-z, 0-9, `.`, `_` or `-`, 64 at most"
            )
        return value

    @field_validator("server_config")
    @classmethod
    def _no_server_config(cls, value: dict[str, Any] | None) -> None:
        if value:
            text = "cannot be honoured here; engines take `engine_args`, the server its own options"
            raise PydanticCustomError(NOT_HONOURED, "{text}", {"text": text})

    @property
    def url(self) -> str:
        """The address of the API. An address to listen on everywhere is reached here."""
        host = "127.0.0.1" if self.ip == "0.0.0.0" else self.ip  # noqa: S104 - compared, not bound
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


class TrainingSettings(Section):
    """What each update is asked to do."""

    learning_rate: float = Field(default=_STEP.learning_rate, gt=0)
    loss: Loss = _STEP.loss
    advantage: AdvantageKind | None = _STEP.advantage
    """None: that of the loss."""
    clip_low: float | None = Field(default=_STEP.clip_low, gt=0, le=1)
    clip_high: float | None = Field(default=_STEP.clip_high, gt=0)
    max_sampler_weight: float | None = Field(default=_STEP.max_sampler_weight, ge=1)
    """Cap of the weights that correct for the difference between sampler and trainer; null: no weights."""
    beta: float = Field(default=_STEP.beta, ge=0)
    """Weight of the KL penalty to the base model, or to `reference_step`."""
    reference_step: int | None = Field(default=_STEP.reference_step, ge=0)
    entropy_bonus: float = Field(default=_STEP.entropy_bonus, ge=0)
    num_passes: int = Field(default=_STEP.num_passes, ge=1)
    mask_truncated: bool = _STEP.mask_truncated
    mask_constrained: bool = _STEP.mask_constrained
    max_staleness: int = Field(default=_STEP.max_staleness, ge=0)
    max_rollout_tokens: int | None = Field(default=_STEP.max_rollout_tokens, ge=1)
    max_grad_norm: float = Field(default=_STEP.max_grad_norm, gt=0)


class AdapterConfig(ComponentConfig):
    """`trainer_adapters.X`."""

    backend: BackendSettings
    training: TrainingSettings = TrainingSettings()


class TrainerConfig(ComponentConfig):
    """`trainers.X`: all its settings are in `finetuning`."""
