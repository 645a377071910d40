"""Read a model's size: by formulas, or measured on fake tensors in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from insitu.backend.plan.models import dense
from insitu.backend.plan.models.files import OWN_FIGURES, CannotPlan, Kind, files_of
from insitu.errors import NotFound
from insitu.system.torch_builds.installing import install_command
from insitu.training.footprint.shape import ModelShape
from insitu.training.model.families import families

_SECONDS = 600.0
_ANSWER = TypeAdapter(ModelShape)
_RAISED = re.compile(r"[A-Za-z_][\w.]*: .*")
"""The line of a traceback that names the exception."""


def read_shape(model: str) -> ModelShape:
    """Read the shape of a model directory, or of a hub id: only its `config.json` is downloaded."""
    folder = files_of(model, ("config.json",))
    try:
        text = (folder / "config.json").read_text(errors="replace")
    except FileNotFoundError as error:
        raise NotFound(f"{model} has no config.json", hint="give the directory of a model") from error
    return parse_shape(model, text)


def parse_shape(name: str, text: str) -> ModelShape:
    """Turn the text of a `config.json` into a shape."""
    try:
        kind = Kind.model_validate_json(text)
    except ValidationError as error:
        raise CannotPlan(f"the config.json of {name} is not readable: {error.errors()[0]['msg']}") from error
    if kind.quantization_config is not None:
        raise CannotPlan(
            f"the memory of {name} cannot be planned: its weights are quantised", hint=OWN_FIGURES
        )
    if kind.model_type in dense.FAMILIES:
        return dense.parse_shape(name, text)
    if kind.model_type is None:
        raise CannotPlan(
            f"the memory of {name} cannot be planned: its config.json names no model_type", hint=OWN_FIGURES
        )
    family = families().get(kind.model_type)
    if family is not None and family.rejected is not None:
        raise CannotPlan(
            f"{name} is of the family {family.name}, which cannot be trained and served: {family.rejected}",
            hint="choose a model of another family, from docs/models.md",
        )
    found = _measured(name, text)
    if isinstance(found, CannotPlan):
        raise CannotPlan(found.message, hint=found.hint)
    return replace(found, name=name, several_ranks=family is not None and family.several_ranks)


@functools.lru_cache(maxsize=16)
def _measured(name: str, text: str) -> ModelShape | CannotPlan:
    """Measure in a process that ends: torch and Transformers take seconds and memory, and may fail.

    A failure is returned, because it is remembered as well.
    """
    for library in ("torch", "transformers", "peft"):
        if importlib.util.find_spec(library) is None:
            return CannotPlan(
                f"the memory of {name} is measured with {library}, which is missing",
                hint=install_command("insitu[backend]"),
            )
    with tempfile.TemporaryDirectory(prefix="insitu-shape-") as folder:
        (Path(folder) / "config.json").write_text(text)
        command = [sys.executable, "-m", "insitu.training.footprint.measure", folder]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            return CannotPlan(
                f"the memory of {name} cannot be planned: it was not measured within {_SECONDS:g} seconds",
                hint=OWN_FIGURES,
            )
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if _RAISED.fullmatch(line)]
        reason = reasons[-1] if reasons else f"exit status {done.returncode}"
        return CannotPlan(f"the memory of {name} cannot be planned: {reason}", hint=OWN_FIGURES)
    return _ANSWER.validate_json(done.stdout.strip().splitlines()[-1])
