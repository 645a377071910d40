"""Models to compare, as `insitu eval` takes them.

`base`, `my-run@12`, `./adapter` (a directory that PEFT wrote), or `http://host:9000/v1#model`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from insitu.errors import InvalidRequest
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.wire.values import STORED_PATTERN
from insitu.workflow.binding import gateway_root

BASE = "base"
_FORMS = "base, <run>@<step>, a directory with an adapter, or <address>#<model>[#<variable with the key>]"


@dataclass(frozen=True, slots=True)
class ServedStep:
    """A kept step of a run on the configured backend; step 0 is where it starts."""

    label: str
    step: int
    run: str | None = None
    """None: the run of the configuration."""


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """An adapter that PEFT wrote, beside the agent."""

    label: str
    path: Path


@dataclass(frozen=True, slots=True)
class OutsideModel:
    """Any model behind the OpenAI protocol."""

    label: str
    base_url: str
    model: str
    key_variable: str | None = None
    """The environment variable that holds the key; None: no key is sent."""

    def key(self) -> str:
        """Read the key. A server without keys gets a placeholder, because clients insist on one."""
        if self.key_variable is None:
            return "none"
        key = os.environ.get(self.key_variable, "")
        if not key:
            raise InvalidRequest(
                f"the key of {self.label} is to be in {self.key_variable}, which is not set",
                hint=f"export {self.key_variable}=…",
            )
        return key


ComparedModel: TypeAlias = ServedStep | AdapterDirectory | OutsideModel


def read_model(text: str) -> ComparedModel:
    """Read one argument of `insitu eval`."""
    if text == BASE:
        return ServedStep(text, 0)
    if "://" in text:
        return _outside(text)
    if Path(text).is_dir():
        return AdapterDirectory(text, Path(text).absolute())
    run, _, step = text.rpartition("@")
    if not STORED_PATTERN.fullmatch(run) or not re.fullmatch(r"\d{1,9}", step):
        raise InvalidRequest(f"{text!r} does not name a model to compare", hint=f"write {_FORMS}")
    return ServedStep(text, int(step), run)


def check_base(trained: TrainedModel) -> None:
    """Reject `base` where step 0 of the run, which stands for it, is something else."""
    if trained.start is not None:
        raise InvalidRequest(
            f"step 0 of run {trained.name} is {trained.start}, not the base model, so `{BASE}` is not served",
            hint=f"name {trained.name}@0 for its start, or step 0 of a run that starts from the base model",
        )


def _outside(text: str) -> OutsideModel:
    url, *rest = text.split("#")
    if not 1 <= len(rest) <= 2 or not all(rest):
        raise InvalidRequest(f"{text!r} does not name a model", hint=f"write {_FORMS}")
    gateway_root(url)  # rejects anything but an address
    url, model = url.rstrip("/"), rest[0]
    return OutsideModel(f"{url}#{model}", url, model, rest[1] if len(rest) > 1 else None)
