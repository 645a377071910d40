"""Every message survives the wire; answers ignore unknown fields, bodies reject them."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Interval, MaxLen, MinLen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.types import StepSettings
from insitu.wire import values
from insitu.wire.answers import Health, JobInfo, RunInfo
from insitu.wire.bodies import RunBody
from insitu.wire.group_upload import InlineCall, TrajectoryHead
from insitu.wire.listed_calls import ListedCall, RolloutRecord
from insitu.wire.message import Answer, Malformed, Message, encode, read, read_object
from insitu.wire.step_settings import METHODS_OF

from .test_every_route import messages

KINDS = [k for k in messages() if dataclasses.is_dataclass(k)]
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8)
JSON = st.dictionaries(
    TEXT.filter(lambda key: key not in ("__proto__", "prototype", "constructor")),
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    max_size=3,
)


def _interval(hint: Any, metadata: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    bounds = next((each for each in metadata if isinstance(each, Interval)), Interval())
    low = bounds.ge if bounds.ge is not None else bounds.gt
    high = bounds.le if bounds.le is not None else bounds.lt
    low, high = typing.cast("float | None", low), typing.cast("float | None", high)
    if hint is int:
        top = 2**53 if high is None else int(high) - (bounds.lt is not None)
        return st.integers(-(2**53) if low is None else int(low) + (bounds.gt is not None), top)
    return st.floats(
        low, high, exclude_min=bounds.gt is not None, exclude_max=bounds.lt is not None, allow_nan=False,
        allow_infinity=False,
    )  # fmt: skip


def _of_text(metadata: tuple[Any, ...]) -> st.SearchStrategy[str]:
    patterns = [each.regex for each in metadata if isinstance(each, values.Pattern)]
    least = next((each.min_length for each in metadata if isinstance(each, MinLen)), 0)
    text = st.from_regex(patterns[0].replace("$", r"\Z")) if patterns else TEXT
    return text.filter(lambda value: least <= len(value) <= 512)


def strategy(hint: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values that a field may hold, by its annotation."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return strategy(arms[0], (*metadata, *hint.__metadata__))
    if origin in (typing.Union, __import__("types").UnionType):
        return st.one_of([strategy(arm) for arm in arms])
    if origin is typing.Literal:
        return st.sampled_from(arms)
    shapes = [each.shape for each in metadata if isinstance(each, values.Shaped)]
    if shapes and shapes[0] == list[ListedCall]:
        return st.lists(listed, max_size=2)
    if origin is list:
        least = next((each.min_length for each in metadata if isinstance(each, MinLen)), 0)
        # names in a list are those of different things, as the groups of a step
        return st.lists(strategy(arms[0]), min_size=least, max_size=least + 2, unique=arms[0] == values.Name)
    if origin is dict or origin is __import__("collections.abc").abc.Mapping:
        return st.dictionaries(strategy(arms[0]), strategy(arms[1]), max_size=2)
    if hint is type(None):
        return st.none()
    if hint is bool:
        return st.booleans()
    if hint is str:
        return _of_text(metadata)
    if hint in (int, float):
        return _interval(hint, metadata)
    if isinstance(hint, type) and issubclass(hint, Message):
        return whole(hint)
    if isinstance(hint, type) and issubclass(hint, __import__("enum").Enum):
        return st.sampled_from(list(hint))
    if hint is object:  # any JSON value
        return st.one_of(JSON, TEXT, st.booleans(), st.none(), st.integers(-(2**53), 2**53))
    assert hint is dict, hint
    return JSON


def whole(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Messages of one kind whose fields are in range and fit each other."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(typing.cast("Any", kind))]
    made = st.fixed_dictionaries({name: strategy(hints[name]) for name in names})
    if kind is TrajectoryHead:
        made = made.map(_fitting_head)
    if kind is StepSettings:
        made = made.map(_fitting_penalty).map(_fitting_method)
    if kind is RunBody:
        made = made.map(lambda f: f | {"fork_from": None if f["init_from"] else f["fork_from"]})
    if kind is InlineCall:
        made = made.map(lambda f: f | {"logprobs": [-0.5] * len(f["output_ids"]), "finish_reason": "stop"})
    return made.map(lambda fields: typing.cast("Any", kind)(**fields))


def _fitting_penalty(fields: dict[str, Any]) -> dict[str, Any]:
    longest, buffer = fields["overlong_tokens"], fields["overlong_buffer"]
    if longest is None:
        return fields | {"overlong_buffer": None, "overlong_penalty": None}
    return fields | {"overlong_buffer": buffer and min(buffer, longest)}


def _fitting_method(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the method does not use."""
    used = {name for name in fields if fields["method"] in METHODS_OF.get(name, (fields["method"],))}
    default = dataclasses.asdict(StepSettings())
    chosen = {name: value if name in used else default[name] for name, value in fields.items()}
    return chosen | ({"teacher": fields["teacher"] or "big"} if fields["method"] == "distill" else {})


