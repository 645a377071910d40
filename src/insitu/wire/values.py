"""Values that several messages share: names, ids, states and free-form JSON, each with its limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias, cast

from annotated_types import Interval, MaxLen, MinLen

from insitu.json_values import JsonObject, JsonValue, as_list, as_object

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
"""Allowed names of runs and projects: safe as a path part and in a model name."""
SEPARATOR = "~"
"""Between a project and the name of its run, `team-a~adder`: no name has it, and paths and URLs may."""
STORED_PATTERN = re.compile(rf"^({NAME_PATTERN.pattern[1:-1]}{SEPARATOR})?{NAME_PATTERN.pattern[1:]}")
"""Names of runs as they are stored, with their project if they have one."""
UPLOADED = "sha256:"
"""The beginning of the name of an uploaded adapter; the rest is the SHA-256 of its upload."""
_STEP = STORED_PATTERN.pattern.removesuffix("$") + r"(@[0-9]{1,9})?$"
INIT_PATTERN = re.compile(rf"{_STEP}|^{UPLOADED}[0-9a-f]{{64}}$")
"""Sources of a run's step 0: `<run>@<step>`, `<run>` (its newest step) or `sha256:<digest>`."""
INCOMPLETE = frozenset({"cancelled", "broken"})
"""Finish reasons of calls whose answer was cut off: recorded, but never trained on."""
_MAX_DEPTH = 32


def plain_name(text: str) -> str:
    """Return the nearest name that `NAME_PATTERN` allows; "" if nothing of the text is left."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-")[:64]


class Ending(StrEnum):
    """The outcome of a rollout."""

    COMPLETED = "completed"
    LENGTH = "length"
    CONTEXT_OVERFLOW = "context_overflow"
    STEP_LIMIT = "step_limit"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    EVALUATOR_ERROR = "evaluator_error"
    INFRASTRUCTURE = "infrastructure"


SCORED = (Ending.COMPLETED, Ending.LENGTH)
"""Endings whose reward is the evaluator's."""
POLICY_FAILURES = (Ending.CONTEXT_OVERFLOW, Ending.STEP_LIMIT, Ending.TIMEOUT)
"""Endings that the policy may have caused: `finetuning.ending_rewards` may give them a reward."""
REWARDED = (*SCORED, *POLICY_FAILURES)
"""Endings of rollouts that may be trained on."""


class RunState(StrEnum):
    REGISTERED = "registered"
    LOADING = "loading"
    READY = "ready"
    IDLE = "idle"
    """Kept and callable, but not loaded: nobody works with it. A call, a step or a registration loads it."""
    FAILED = "failed"
    CLOSED = "closed"
    DAMAGED = "damaged"
    """The ledger knows less of it than its files do: nothing of it is trained or served."""


ENDED_RUN_STATES = frozenset({RunState.FAILED, RunState.CLOSED, RunState.DAMAGED})
"""A run in one of these may be deleted."""


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GroupState(StrEnum):
    RECEIVED = "received"
    CLAIMED = "claimed"
    CONSUMED = "consumed"


class LeaseState(StrEnum):
    WAITING = "waiting"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Limit a text to a regular expression."""

    regex: str

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "str", "a pattern belongs to a text"
        schema["pattern"] = self.regex
        return schema


@dataclass(frozen=True, slots=True)
class Spelled:
    """Accept a member of an enum by its value, as JSON spells it."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        enum = handler.resolve_ref_schema(schema)
        assert enum["type"] == "enum", "only an enum is spelled"
        enum["strict"] = False
        return schema


@dataclass(frozen=True, slots=True)
class Shaped:
    """Validate by another type than the annotated one, for instance long lists by `list`."""

    shape: object

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.shape)


@dataclass(frozen=True, slots=True)
class FreeJson:
    """Check free-form JSON: finite numbers, bounded depth, none of the refused keys."""

    refused: frozenset[str]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._check, handler.generate_schema(dict))

    def _check(self, value: JsonObject) -> JsonObject:
        self._walk(value, 0)
        return value

    def _walk(self, value: object, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}")
        if (fields := as_object(value)) is not None:
            for key, item in fields.items():
                if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance] - YAML has others
                    raise ValueError(f"the key {key!r} is not text")  # noqa: TRY004 - pydantic reads ValueErrors
                if key in self.refused:
                    raise ValueError(f"the key {key!r} is refused")
                self._walk(item, depth + 1)
        elif (items := as_list(value)) is not None:
            for item in items:
                self._walk(item, depth + 1)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("numbers must be finite")


