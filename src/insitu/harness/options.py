"""Command-line options in the configuration: `finetuning.run_configuration`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError

from insitu.config.finetuning import RunConfiguration
from insitu.config.load import LoadedConfig
from insitu.errors import InvalidRequest


def with_options(loaded: LoadedConfig, given: Mapping[str, object]) -> LoadedConfig:
    """Return the configuration with these options set; None keeps the file's value."""
    finetuning = loaded.config.finetuning
    stated = finetuning.run_configuration.model_dump(exclude_unset=True)
    try:
        options = RunConfiguration.model_validate(
            stated | {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"--{name}: {first['msg']}", hint="insitu finetune --help") from error
    changed = finetuning.model_copy(update={"run_configuration": options})
    return replace(loaded, config=loaded.config.model_copy(update={"finetuning": changed}))