def _fitting_head(fields: dict[str, Any]) -> dict[str, Any]:
    ids = sorted(set(fields["call_ids"]))
    number = 0 if ids else fields["num_inline_calls"] % 3 + 1
    rewards = None if fields["step_rewards"] is None else [0.25] * (len(ids) or number)
    ending = values.Ending.LENGTH if fields["ending"] != "completed" else values.Ending.COMPLETED
    return fields | {"call_ids": ids, "num_inline_calls": number, "step_rewards": rewards, "ending": ending}


listed = st.fixed_dictionaries(
    {
        "id": TEXT, "rollout_id": TEXT | st.none(), "model": TEXT, "run": TEXT | st.none(),
        "policy_step": st.integers(0, 9), "policy_version": TEXT, "finish_reason": TEXT,
    },
    optional={
        "prompt_ids": st.lists(st.integers(0, 99), max_size=3),
        "messages": st.none() | st.lists(JSON, max_size=2),
        "newer": st.integers(-9, 9),
    },
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_message_is_the_same_behind_the_wire(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(whole(kind))
    assert read(kind, encode(message)) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_unknown_fields_are_rejected_in_bodies_and_ignored_in_answers(kind: Any, data: st.DataObject) -> None:
    message = data.draw(whole(kind))
    more = encode(message)[:-1] + (b"," if len(encode(message)) > 2 else b"") + b'"newer_field":1}'
    if issubclass(kind, Answer):
        assert read(kind, more) == message
    else:
        with pytest.raises(Malformed, match="newer_field: Extra inputs are not permitted"):
            read(kind, more)


def test_stored_settings_are_read_whatever_they_are() -> None:
    fields = {"num_passes": 50, "of_the_future": True}
    job = {
        "id": "j", "run": "r", "state": "queued", "group_ids": [], "settings": fields, "attempt": 0,
        "phase": "", "progress": 0, "step": None, "metrics": {}, "error": None, "created_at": 1,
        "started_at": None, "finished_at": None,
    }  # fmt: skip
    assert read_object(JobInfo, job).settings == StepSettings(num_passes=50)
    with pytest.raises(Malformed, match="settings"):
        read_object(JobInfo, job | {"settings": 3})


def test_what_is_no_message_is_named() -> None:
    with pytest.raises(Malformed, match="service: Field required"):
        read(Health, b"{}")
    with pytest.raises(Malformed, match="Invalid JSON"):
        read(Health, b"<html>")
    with pytest.raises(Malformed, match="name: String should match pattern"):
        read_object(RunBody, {"name": "No Name", "base_model": "m"})
    with pytest.raises(Malformed, match="engine_args"):
        read_object(RunBody, {"name": "n", "base_model": "m", "engine_args": {"a": [1]}})


def test_a_listed_call_keeps_the_fields_of_a_newer_gateway() -> None:
    call = {"id": "c", "rollout_id": None, "model": "m", "run": None, "policy_step": 0, "policy_version": "v"}
    with pytest.raises(Malformed, match="finish_reason: Field required"):
        read_object(RolloutRecord, {"calls": [call]})
    whole_call = call | {"finish_reason": "stop", "newer": [1]}
    assert read_object(RolloutRecord, {"calls": [whole_call]}).calls == [whole_call]


def test_rows_become_answers_by_name() -> None:
    row = type("Row", (), dict.fromkeys(RunInfo.__dataclass_fields__, 1))
    assert RunInfo.of(row()).name == 1
    assert MaxLen(64) in values.Arguments.__metadata__
