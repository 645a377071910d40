"""Messages of ART's clients. They dump whole objects; only the fields meaningful here are read.

`insitu.compat.art` builds them too. The shapes and names are ART's, hence pydantic models with its aliases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from insitu.json_values import JsonObject, JsonValue
from insitu.wire.message import Answer
from insitu.wire.values import MAX_REWARD, AnyObject


class Lenient(BaseModel):
    """Ignores fields of other client releases; those that would matter are checked."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class InternalConfig(BaseModel):
    """`_internal_config` of a model: its settings for engine, adapter and trainer."""

    model_config = ConfigDict(extra="allow", frozen=True)

    init_args: AnyObject | None = None
    engine_args: AnyObject | None = None
    peft_args: AnyObject | None = None
    trainer_args: AnyObject | None = None


class ArtModel(Lenient):
    """A model as ART dumps it: the body of `/register` and `/_get_step`."""

    name: str
    project: str = "default"
    base_model: str | None = None
    """None for a model that is only called, never trained."""
    internal: Annotated[InternalConfig | None, Field(alias="_internal_config")] = None


class PrepareBody(Lenient):
    """`/_prepare_backend_for_training`."""

    model: ArtModel
    config: AnyObject | None = None


class DeleteBody(Lenient):
    """`/_delete_checkpoint_files`."""

    model: ArtModel
    steps_to_keep: list[int]


class ArtHistory(Lenient):
    """A further conversation of the same rollout."""

    messages_and_choices: list[AnyObject]


class ArtTrajectory(Lenient):
    """One rollout: plain messages are context, choices (they have a `message` inside) were sampled."""

    messages_and_choices: list[AnyObject] = Field(default_factory=list[JsonObject])
    additional_histories: list[ArtHistory] = Field(default_factory=list[ArtHistory])
    reward: float = Field(default=0.0, allow_inf_nan=False, ge=-MAX_REWARD, le=MAX_REWARD)
    metrics: dict[str, float] = Field(default_factory=dict[str, float])

    def histories(self) -> list[list[JsonObject]]:
        """Return every conversation of the rollout."""
        return [self.messages_and_choices, *(more.messages_and_choices for more in self.additional_histories)]


class ArtGroup(Lenient):
    """Rollouts of one scenario."""

    trajectories: list[ArtTrajectory]


class TrainBody(Lenient):
    """`/_train_model`."""

    model: ArtModel
    trajectory_groups: list[ArtGroup] = Field(min_length=1)
    config: AnyObject = Field(default_factory=dict[str, JsonValue])
    dev_config: AnyObject = Field(default_factory=dict[str, JsonValue])
    insitu: AnyObject = Field(default_factory=dict[str, JsonValue])
    """Settings under insitu's own names; only `insitu.compat.art` sends them."""
    wait: bool = True
    """False returns the job's id instead of waiting for its end."""


@dataclass(frozen=True, slots=True)
class TrainReceipt(Answer):
    """The answer to `/_train_model` without `wait`: the job, and a reason per rejected trajectory."""

    job: str
    refused: list[str]


@dataclass(frozen=True, slots=True)
class Done(Answer):
    """The answer where there is nothing to say: `/healthcheck`, `/register`, `/close`."""

    status: str = "ok"


@dataclass(frozen=True, slots=True)
class Deleted(Answer):
    """The answer to `/_delete_checkpoint_files`: the steps whose checkpoints are gone."""

    deleted: list[int]
