"""RunFiles: the configuration, the metrics and the journal of a run directory; never written to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import cast

import orjson
import psutil

from insitu.errors import InvalidRequest, NotFound
from insitu.harness.files.metrics import STEPS_FILE, StepLine, ValidationEntry
from insitu.harness.files.run_directory import CONFIG_FILE, DROPPED, JOURNAL_FILE, TRAJECTORIES
from insitu.harness.interfaces.run_input import Role
from insitu.harness.rollouts.fields import members, texts
from insitu.json_values import JsonObject, as_list, as_object
from insitu.types import StepSettings
from insitu.view.reading.store_name import StoreName
from insitu.view.reading.tail import GrowingFile
from insitu.wire.message import Malformed, field_names, read_object
from insitu.wire.views.runs import State

_EPOCHS_FILE = "training_metrics.jsonl"
_VALIDATIONS_FILE = "validation_history.json"


class RunFiles:
    """Everything but the rollouts. Not for several threads at once."""

    def __init__(self, path: Path, known: JsonObject) -> None:
        self.path = path
        self.run_id = str(known["run_id"])
        self.fingerprint = str(known.get("fingerprint", ""))
        started = known.get("started_at")
        self.started_at = float(started) if isinstance(started, int | float) else None
        self.config = as_object(known["config"]) or {}
        self._steps = GrowingFile(path / STEPS_FILE)
        self._epochs = GrowingFile(path / _EPOCHS_FILE)
        self._journal = GrowingFile(path / JOURNAL_FILE)
        self._validations: tuple[object, list[ValidationEntry]] = (None, [])

    @classmethod
    def open(cls, path: Path) -> RunFiles:
        """Open a run directory; raises NotFound or InvalidRequest for anything else."""
        file = path / CONFIG_FILE
        if not file.is_file():
            raise NotFound(
                f"{path} is not a run of `insitu finetune`: it has no {CONFIG_FILE}",
                hint="name the finetuning.output_dir of a run, or a directory that holds several",
            )
        try:
            known = as_object(orjson.loads(file.read_bytes()))
        except orjson.JSONDecodeError:
            known = None
        if known is None or "run_id" not in known or as_object(known.get("config")) is None:
            raise InvalidRequest(f"{file} is not the configuration of a run of insitu")
        return cls(path, known)

    def stores(self) -> dict[str, Path]:
        """Return the files of rollouts by name."""
        return {file.stem: file for file in sorted((self.path / TRAJECTORIES).glob("*.jsonl"))}

    def steps(self) -> list[StepLine]:
        """Return the lines of all steps; those of epochs if a release wrote no others."""
        return cast("list[StepLine]", self._steps.records() or self._epochs.records())

    def step_numbers(self) -> list[int]:
        """Return the number of each step: the update that it made, or was to make if nothing was trained."""
        numbers: list[int] = []
        made = 0
        for line in self.steps():
            step = line.get("step")
            numbers.append(made + 1 if step is None else step)
            made = made if step is None else step
        return numbers

    def labels(self) -> dict[str, str]:
        """Return what people call each file of rollouts, by its name."""
        steps = {
            (line["epoch"], line.get("step_of_epoch", 0)): number
            for line, number in zip(self.steps(), self.step_numbers(), strict=True)
        }
        validations = {validation_store(entry): entry["step"] for entry in self.validations()}
        return {name: StoreName.of(name).label(steps, validations) for name in self.stores()}

    def num_epochs(self) -> int:
        """Return the number of epochs that are over."""
        return sum(line.get("complete") is not False for line in self._epochs.records())

    def journal(self) -> list[JsonObject]:
        """Return the events of the run, oldest first."""
        return self._journal.records()

    def clusters(self) -> dict[str, str] | None:
        """Return the cluster of each validation example; None where every one stands for itself."""
        for record in reversed(self.journal()):
            if found := (as_object(record.get("entry")) or {}).get("clusters"):
                return texts(found)
        return None

    def validations(self) -> list[ValidationEntry]:
        """Return the entries of validation_history.json."""
        file = self.path / _VALIDATIONS_FILE
        signature = signature_of(file)
        if signature != self._validations[0]:
            entries = [] if signature is None else as_list(orjson.loads(file.read_bytes())) or []
            self._validations = (signature, cast("list[ValidationEntry]", entries))
        return self._validations[1]

    def dropped_file(self, store: str) -> Path:
        """Return the file that says which rollouts of a step were dropped before training."""
        return self.path / DROPPED / f"{store}.json"

    def dropped(self, store: str) -> dict[str, str] | None:
        """Return why rollouts were dropped, by id; None before that is decided."""
        file = self.dropped_file(store)
        return texts(orjson.loads(file.read_bytes())) if file.is_file() else None

    def problems(self) -> list[str]:
        """Say which lines could not be read."""
        files = {STEPS_FILE: self._steps, _EPOCHS_FILE: self._epochs, JOURNAL_FILE: self._journal}
        return [
            f"{self.path / name}: {file.num_broken} lines are not JSON objects"
            for name, file in files.items()
            if file.num_broken
        ]

    def state(self) -> tuple[State, str | None, str]:
        """Return whether the run goes on; else its outcome, if one is known, and the reason of a failure."""
        last = self.journal()[-1] if self.journal() else {}
        if last.get("event") == "ended":
            return "ended", str(last.get("outcome")), ""
        try:
            owner = int((self.path / ".lock").read_text().strip() or 0)
        except (FileNotFoundError, ValueError):
            owner = 0
        if owner and psutil.pid_exists(owner):
            return "running", None, ""
        if last.get("event") == "failed":
            return "stopped", "failed", str(last.get("message") or "no reason was given")
        return "stopped", None, ""

    def num_examples(self) -> int | None:
        """Return the number of training examples, if the journal has it."""
        for record in reversed(self.journal()):
            for each in as_list(record.get("inputs")) or []:
                found = as_object(each) or {}
                if found.get("role") == Role.TRAINING and isinstance(found.get("count"), int):
                    return cast(int, found["count"])
        return None

    @cached_property
    def backend(self) -> Mapping[str, object]:
        """The settings of the backend."""
        return section(self.adapter, "backend")

    @cached_property
    def adapter(self) -> JsonObject:
        """The settings of the trainer adapter."""
        name = section(self.config, "finetuning").get("trainer_adapter")
        return section(self.config, "trainer_adapters", str(name))

    @cached_property
    def settings(self) -> StepSettings | None:
        """The settings of each update; None if an adapter of somebody else has its own."""
        given = members(self.adapter.get("training"))
        known = {name: value for name, value in given.items() if name in field_names(StepSettings)}
        if not known:
            return None
        try:
            return read_object(StepSettings, known)
        except Malformed:  # of a release with other ranges: its meaning is not known here
            return None


def validation_store(entry: ValidationEntry) -> str:
    """Return the name of the file of a validation's rollouts."""
    if entry.get("remeasured", False):
        return f"remeasured-{entry['step']:06d}"
    name = f"validation-{entry['epoch']:04d}"
    return f"{name}-step-{entry['step']:06d}" if "pass_share" in entry else name


def section(config: JsonObject, *path: str) -> JsonObject:
    """Return a section of a configuration, empty if missing."""
    found = config
    for name in path:
        found = as_object(found.get(name)) or {}
    return found


def signature_of(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and time of change; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
