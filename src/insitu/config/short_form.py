"""ShortForm: what a file may say, the sections of `Config` and the keys that stand for them."""

from __future__ import annotations

from collections.abc import Container

from pydantic import Field

from insitu.config.config import Config
from insitu.config.entries import DatasetEntry, EvaluatorEntry, WorkflowEntry
from insitu.config.llms import LLMConfig
from insitu.config.values.problems import Location


class ShortForm(Config):
    """The contents of one YAML file, short or long. It describes the keys; a file is loaded as `Config`."""

    model: str | LLMConfig | None = None
    """The model to train, by the name that `insitu serve` gives it; or a mapping with its settings, as in
    `llms`."""
    agent: str | WorkflowEntry | None = None
    """The agent: `module:function`, the URL of a service, or a mapping as in `workflow`."""
    data: str | DatasetEntry | None = None
    """The examples: a file, `module:function` that returns rows, or a mapping as in
    `eval.general.dataset`."""
    validation: str | None = None
    """A file of held-out examples, measured before, during and after the training."""
    reward: str | EvaluatorEntry | None = None
    """The reward: `module:function`, the `_type` of an evaluator, or a mapping as in `eval.evaluators`."""
    num_generations: int | None = Field(default=None, ge=1)
    """Rollouts per example, compared with each other. Default: 8."""
    backend: str | dict[str, object] | None = None
    """The address of `insitu serve`, or a mapping as in `trainer_adapters.X.backend`. Default:
    http://127.0.0.1:7623."""
    training: dict[str, object] | None = None
    """Settings of each update, as in `trainer_adapters.X.training`."""


LLM, REWARD, BUILDER, ADAPTER, TRAINER = "policy", "reward", "groups", "backend", "epochs"
"""The names of the entries that the short form makes."""

PLACES: dict[str, Location] = {
    "model": ("llms", LLM),
    "agent": ("workflow",),
    "data": ("eval", "general", "dataset"),
    "validation": ("finetuning", "run_configuration", "validation_dataset"),
    "reward": ("eval", "evaluators", REWARD),
    "num_generations": ("trajectory_builders", BUILDER, "num_generations"),
    "backend": ("trainer_adapters", ADAPTER, "backend"),
    "training": ("trainer_adapters", ADAPTER, "training"),
}
"""The place in the long form that each key stands for."""


def as_short(location: Location, keys: Container[str]) -> Location:
    """Return a location of the long form as seen from the first of the short `keys` that holds it."""
    for key, place in PLACES.items():
        if key in keys and location[: len(place)] == place:
            return (key, *location[len(place) :])
    return location
