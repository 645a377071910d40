"""The files of a model that are read before it is loaded: from its directory, or from the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from insitu.errors import CannotHonour, NotFound
from insitu.system.torch_builds.installing import install_command

OWN_FIGURES = "on CUDA give --max-seq-length, --micro-batch-tokens and --gpu-memory-utilization yourself"


class CannotPlan(CannotHonour):
    """The planner cannot measure this model, so the user sets the figures."""


class Kind(BaseModel):
    """The fields that tell whether the architecture is known at all."""

    model_config = ConfigDict(extra="ignore")

    model_type: str | None = None
    quantization_config: object = None


def read_kind(model: str) -> Kind:
    """Return a model's kind; without a readable `config.json` it has no family."""
    try:
        return Kind.model_validate_json((files_of(model, ("config.json",)) / "config.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return Kind()


def files_of(model: str, names: Sequence[str]) -> Path:
    """Return a model's directory; of a hub id, one with these files, as far as the model has them."""
    return Path(model) if Path(model).is_dir() else _from_hub(model, names)


def _from_hub(model: str, names: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType] - its own stubs
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise CannotPlan(
            f"{model} is not a directory, and huggingface_hub, which would download it, is missing",
            hint=f"give the model's directory, or: {install_command('huggingface_hub')}",
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=list(names)))
    except HFValidationError as error:
        raise NotFound(
            f"{model} is neither a directory here, in {Path.cwd()}, nor a name on the hub",
            hint="give the directory of a model, or its name on the hub: owner/model",
        ) from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise NotFound(
            f"{model} is not a directory, and the hub did not provide its {names[0]}: {error}",
            hint=f"check the name, or download it first: hf download {model}",
        ) from error
