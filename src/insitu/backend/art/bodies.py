"""What ART's clients send. They dump whole objects of their own; only what has a meaning here is read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.backend.api.bodies import LoraBody, RunBody, SettingsBody
from insitu.errors import CannotHonour
from insitu.types import StepSettings

_LORA_NAMES = {"r": "rank", "lora_alpha": "alpha", "random_state": "seed"}
_CONFIG_NAMES = {"learning_rate": "learning_rate", "beta": "beta"}
_TRAINER_NAMES = {"learning_rate": "learning_rate", "beta": "beta", "max_grad_norm": "max_grad_norm"}
_STEP_NAMES = {
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "truncated_importance_sampling": "max_sampler_weight",
}

Json = dict[str, Any]


class Lenient(BaseModel):
    """Fields of other releases of the client are let through; those that would matter are checked."""

    model_config = ConfigDict(extra="ignore")


class InternalConfig(Lenient):
    """`_internal_config` of a model: what its owner wants of engine, adapter and trainer."""

    init_args: Json | None = None
    engine_args: Json | None = None
    peft_args: Json | None = None
    trainer_args: Json | None = None


class ArtModel(Lenient):
    """A model as ART dumps it."""

    name: str
    project: str = "default"
    base_model: str | None = None
    """None: a model that is only called, never trained."""
    internal: InternalConfig | None = Field(default=None, alias="_internal_config")

    def registration(self) -> RunBody:
        """The run that this model is here."""
        wanted = self.internal or InternalConfig()
        lora = _translated("peft_args", wanted.peft_args, _LORA_NAMES)
        return RunBody(
            project=self.project,
            name=self.name,
            base_model=self.base_model or "",
            lora=LoraBody(**lora),
            engine_args=_given(wanted.engine_args),
            init_args=_given(wanted.init_args),
        )


class PrepareBody(Lenient):
    """`/_prepare_backend_for_training`."""

    model: ArtModel
    config: Json | None = None


class DeleteBody(Lenient):
    """`/_delete_checkpoint_files`."""

    model: ArtModel
    steps_to_keep: list[int]


class ArtHistory(Lenient):
    """A further conversation of the same rollout."""

    messages_and_choices: list[Json]


class ArtTrajectory(Lenient):
    """One rollout: plain messages are context, choices (they have a `message` inside) were sampled."""

    messages_and_choices: list[Json] = Field(default_factory=list[Json])
    additional_histories: list[ArtHistory] = Field(default_factory=list[ArtHistory])
    reward: float = Field(default=0.0, allow_inf_nan=False)
    metrics: dict[str, float] = Field(default_factory=dict[str, float])

    def histories(self) -> list[list[Json]]:
        """Every conversation of the rollout."""
        return [self.messages_and_choices, *(more.messages_and_choices for more in self.additional_histories)]


class ArtGroup(Lenient):
    """Rollouts of one scenario."""

    trajectories: list[ArtTrajectory]


class TrainBody(Lenient):
    """`/_train_model`."""

    model: ArtModel
    trajectory_groups: list[ArtGroup] = Field(min_length=1)
    config: Json = Field(default_factory=dict)
    dev_config: Json = Field(default_factory=dict)

    def settings(self) -> StepSettings:
        """The step that is asked for. What the model's own `trainer_args` say wins over `config`, which the
        NeMo Agent Toolkit fills with constants; a setting without a counterpart is refused."""
        asked = _translated("config", self.config, _CONFIG_NAMES)
        trainer = self.model.internal.trainer_args if self.model.internal is not None else None
        asked |= _translated("trainer_args", trainer, _TRAINER_NAMES)
        asked |= _translated("dev_config", self.dev_config, _STEP_NAMES)
        return SettingsBody(**asked).value()


def _given(arguments: Json | None) -> Json:
    return {name: value for name, value in (arguments or {}).items() if value is not None}


def _translated(section: str, given: Json | None, names: dict[str, str]) -> Json:
    """The settings under the names they have here; null, false and zero ask for nothing."""
    asked = {name: value for name, value in (given or {}).items() if value or name in names}
    asked = {name: value for name, value in asked.items() if value is not None}
    unknown = sorted(asked.keys() - names.keys())
    if unknown:
        raise CannotHonour(
            f"{section}: {', '.join(unknown)} cannot be honoured here",
            hint=f"drop it; {section} takes {', '.join(sorted(names))}",
        )
    return {names[name]: value for name, value in asked.items()}