@dataclass(frozen=True, slots=True)
class Stored:
    """Read settings as they were stored: unknown fields are ignored, and a range may have narrowed since."""

    def __get_pydantic_core_schema__(self, source: type[object], handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        known = frozenset(cast("Mapping[str, object]", vars(source)["__dataclass_fields__"]))

        def build(value: object, _validate: object) -> object:
            if isinstance(value, source):
                return value
            if (fields := as_object(value)) is None:
                raise ValueError("Input should be an object")
            try:
                return source(**{name: item for name, item in fields.items() if name in known})
            except TypeError as error:
                raise ValueError(str(error)) from error

        return core_schema.no_info_wrap_validator_function(build, handler(source))


Name = Annotated[str, Pattern(NAME_PATTERN.pattern)]
StoredName = Annotated[str, Pattern(STORED_PATTERN.pattern)]
ForkFrom = Annotated[str, Pattern(_STEP)]
InitFrom = Annotated[str, Pattern(INIT_PATTERN.pattern)]
Reference = Annotated[str, Pattern(r"^[!-~]{1,256}$")]
"""An id from elsewhere (rollout, call): printable ASCII without spaces."""
Label = Annotated[str, MinLen(1), MaxLen(512), Pattern(r"^[^\x00-\x1f\x7f]*$")]
TokenIds = Annotated[list[Annotated[int, Interval(ge=0, lt=2**31)]], MinLen(1)]
Count = Annotated[int, Interval(ge=0, lt=2**53)]
StepCount = Annotated[int, Interval(ge=0, lt=2**31)]
"""The number of a step, or a number of steps."""
MAX_REWARD = 1e9
Reward = Annotated[float, Interval(ge=-MAX_REWARD, le=MAX_REWARD)]
"""Far beyond any sensible reward, and small enough that sums and squares of thousands stay exact enough."""
Scalar = (
    Annotated[str, MaxLen(1024)]
    | Annotated[int, Interval(gt=-(2**31), lt=2**31)]
    | Annotated[float, Interval(gt=-(2**31), lt=2**31)]
    | bool
    | None
)
Arguments = Annotated[
    dict[Annotated[str, Pattern(r"^[a-z][a-z0-9_]{0,63}$")], Scalar],
    MaxLen(64),
]
"""Arguments of an engine or a trainer, as Python names them."""
PARSERS = ("tool_call_parser", "reasoning_parser")
ENGINE_ARGUMENTS = (
    *("tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs", "enforce_eager"),
    *PARSERS,
)
"""Settings of the engine that a registration may override."""
DEADLINES = ("step_seconds", "score_seconds", "publish_seconds")
"""Deadlines that a registration may set."""
INIT_ARGUMENTS = ("max_seq_length", "micro_batch_tokens", *DEADLINES)
"""Limits of the model that a registration may override."""

EndingValue = Annotated[Ending, Spelled()]
RunStateValue = Annotated[RunState, Spelled()]
JobStateValue = Annotated[JobState, Spelled()]
GroupStateValue = Annotated[GroupState, Spelled()]
LeaseStateValue = Annotated[LeaseState, Spelled()]

if TYPE_CHECKING:
    AnyObject: TypeAlias = JsonObject
    """Any JSON object; only passed on."""
    AnyValue: TypeAlias = JsonValue
    """Any JSON value; only passed on."""
else:  # pydantic would look for the parts of these recursive aliases in the module of each message
    AnyObject = dict
    AnyValue = object
Metadata = Annotated[AnyObject, FreeJson(frozenset({"__proto__", "prototype", "constructor"}))]
"""Free-form JSON that a dashboard may show: no keys that pollute JavaScript prototypes."""
FreeObject = Annotated[AnyObject, FreeJson(frozenset({"__proto__"}))]
"""A tool may have a parameter called `constructor`; nothing legitimate is called `__proto__`."""
