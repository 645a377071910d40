"""Events: the decisions and results of a run that its journal keeps.

| event | written when | carries |
|---|---|---|
| `registered` | the backend has taken the run | its name and address |
| `inputs` | the run starts, or goes on with other inputs | hashes of files and datasets, what changed |
| `restarted` | the epochs begin anew, as none has trained anything | reason, the first curriculum |
| `admitted` | groups were chosen for a step (asynchronous) | epoch, examples to train on, figures |
| `submitted` | the backend has acknowledged a step | epoch, job, figures, the curriculum after it |
| `failed` | a job failed | epoch, message |
| `step` | a step is over, trained or not | its line in steps.jsonl, curriculum |
| `epoch` | an epoch is over, trained or not | its line in training_metrics.jsonl, curriculum |
| `validating` | a validation begins beside training (asynchronous) | epoch, step, share of the epoch |
| `validated` | a validation is over | its entry in validation_history.json |
| `best` | a step is the best so far, its checkpoint kept | step, reward, path |
| `remeasured` | the best step was measured again | its entry in validation_history.json |
| `ended` | the run is over | outcome, number of epochs |

Kinds of events and keys that this release does not know, from a newer one, are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeAlias, TypeVar, cast

from insitu.harness.files.journal import Journal
from insitu.harness.files.json_lines import DamagedFile
from insitu.harness.files.metrics import EpochLine, StepLine, ValidationEntry
from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.interfaces.run_input import Role, RunInput
from insitu.harness.interfaces.training_job import TrainingJobRef
from insitu.json_values import JsonObject, JsonValue, as_object


@dataclass(frozen=True, slots=True)
class Registered:
    """The backend has taken the run."""

    kind: ClassVar[str] = "registered"
    name: str
    url: str


@dataclass(frozen=True, slots=True)
class InputsNoted:
    """The run uses these files and datasets from now on."""

    kind: ClassVar[str] = "inputs"
    inputs: list[RunInput]
    changed: list[Role]
    """Empty at the start of a run."""
    changes: list[str]
    """One line for each, for people."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The epochs begin anew: none has trained anything."""

    kind: ClassVar[str] = "restarted"
    reason: str
    curriculum: CurriculumState


@dataclass(frozen=True, slots=True)
class Admitted:
    """Groups were chosen for a step, which is submitted with them however often the run is interrupted."""

    kind: ClassVar[str] = "admitted"
    epoch: int
    trained: list[int]
    """The examples to train on by their positions in the dataset, in the order of their start."""
    line: StepLine
    """Without the backend's own figures; its `positions` are all examples that the step uses up."""
    curriculum: CurriculumState


@dataclass(frozen=True, slots=True)
class Submitted:
    """The backend has acknowledged a step."""

    kind: ClassVar[str] = "submitted"
    epoch: int
    ref: TrainingJobRef
    line: StepLine
    """Without the backend's own figures."""
    curriculum: CurriculumState


@dataclass(frozen=True, slots=True)
class Failed:
    """A job failed."""

    kind: ClassVar[str] = "failed"
    epoch: int
    message: str | None


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is over, trained or not."""

    kind: ClassVar[str] = "step"
    epoch: int
    line: StepLine
    curriculum: CurriculumState


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """An epoch is over, trained or not."""

    kind: ClassVar[str] = "epoch"
    epoch: int
    line: EpochLine
    curriculum: CurriculumState


@dataclass(frozen=True, slots=True)
class Validating:
    """A validation begins, on a version that stays served while training goes on."""

    kind: ClassVar[str] = "validating"
    epoch: int
    step: int
    pass_share: float | None


@dataclass(frozen=True, slots=True)
class Validated:
    """A validation is over."""

    kind: ClassVar[str] = "validated"
    entry: ValidationEntry


@dataclass(frozen=True, slots=True)
class Remeasured:
    """The best step was measured again, with new samples."""

    kind: ClassVar[str] = "remeasured"
    entry: ValidationEntry


@dataclass(frozen=True, slots=True)
class Best:
    """A step is the best so far, and its checkpoint was kept; step 0 has none."""

    kind: ClassVar[str] = "best"
    step: int
    reward: float | None
    path: str | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over."""

    kind: ClassVar[str] = "ended"
    outcome: str
    num_epochs: int


Event: TypeAlias = (
    Registered
    | InputsNoted
    | Restarted
    | Admitted
    | Submitted
    | Failed
    | StepEnded
    | EpochEnded
    | Validating
    | Validated
    | Best
    | Remeasured
    | Ended
)
OneKind = TypeVar(
    "OneKind",
    Registered,
    InputsNoted,
    Restarted,
    Admitted,
    Submitted,
    Failed,
    StepEnded,
    EpochEnded,
    Validating,
    Validated,
    Best,
    Remeasured,
    Ended,
)


