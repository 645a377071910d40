"""TrainingRecord: how a step came about and how good it is, read from the output directory of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from insitu.errors import InvalidRequest
from insitu.harness.files.metrics import ValidationEntry
from insitu.harness.files.run_directory import CONFIG_FILE
from insitu.harness.gains.gain import Gain
from insitu.harness.gains.measurement import plus_minus
from insitu.json_values import JsonObject, JsonValue, as_object, parse_json

_HISTORY_FILE = "validation_history.json"


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """Facts that `insitu finetune` left about a step."""

    data: str
    reward: str
    figures: list[str]
    """Sentences about the validation reward; empty if nothing was measured."""


def read_record(output: Path, run: str, step: int) -> TrainingRecord:
    """Read the record of a step; reject a directory that belongs to another run."""
    config = as_object(_read(output / CONFIG_FILE, output).get("config")) or {}
    names = [_at(adapter, "backend", "name") for adapter in _values(config, "trainer_adapters")]
    if run not in names:
        raise InvalidRequest(
            f"{output} is of run {', '.join(str(name) for name in names)}, not of {run}",
            hint="give the finetuning.output_dir of that run, or leave --from out",
        )
    reward = str(_at(config, "finetuning", "reward_function", "name") or "not named")
    evaluator = as_object(_at(config, "eval", "evaluators", reward)) or {}
    history = (output / _HISTORY_FILE).read_bytes() if (output / _HISTORY_FILE).exists() else b"[]"
    entries = cast("list[ValidationEntry]", parse_json(history))
    return TrainingRecord(
        data=_described(as_object(_at(config, "eval", "general", "dataset")) or {}),
        reward=f"{reward} ({_described(evaluator)})" if evaluator else reward,
        figures=_figures(entries, step),
    )


def _figures(entries: Sequence[ValidationEntry], step: int) -> list[str]:
    """Say the validation reward before training and at the step, and the gain with its interval."""
    before = [entry for entry in entries if entry["step"] == 0]
    after = [entry for entry in entries if entry["step"] == step]
    if not after:
        return ["This step was not validated."] if entries else []
    # The second measurement of the best step is the honest one: the first was chosen by its luck.
    chosen = after[-1]
    said = [
        f"Validation reward: {_reward(chosen)}"
        + (f"; before training {_reward(before[0])}." if before else ".")
    ]
    gain = chosen.get("gain")
    if gain is None:
        return said
    return [*said, f"Gain over the model before training: {Gain.from_dict(gain).figures()}."]


def _reward(entry: ValidationEntry) -> str:
    mean = entry["avg_reward"]
    shown = "none" if mean is None else plus_minus(mean, entry.get("standard_error"), 4)
    return f"{shown} on {entry['num_examples']} examples"


def _described(section: JsonObject) -> str:
    """Return what names a dataset or an evaluator: a file, an entry, or its type."""
    named = [section.get(key) for key in ("file_path", "entry", "path", "_type")]
    return next((str(value) for value in named if value), "not named")


def _values(config: JsonObject, section: str) -> list[JsonObject]:
    return [as_object(entry) or {} for entry in (as_object(config.get(section)) or {}).values()]


def _at(value: JsonValue, *keys: str) -> JsonValue:
    for key in keys:
        value = (as_object(value) or {}).get(key)
    return value


def _read(path: Path, output: Path) -> JsonObject:
    try:
        found = as_object(parse_json(path.read_bytes()))
    except (OSError, ValueError):
        found = None
    if found is None:
        raise InvalidRequest(
            f"{output} is not the output directory of a run: {path.name} is missing or damaged",
            hint="give the finetuning.output_dir of `insitu finetune`, or leave --from out",
        )
    return found
