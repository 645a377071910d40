"""Configurations of the models that the memory gates are about, as Transformers takes them."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig

from tests.support.known_models import CONFIGS

MODELS: dict[str, PretrainedConfig] = {
    name: AutoConfig.for_model(**{key: value for key, value in config.items() if key != "torch_dtype"})
    for name, config in CONFIGS.items()
}