def note(journal: Journal, event: OneKind) -> OneKind:
    """Write an event; return it as it will be read back. It is on disk by then."""
    record = journal.append(event.kind, asdict(event))
    return cast(OneKind, _read(journal, record))


def read(journal: Journal) -> list[Event]:
    """Return the events of a journal in order."""
    found = (_read(journal, record) for record in journal.records())
    return [event for event in found if event is not None]


def _read(journal: Journal, record: JsonObject) -> Event | None:
    try:
        return _event(record)
    except (KeyError, TypeError) as error:
        raise DamagedFile(
            f"{journal.path} has an event {record.get('event')!r} that cannot be read: "
            f"{type(error).__name__}: {error}",
            hint="restore the file from a copy, or start again in another finetuning.output_dir",
        ) from error


def _event(record: JsonObject) -> Event | None:
    match record.get("event"):
        case Registered.kind:
            return Registered(_text(record, "name"), _text(record, "url"))
        case InputsNoted.kind:
            return _inputs(record)
        case Restarted.kind:
            return Restarted(_text(record, "reason"), _curriculum(record))
        case Admitted.kind:
            trained = [_int({"trained": each}, "trained") for each in _list(record, "trained")]
            line = cast(StepLine, _object(record, "line", ("epoch", "positions")))
            return Admitted(_int(record, "epoch"), trained, line, _curriculum(record))
        case Submitted.kind:
            return Submitted(_int(record, "epoch"), _ref(record), _line(record), _curriculum(record))
        case Failed.kind:
            return Failed(_int(record, "epoch"), _text_or_none(record, "message"))
        case StepEnded.kind:
            return StepEnded(_int(record, "epoch"), _line(record), _curriculum(record))
        case EpochEnded.kind:
            return EpochEnded(_int(record, "epoch"), _line(record), _curriculum(record))
        case Validating.kind:
            share = _number_or_none(record, "pass_share")
            return Validating(_int(record, "epoch"), _int(record, "step"), share)
        case Validated.kind:
            return Validated(_entry(record))
        case Remeasured.kind:
            return Remeasured(_entry(record))
        case Best.kind:
            return Best(
                _int(record, "step"), _number_or_none(record, "reward"), _text_or_none(record, "path")
            )
        case Ended.kind:
            return Ended(_text(record, "outcome"), _int(record, "num_epochs"))
        case _:
            return None


def _inputs(record: JsonObject) -> InputsNoted:
    known = frozenset(map(str, Role))
    listed = [_object({"input": each}, "input", ("role",)) for each in _list(record, "inputs")]
    inputs = [
        RunInput(
            Role(_text(each, "role")),
            _text(each, "name"),
            _text(each, "path"),
            _text(each, "sha256"),
            _int(each, "count"),
        )
        for each in listed
        if each["role"] in known
    ]
    changed = [Role(str(role)) for role in _list(record, "changed") if role in known]
    return InputsNoted(inputs, changed, [str(line) for line in _list(record, "changes")])


def _line(record: JsonObject) -> StepLine:
    return cast(StepLine, _object(record, "line", ("epoch",)))


def _entry(record: JsonObject) -> ValidationEntry:
    return cast(ValidationEntry, _object(record, "entry", ("epoch", "step", "avg_reward")))


def _ref(record: JsonObject) -> TrainingJobRef:
    ref = _object(record, "ref", ())
    return TrainingJobRef(_text(ref, "run_id"), _text(ref, "backend"), _object(ref, "metadata", ()))


def _curriculum(record: JsonObject) -> CurriculumState:
    state = _object(record, "curriculum", ())
    percentile = _number_or_none(state, "current_percentile")
    if percentile is None:
        raise TypeError("current_percentile is null")
    counts = (_int(state, name) for name in ("last_expansion_epoch", "total_groups", "included_groups"))
    return CurriculumState(percentile, *counts)


def _object(record: JsonObject, name: str, required: tuple[str, ...]) -> JsonObject:
    found = as_object(record[name])
    if found is None:
        raise TypeError(f"{name} is not a JSON object")
    if missing := [key for key in required if key not in found]:
        raise KeyError(f"{name}.{missing[0]}")
    return found


def _list(record: JsonObject, name: str) -> list[JsonValue]:
    value = record[name]
    if not isinstance(value, list):
        raise TypeError(f"{name} is not a list")
    return value


def _int(record: Mapping[str, object], name: str) -> int:
    value = record[name]
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, not a whole number")
    return value


def _number_or_none(record: Mapping[str, object], name: str) -> float | None:
    value = record[name]
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, not a number")
    return value


def _text(record: Mapping[str, object], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not a string")
    return value


def _text_or_none(record: Mapping[str, object], name: str) -> str | None:
    return None if record[name] is None else _text(record, name)
