"""Dumps: without secrets, readable again, and compared by what a run learns from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.config import comparable, differences, dump_config, fingerprint, load_config, to_yaml
from insitu.config.values.document import read_document

Write = Callable[[str], Path]
Dump = Callable[..., dict[str, Any]]


@pytest.fixture
def dump(write: Write, basic: str) -> Dump:
    """The dump of the basic file with some overrides."""

    def _dump(*overrides: tuple[str, str]) -> dict[str, Any]:
        return dump_config(load_config(write(basic), overrides).config)

    return _dump


def test_a_dump_is_json_with_defaults_and_without_secrets(dump: Dump) -> None:
    plain = dump(("workflow.headers", '{"Authorization": "Bearer abc", "x": "abc"}'))
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["llms"]["policy"]["api_key"] == "**********"
    assert plain["trainer_adapters"]["adapter"]["backend"]["api_key"] == "**********"
    assert plain["workflow"]["headers"] == {"Authorization": "**********", "x": "**********"}
    assert plain["workflow"]["_type"] == "test_agent"
    assert plain["trajectory_builders"]["builder"]["num_generations"] == 2
    assert plain["finetuning"]["seed"] == 0


def test_secrets_in_free_settings_are_hidden_by_their_name(dump: Dump) -> None:
    args = {"api_key": "a", "HF_TOKEN": "b", "password": "", "nested": [{"client-secret": "c"}], "tokens": 5}
    assert dump(("workflow.args", json.dumps(args)))["workflow"]["args"] == {
        "api_key": "**********",
        "HF_TOKEN": "**********",
        "password": "",
        "nested": [{"client-secret": "**********"}],
        "tokens": 5,
    }


def test_yaml_of_a_dump_keeps_its_order(dump: Dump) -> None:
    text = to_yaml(dump())
    assert text.index("llms:") < text.index("workflow:") < text.index("finetuning:")
    assert read_document(text, "printed") == dump()


# PyYAML itself folds these three line breaks when they stand in a key.
text = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"))
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | text | st.from_regex(r"[-+]?[0-9]+[eE][0-9]{1,2}", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(text, plain_values, min_size=1, max_size=3))
def test_what_is_printed_reads_back_the_same(values: dict[str, Any]) -> None:
    assert read_document(to_yaml(values), "printed") == values


@given(st.dictionaries(text, plain_values, max_size=3))
def test_nothing_differs_from_itself(values: dict[str, Any]) -> None:
    again = json.loads(json.dumps(values))
    assert differences(values, again) == []
    assert fingerprint(values) == fingerprint(again)


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("finetuning.seed", "3", "finetuning.seed: 0 → 3"),
        ("finetuning.target_functions", '["a"]', 'finetuning.target_functions: ["<workflow>"] → ["a"]'),
        ("finetuning.target_model", "policy", 'finetuning.target_model: not set → "policy"'),
        ("llms.policy.model_name", "other", 'llms.policy.model_name: "tiny" → "other"'),
        ("workflow.args", '{"n": 1}', "workflow.args.n: not set → 1"),
    ],
)
def test_what_makes_another_run(dump: Dump, path: str, text: str, said: str) -> None:
    old, new = dump(), dump((path, text))
    assert said in differences(old, new)
    assert fingerprint(old) != fingerprint(new)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("finetuning.num_epochs", "9"),
        ("finetuning.max_steps", "9"),
        ("finetuning.output_dir", "elsewhere"),
        ("finetuning.run_configuration.config_file", "other.yml"),
        ("finetuning.run_configuration.override", '[["finetuning.num_epochs", "9"]]'),
        ("finetuning.run_configuration.endpoint_timeout", "9"),
        ("finetuning.rollout_timeout_seconds", "9"),
        ("eval.general.evaluator_timeout_seconds", "9"),
        ("eval.general.max_concurrency", "9"),
        ("trainer_adapters.adapter.backend.ip", "box"),
        ("trainer_adapters.adapter.backend.port", "9"),
        ("trainer_adapters.adapter.backend.api_key", "9"),
        ("llms.policy.base_url", "http://box"),
        ("llms.policy.api_key", "9"),
        ("llms.policy.request_timeout", "9"),
    ],
)
def test_what_a_resumed_run_may_change(dump: Dump, path: str, text: str) -> None:
    old, new = dump(), dump((path, text))
    assert differences(old, new) == []
    assert fingerprint(old) == fingerprint(new)


def test_comparing_changes_nothing(dump: Dump) -> None:
    plain = dump()
    before = json.dumps(plain)
    comparable(plain)
    assert json.dumps(plain) == before


def test_a_section_that_appears_or_goes(dump: Dump) -> None:
    old, new = dump(), dump()
    new["functions"] = {"tool": {"_type": "x"}}
    assert differences(old, new) == ['functions.tool._type: not set → "x"']
    assert differences(new, old) == ['functions.tool._type: "x" → not set']
    del old["functions"]
    assert fingerprint(old) == fingerprint(dump())


def test_a_setting_that_an_earlier_release_did_not_have_changes_nothing_until_it_is_set(dump: Dump) -> None:
    old = dump()
    del old["finetuning"]["groups_per_step"]
    assert fingerprint(old) == fingerprint(dump())
    new = dump(("finetuning.groups_per_step", "16"))
    assert differences(old, new) == ["finetuning.groups_per_step: not set → 16"]
    assert fingerprint(old) != fingerprint(new)
