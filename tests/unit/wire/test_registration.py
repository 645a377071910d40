"""A run is registered by one definition: what `finetune --dry-run` accepts, the API accepts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from insitu.harness.interfaces.settings import BackendSettings
from insitu.wire.bodies import RunBody
from insitu.wire.values import ENGINE_ARGUMENTS, INIT_ARGUMENTS

RUN = TypeAdapter(RunBody)
WORDS = st.sampled_from(["run", "a.b-c_9", "", "Run", "-x", "a" * 64, "a" * 65, "ü", "a b", "a\n", "x\x00y"])
LABELS = WORDS | st.sampled_from(["org/Model-7B", "m" * 512, "m" * 513])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
VALUES = SCALARS | st.lists(st.integers(), max_size=1) | st.dictionaries(st.just("a"), st.integers())
KEYS = ["a", "A", "_a", "a-b", "a" * 64, "a" * 65, ""]


def arguments(known: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([*known, *KEYS]), VALUES, max_size=3)


FIELDS = st.fixed_dictionaries(
    {"name": WORDS, "base_model": LABELS},
    optional={
        "project": WORDS,
        "init_args": arguments(INIT_ARGUMENTS),
        "engine_args": arguments(ENGINE_ARGUMENTS),
    },
)


def api(fields: dict[str, Any]) -> RunBody | None:
    try:
        return RUN.validate_python(fields)
    except ValidationError:
        return None


def harness(fields: dict[str, Any]) -> BackendSettings | None:
    try:
        return BackendSettings.model_validate({"ip": "localhost", "port": 7623, **fields})
    except ValidationError:
        return None


@settings(max_examples=400, deadline=None)
@given(fields=FIELDS)
@example(fields={"name": "n", "base_model": "m", "init_args": {f"a{i}": i for i in range(65)}})
@example(fields={"name": "n\n", "base_model": "m"})
def test_both_ends_accept_the_same_registrations(fields: dict[str, Any]) -> None:
    sent, configured = api(fields), harness(fields)
    given, engine = fields.get("init_args", {}), fields.get("engine_args", {})
    # Other clients may know arguments of a newer backend; `finetune` knows those of its own.
    is_known = set(given) <= set(INIT_ARGUMENTS) and set(engine) <= set(ENGINE_ARGUMENTS)
    assert (sent is not None and is_known) == (configured is not None)
    if sent is not None and configured is not None:
        assert (sent.name, sent.base_model) == (configured.name, configured.base_model)
        assert (sent.init_args, sent.engine_args) == (configured.init_args, configured.engine_args)


@pytest.mark.parametrize("value", [math.nan, math.inf, [], {}])
def test_arguments_are_plain_values(value: object) -> None:
    fields = {"name": "n", "base_model": "m", "engine_args": {"a": value}}
    assert api(fields) is None
    assert harness(fields) is None
