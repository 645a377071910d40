"""Variables of the environment in the values of the file."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.config import load_config
from insitu.config.values.interpolation import interpolate
from insitu.errors import InvalidRequest

ENVIRONMENT = {"HOST": "box", "N": "7", "EMPTY": "", "RATE": "1e-6", "LIST": "[1, 2]", "DAY": "2024-01-01"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("${HOST}", "box"),
        ("http://${HOST}:${N}/v1", "http://box:7/v1"),
        ("${N}", 7),
        ("n${N}", "n7"),
        ("${ABSENT:-5}", 5),
        ("${ABSENT:-}", None),
        ("x${ABSENT:-}", "x"),
        ("${EMPTY:-other}", "other"),
        ("${EMPTY}", None),
        ("${RATE}", 1e-6),
        ("${ABSENT:-false}", False),
        ("${ABSENT:-http://a:1/b}", "http://a:1/b"),
        ("${LIST}", "[1, 2]"),
        ("${DAY}", "2024-01-01"),
        ("$${HOST}", "${HOST}"),
        ("$$${N}", "$${N}"),
        ("$HOST", "$HOST"),
        ("$", "$"),
    ],
)
def test_what_a_value_becomes(text: str, wanted: Any) -> None:
    result = interpolate({"a": [text]}, ENVIRONMENT)
    assert result.problems == []
    assert result.value == {"a": [wanted]}
    assert type(result.value["a"][0]) is type(wanted)


def test_problems_name_variable_and_place() -> None:
    document = {"llms": {"a": {"api_key": "${ABSENT}", "base_url": "${bad-name}"}}, "list": [1, "${open"]}
    lines = [str(problem) for problem in interpolate(document, ENVIRONMENT).problems]
    assert lines[0].startswith("llms.a.api_key: the environment variable ABSENT is not set")
    assert lines[1].startswith("llms.a.base_url: `${` must be followed by a name")
    assert lines[2].startswith("list.1: `${` must be followed by a name")


def test_keys_and_other_values_stay() -> None:
    document = {"${HOST}": 1, "b": None, "c": 2.5}
    assert interpolate(document, ENVIRONMENT).value == document


@given(st.text())
def test_any_text_survives_escaped(text: str) -> None:
    escaped = text.replace("${", "$${")
    result = interpolate({"a": escaped}, {})
    assert (result.value, result.problems) == ({"a": text}, [])


names = st.text(string.ascii_letters + "_", min_size=1, max_size=8)


@given(names, st.text(), st.text("abc/:. ", max_size=5))
def test_any_content_is_put_in_as_it_is(name: str, content: str, around: str) -> None:
    """Also content that looks like an interpolation: it is not looked at again."""
    result = interpolate({"a": f"<{around}${{{name}}}>"}, {name: content})
    assert result.value == {"a": f"<{around}{content}>"}


@given(names, st.text())
def test_a_whole_value_keeps_its_text(name: str, content: str) -> None:
    result = interpolate({"a": f"${{{name}}}"}, {name: content})
    assert result.texts == {("a",): content}


@given(names, st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_come_back_as_numbers(name: str, value: float) -> None:
    written = str(value).lower()
    assert interpolate({"a": f"${{{name}}}"}, {name: written}).value == {"a": value}


Write = Callable[[str], Path]


def test_in_a_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "0123456789")
    monkeypatch.setenv("EPOCHS", "4")
    monkeypatch.setenv("MODEL", "12:30")
    loaded = load_config(
        write(
            "llms: {a: {_type: openai, model: '${MODEL}', api_key: '${KEY}', base_url: '${URL_ABSENT:-}'}}\n"
            "finetuning: {num_epochs: '${EPOCHS}', output_dir: '${N_ABSENT:-2}', seed: '${SEED_ABSENT:-3}'}\n"
        )
    )
    llm, finetuning = loaded.config.llms["a"], loaded.config.finetuning
    assert llm.api_key.get_secret_value() == "0123456789"
    assert (llm.model_name, llm.base_url) == ("12:30", None)
    assert (finetuning.num_epochs, finetuning.output_dir, finetuning.seed) == (4, Path("2"), 3)
    assert loaded.source["finetuning"]["seed"] == 3


def test_an_override_is_not_undone_by_the_text_of_a_variable(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAME", "1")
    path = write("workflow: {_type: test_agent, llm: '${NAME}'}")
    workflow: Any = load_config(path).config.workflow
    assert workflow.llm == "1"
    with pytest.raises(InvalidRequest, match=r"workflow.llm: should be a valid string, not 2"):
        load_config(path, [("workflow", '{"_type": "test_agent", "llm": 2}')])


def test_an_unset_variable_in_a_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT_KEY", raising=False)
    with pytest.raises(InvalidRequest) as error:
        load_config(write("llms: {a: {_type: openai, model: x, api_key: '${ABSENT_KEY}'}}"))
    assert "llms.a.api_key: the environment variable ABSENT_KEY is not set" in error.value.message
