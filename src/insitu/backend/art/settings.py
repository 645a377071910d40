"""ART's settings → the registration of a run and the settings of a step; others are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TypeVar

from insitu.errors import CannotHonour, InvalidRequest
from insitu.json_values import JsonObject
from insitu.types import LoraSettings, StepSettings
from insitu.wire.art import ArtModel, InternalConfig, TrainBody
from insitu.wire.bodies import RunBody
from insitu.wire.message import Malformed, read_object

_LORA_NAMES = {"r": "rank", "lora_alpha": "alpha", "random_state": "seed", "target_modules": "target_modules"}
_CONFIG_NAMES = {"learning_rate": "learning_rate", "beta": "beta"}
_TRAINER_NAMES = {"learning_rate": "learning_rate", "beta": "beta", "max_grad_norm": "max_grad_norm"}
_STEP_NAMES = {
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "truncated_importance_sampling": "max_sampler_weight",
}
_SCALED: dict[str | bool, JsonObject] = {True: {"advantage": "std"}, False: {"advantage": "mean"}}
_WORDS: dict[str, dict[str | bool, JsonObject]] = {
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


def registration(model: ArtModel) -> RunBody:
    """Return the registration of a model as a run."""
    wanted = model.internal or InternalConfig()
    others = {name: value for name, value in (wanted.model_extra or {}).items() if name not in _HARMLESS}
    _translated("_internal_config", others, {})
    lora = _translated("peft_args", wanted.peft_args, _LORA_NAMES)
    fields = {
        "project": model.project,
        "name": model.name,
        "base_model": model.base_model or "",
        "lora": _checked(LoraSettings, lora),
        "engine_args": _given(wanted.engine_args),
        "init_args": _given(wanted.init_args),
    }
    return _checked(RunBody, fields)


def step_settings(body: TrainBody) -> StepSettings:
    """Return the step's settings. The model's own `trainer_args` override `config`, which the NeMo Agent
    Toolkit fills with constants; a setting without a counterpart is rejected. Rollouts truncated at a
    length limit are trained on, as in ART."""
    asked: JsonObject = {"mask_truncated": False}
    asked |= _translated("config", body.config, _CONFIG_NAMES)
    trainer = body.model.internal.trainer_args if body.model.internal is not None else None
    asked |= _translated("trainer_args", trainer, _TRAINER_NAMES)
    asked |= _spoken({name: value for name, value in body.dev_config.items() if name in _WORDS})
    others = {name: value for name, value in body.dev_config.items() if name not in _WORDS}
    asked |= _translated("dev_config", others, _STEP_NAMES)
    return _checked(StepSettings, asked | body.insitu)


Checked = TypeVar("Checked", RunBody, LoraSettings, StepSettings)


def _checked(kind: type[Checked], fields: Mapping[str, object]) -> Checked:
    try:
        return read_object(kind, fields)
    except Malformed as error:
        known = ", ".join(sorted(signature(kind).parameters))
        raise InvalidRequest(str(error), hint=f"these may be set: {known}") from error


def _given(arguments: JsonObject | None) -> JsonObject:
    return {name: value for name, value in (arguments or {}).items() if value is not None}


def _spoken(given: JsonObject) -> JsonObject:
    """Translate settings with named values; reject two that contradict each other."""
    asked: JsonObject = {}
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


def _translated(section: str, given: JsonObject | None, names: dict[str, str]) -> JsonObject:
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
