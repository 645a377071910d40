"""PeftConfig: what an ``adapter_config.json`` of PEFT says, refused where it cannot be honoured."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from insitu.errors import CannotHonour
from insitu.json_values import JsonObject

_IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",  # the names of its tensors tell which layers it has
        "inference_mode",
        "lora_alpha",
        "lora_dropout",  # of the training that made it; it changes no weight
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "target_modules",
        "task_type",
    }
)
_ACCEPTED: dict[str, tuple[object, ...]] = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}
"""Values besides those that switch a setting off. Other initialisations change the base model's weights."""
_OFF: tuple[object, ...] = (None, False, {}, [])
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of a plain LoRA adapter."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...] | None
    """The last parts of its layers' names; None if they are given by a pattern."""
    base_model: str

    @classmethod
    def read(cls, config: JsonObject) -> PeftConfig:
        """Read the file's content; raise CannotHonour by name for what is not plain LoRA."""
        if config.get("peft_type") != "LORA":
            raise _refused("peft_type", config.get("peft_type"), "only LORA is trained here")
        for name, value in sorted(config.items()):
            if name not in _IGNORED and not _is_plain(name, value):
                raise _refused(name, value, "adapters here are plain LoRA: W + alpha / r · B · A")
        rank, alpha = _whole(config, "r", 512), _whole(config, "lora_alpha", 4096)
        return cls(rank, alpha, _targets(config.get("target_modules")), _text(config))

    def names_another_model(self, names: Collection[str]) -> bool:
        """Return True if it names a model of the hub that is none of these; a path may be any model."""
        return _HUB_ID.fullmatch(self.base_model) is not None and self.base_model not in names


def _is_plain(name: str, value: object) -> bool:
    return value in _OFF or value in _ACCEPTED.get(name, ())


def _whole(config: JsonObject, name: str, most: int) -> int:
    value = config.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _refused(name, value, f"it has to be a whole number of 1 to {most}")
    return value


def _targets(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list):
        return None
    names = cast("list[object]", value)
    return tuple(sorted({str(name).rpartition(".")[2] for name in names}))


def _text(config: JsonObject) -> str:
    value = config.get("base_model_name_or_path")
    return value if isinstance(value, str) else ""


def _refused(name: str, value: object, why: str) -> CannotHonour:
    return CannotHonour(
        f"adapter_config.json: {name} is {value!r:.200}; {why}",
        hint="convert the adapter to plain LoRA, or merge it into the base model and serve that",
    )
