"""Request bodies of ART's clients, which dump whole objects; only the fields meaningful here are read."""

from __future__ import annotations

from inspect import signature
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from insitu.backend.api.bodies import RunBody
from insitu.errors import CannotHonour, InvalidRequest
from insitu.types import LoraSettings, StepSettings
from insitu.wire.message import describe

Json = dict[str, Any]

_LORA_NAMES = {"r": "rank", "lora_alpha": "alpha", "random_state": "seed"}
_CONFIG_NAMES = {"learning_rate": "learning_rate", "beta": "beta"}
_TRAINER_NAMES = {"learning_rate": "learning_rate", "beta": "beta", "max_grad_norm": "max_grad_norm"}
_STEP_NAMES = {
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "truncated_importance_sampling": "max_sampler_weight",
}
_SCALED: dict[Any, Json] = {True: {"advantage": "std"}, False: {"advantage": "mean"}}
_WORDS: dict[str, dict[Any, Json]] = {
    "loss_fn": {"ppo": {"loss": "dapo"}, "cispo": {"loss": "cispo"}},
    "ppo": {True: {"loss": "dapo"}, False: {}},
    "importance_sampling_level": {"token": {}, "sequence": {"loss": "gspo"}},
    "scale_rewards": _SCALED,
    "normalize_advantages": _SCALED,
    "save_checkpoint": {True: {}, False: {}},  # every step is a checkpoint here
}
"""Step settings with named values, and what each value sets here."""
_HARMLESS = frozenset({"chat_template_kwargs", "allow_unvalidated_arch"})
"""Parts of a model's configuration that the client sends with every call or that only concern ART itself."""


class Lenient(BaseModel):
    """Ignores fields of other client releases; those that would matter are checked."""

    model_config = ConfigDict(extra="ignore")


class InternalConfig(BaseModel):
    """`_internal_config` of a model: its settings for engine, adapter and trainer."""

    model_config = ConfigDict(extra="allow")

    init_args: Json | None = None
    engine_args: Json | None = None
    peft_args: Json | None = None
    trainer_args: Json | None = None


class ArtModel(Lenient):
    """A model as ART dumps it."""

    name: str
    project: str = "default"
    base_model: str | None = None
    """None for a model that is only called, never trained."""
    internal: InternalConfig | None = Field(default=None, alias="_internal_config")

    def registration(self) -> RunBody:
        """Return the registration of this model as a run."""
        wanted = self.internal or InternalConfig()
        others = {name: value for name, value in (wanted.model_extra or {}).items() if name not in _HARMLESS}
        _translated("_internal_config", others, {})
        lora = _translated("peft_args", wanted.peft_args, _LORA_NAMES)
        fields = {
            "project": self.project,
            "name": self.name,
            "base_model": self.base_model or "",
            "lora": _checked(LoraSettings, lora),
            "engine_args": _given(wanted.engine_args),
            "init_args": _given(wanted.init_args),
        }
        return _checked(RunBody, fields)


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
        """Return every conversation of the rollout."""
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
    insitu: Json = Field(default_factory=dict)
    """Settings under insitu's own names; only `insitu.compat.art` sends them."""
    wait: bool = True
    """False returns the job's id instead of waiting for its end."""

    def settings(self) -> StepSettings:
        """Return the step's settings. The model's own `trainer_args` override `config`, which the NeMo Agent
        Toolkit fills with constants; a setting without a counterpart is rejected. Rollouts truncated at a
        length limit are trained on, as in ART."""
        asked: Json = {"mask_truncated": False}
        asked |= _translated("config", self.config, _CONFIG_NAMES)
        trainer = self.model.internal.trainer_args if self.model.internal is not None else None
        asked |= _translated("trainer_args", trainer, _TRAINER_NAMES)
        asked |= _spoken({name: value for name, value in self.dev_config.items() if name in _WORDS})
        others = {name: value for name, value in self.dev_config.items() if name not in _WORDS}
        asked |= _translated("dev_config", others, _STEP_NAMES)
        return _checked(StepSettings, asked | self.insitu)


Checked = TypeVar("Checked", RunBody, LoraSettings, StepSettings)


def _checked(kind: type[Checked], fields: Json) -> Checked:
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        known = ", ".join(sorted(signature(kind).parameters))
        raise InvalidRequest(describe(error.errors()), hint=f"these may be set: {known}") from error


def _given(arguments: Json | None) -> Json:
    return {name: value for name, value in (arguments or {}).items() if value is not None}


def _spoken(given: Json) -> Json:
    """Translate settings with named values; reject two that contradict each other."""
    asked: Json = {}
    for name, value in given.items():
        if value is None:
            continue
        wanted = _WORDS[name].get(value) if isinstance(value, str | bool) else None
        if wanted is None:
            raise CannotHonour(
                f"{name}: {value!r} cannot be honoured here",
                hint=f"{name} may be {' or '.join(repr(word) for word in _WORDS[name])}",
            )
        for key, word in wanted.items():
            if asked.setdefault(key, word) != word:
                raise CannotHonour(
                    f"{name}: {value!r} contradicts another setting, which asks for {asked[key]}"
                )
    return asked


def _translated(section: str, given: Json | None, names: dict[str, str]) -> Json:
    """Rename the settings to insitu's; reject unknown ones, unless they are null, false or zero."""
    asked = {name: value for name, value in (given or {}).items() if value or name in names}
    asked = {name: value for name, value in asked.items() if value is not None}
    unknown = sorted(asked.keys() - names.keys())
    if unknown:
        raise CannotHonour(
            f"{section}: {', '.join(unknown)} cannot be honoured here",
            hint=f"drop it; {section} takes {', '.join(sorted(names)) or 'nothing of the kind'}",
        )
    return {names[name]: value for name, value in asked.items()}
