"""The configuration of the harness's own components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from insitu.config.values.document import read_scalar
from insitu.config.values.problems import NOT_HONOURED, Problem, validation_error
from insitu.harness.interfaces.schedule import Schedule
from insitu.plugins import ComponentConfig, Section, nearest
from insitu.types import NAME_PATTERN, LoraSettings, StepSettings
from insitu.wire.values import (
    ENGINE_ARGUMENTS,
    INIT_ARGUMENTS,
    INIT_PATTERN,
    Arguments,
    ForkFrom,
    Label,
    Scalar,
)

API_PORT = 7623
"""The port of the API of `insitu serve`, unless its own settings say otherwise."""
GATEWAY_PORT = 8000
"""The port at which `insitu serve` answers model calls, unless its own settings say otherwise."""


_ARGUMENTS = {"init_args": INIT_ARGUMENTS, "engine_args": ENGINE_ARGUMENTS}


class BuilderConfig(ComponentConfig):
    """`trajectory_builders.X`."""

    num_generations: int = Field(default=2, ge=1)
    """Rollouts per example, compared with each other."""


class DemonstrationsConfig(ComponentConfig):
    """`trajectory_builders.X` of the type `demonstrations`: conversations to imitate, one per row."""

    messages_key: str = "messages"
    """The column of the conversation; its assistant messages are learnt."""
    tools_key: str = "tools"
    """The column of the tools that were offered; it may be missing."""


class PreferencePairsConfig(ComponentConfig):
    """`trajectory_builders.X` of the type `preference_pairs`: a better and a worse answer per row."""

    messages_key: str = "messages"
    """The column of the conversation before the answers: messages, or the text of one user message."""
    chosen_key: str = "chosen"
    """The column of the better answer: text, or an assistant message."""
    rejected_key: str = "rejected"
    """The column of the worse answer."""
    tools_key: str = "tools"
    """The column of the tools that were offered; it may be missing."""


class RecordedRolloutsConfig(ComponentConfig):
    """`trajectory_builders.X` of the type `recorded_rollouts`: what an earlier run collected."""

    path: Path
    """The `finetuning.output_dir` of that run."""


class BackendSettings(Section):
    """The address of `insitu serve`, and the run's name there."""

    ip: str = "127.0.0.1"
    """The host of `insitu serve`."""
    port: int = Field(default=API_PORT, ge=1, le=65535)
    """The port of its API."""
    tls: bool = False
    """Speak HTTPS. To trust a private authority, set the environment variable SSL_CERT_FILE."""
    name: str = "trainer_run"
    """The name of the run; the trained model is served under it."""
    project: str = "trainer_project"
    """A label that groups runs on the backend."""
    base_model: Label = "Qwen/Qwen2.5-7B-Instruct"
    """The model to train, as `insitu serve` names it."""
    api_key: SecretStr = SecretStr("default")
    """The key of the backend."""
    delete_old_checkpoints: bool = False
    """Delete all but the run's newest two checkpoints before training."""
    init_from: Label | None = None
    """Step 0 of the run: `<run>@<step>` or `<run>` of the same backend, or a directory of PEFT. A directory
    is written with a slash: `./adapter`. None starts from the base model."""
    fork_from: ForkFrom | None = None
    """`<run>@<step>` or `<run>`: go on from it, with its optimizer and random state, as another run."""
    init_args: Arguments = Field(default_factory=dict[str, Scalar])
    """Limits of the model on the backend, such as `max_seq_length` (docs/serve.md)."""
    engine_args: Arguments = Field(default_factory=dict[str, Scalar])
    """Settings of the engine and the trainer on the backend (docs/serve.md)."""
    server_config: dict[str, object] | None = None
    """Rejected if given: the server has options of its own."""

    @field_validator("ip")
    @classmethod
    def _host(cls, value: str) -> str:
        host = value.partition("://")[2] or value
        host = host.partition("/")[0]
        host = host.partition(":")[0] if host.count(":") == 1 else host
        if host != value:
            raise ValueError(
                f"is more than a host; write only the host: {host}, and `port` and `tls` beside it"
            )
        return value

    @field_validator("init_args", "engine_args")
    @classmethod
    def _arguments(cls, value: dict[str, Scalar], info: ValidationInfo) -> dict[str, Scalar]:
        section = str(info.field_name)
        unknown = [name for name in value if name not in _ARGUMENTS[section]]
        if unknown:
            raise validation_error(Problem((name,), _unknown(section, name)) for name in unknown)
        return value

    @field_validator("name", "project")
    @classmethod
    def _names(cls, value: str) -> str:
        if not NAME_PATTERN.fullmatch(value):
            raise ValueError(
                "must start with a-z or 0-9 and go on with a-z, 0-9, `.`, `_` or `-`, 64 at most"
            )
        return value

    @field_validator("init_from")
    @classmethod
    def _start(cls, value: str | None) -> str | None:
        if value is not None and not _is_path(value) and not INIT_PATTERN.fullmatch(value):
            raise ValueError("write <run>@<step>, <run>, or a directory with a slash, such as ./adapter")
        return value

    @field_validator("fork_from")
    @classmethod
    def _one_start(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("init_from") is not None:
            raise ValueError("give init_from (a new training) or fork_from (the same one goes on), not both")
        return value

    @field_validator("server_config")
    @classmethod
    def _no_server_config(cls, value: dict[str, object] | None) -> None:
        if value:
            text = "cannot be honoured here; engines take `engine_args`, the server its own options"
            raise PydanticCustomError(NOT_HONOURED, "{text}", {"text": text})

    @property
    def init_directory(self) -> Path | None:
        """The directory that `init_from` names; None if it names something of the backend."""
        return Path(self.init_from).expanduser() if self.init_from and _is_path(self.init_from) else None

    @property
    def url(self) -> str:
        """The address of the API; the wildcard address 0.0.0.0 becomes loopback."""
        host = "127.0.0.1" if self.ip == "0.0.0.0" else self.ip  # noqa: S104 - compared, not bound
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


def _unknown(section: str, name: str) -> str:
    for other, known in _ARGUMENTS.items():
        if name in known:
            return f"belongs to {other}"
    known = _ARGUMENTS[section]
    return f"unknown argument{nearest(name, known)} (known: {', '.join(known)})"


def _is_path(text: str) -> bool:
    return "/" in text or text.startswith((".", "~"))


def _plain(settings: object) -> object:
    """Convert the settings to what the API receives. PyYAML reads `1e-6` as text; make it a number."""
    if isinstance(settings, StepSettings | LoraSettings):
        return asdict(settings)
    if not isinstance(settings, Mapping):
        return settings
    return {key: _scalar(value) for key, value in cast("Mapping[str, object]", settings).items()}


def _scalar(value: object) -> object:
    read = read_scalar(value) if isinstance(value, str) else None
    return read if isinstance(read, bool | int | float) else value


class AdapterConfig(ComponentConfig):
    """`trainer_adapters.X`."""

    backend: BackendSettings = BackendSettings()
    """The backend that trains, and the run there."""
    training: Annotated[StepSettings, BeforeValidator(_plain)] = StepSettings()
    """Settings of each update, validated as the backend will."""
    schedule: Schedule | None = None
    """The learning rate over the run's updates; None keeps it constant."""
    lora: Annotated[LoraSettings | None, BeforeValidator(_plain)] = None
    """The adapter, chosen when the run is registered; None is that of the run's start, or the default one."""


class TrainerConfig(ComponentConfig):
    """`trainers.X`; all its settings are in `finetuning`."""
