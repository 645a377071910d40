"""`-o path value`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from insitu.config import Config, load_config
from insitu.config.values.overrides import override
from insitu.errors import InvalidRequest

Write = Callable[[str], Path]


def changed(text: str, *overrides: tuple[str, str]) -> dict[str, Any]:
    return override(yaml.safe_load(text), overrides, Config)


def at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[int(part) if isinstance(values, list) else part]
    return values


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("finetuning.num_epochs", "50", 50),
        ("finetuning.seed", "3", 3),
        ("finetuning.enabled", "false", False),
        ("finetuning.enabled", "No", False),
        ("finetuning.rollout_timeout_seconds", "1e2", 100.0),
        ("finetuning.target_model", "policy", "policy"),
        ("finetuning.target_model", "null", None),
        ("finetuning.output_dir", "12", "12"),
        ("finetuning.target_functions", '["a", "b"]', ["a", "b"]),
        ("finetuning.target_functions.0", "a", "a"),
        ("finetuning.curriculum_learning.enabled", "true", True),
        ("finetuning.curriculum_learning.random_subsample", "0.5", 0.5),
        ("finetuning.curriculum_learning", '{"enabled": true}', {"enabled": True}),
        ("finetuning.early_stopping.patience", "2", 2),
        ("finetuning.early_stopping", "none", None),
        ("finetuning.run_configuration.endpoint", "http://x", "http://x"),
        ("finetuning.reward_function.name", "true", "true"),
        ("llms.policy.temperature", "1", 1),
        ("llms.policy.api_key", "123", "123"),
        ("llms.policy.seed", "4", 4),
        ("llms.policy.model", "bigger", None),
        ("eval.general.dataset.file_path", "other.json", "other.json"),
        ("eval.evaluators.reward.tolerance", "0.5", 0.5),
        ("eval.evaluators.reward.key", "5", "5"),
        ("trajectory_builders.builder.num_generations", "8", 8),
        ("trainer_adapters.adapter.backend.port", "9", 9),
        ("trainer_adapters.adapter.backend.engine_args", '{"max_num_seqs": 4}', {"max_num_seqs": 4}),
        ("workflow.llm", "7", "7"),
    ],
)
def test_values_take_the_type_that_is_there(basic: str, path: str, text: str, wanted: Any) -> None:
    result = changed(basic, (path, text))
    if path == "llms.policy.model":
        assert (result["llms"]["policy"]["model_name"], "model" in result["llms"]["policy"]) == (text, False)
        return
    assert at(result, path) == wanted
    assert type(at(result, path)) is type(wanted)


def test_the_source_stays_as_it_is(basic: str) -> None:
    source = yaml.safe_load(basic)
    override(source, [("finetuning.target_functions.0", "a"), ("llms.policy.seed", "1")], Config)
    assert source == yaml.safe_load(basic)


def test_values_that_no_model_describes() -> None:
    text = "workflow: {_type: test_agent, llm: a, args: {n: 1, s: x, deep: [{b: true}], none: null}}"
    result = changed(
        text,
        ("workflow.args.n", "0.5"),
        ("workflow.args.s", "2"),
        ("workflow.args.deep.0.b", "off"),
        ("workflow.args.none", "[1]"),
    )
    assert result["workflow"]["args"] == {"n": 0.5, "s": "2", "deep": [{"b": False}], "none": [1]}


def test_a_name_with_dots() -> None:
    text = "llms: {qwen2.5: {_type: openai, model: x}}"
    result = changed(text, ("llms.qwen2.5.model", "y"), ("llms.qwen2.5.temperature", "0.1"))
    assert result["llms"]["qwen2.5"] == {"_type": "openai", "model": "y", "temperature": 0.1}


def test_a_section_that_the_file_leaves_empty() -> None:
    assert changed("finetuning:", ("finetuning.seed", "2")) == {"finetuning": {"seed": 2}}
    assert changed("{}", ("finetuning.seed", "2")) == {"finetuning": {"seed": 2}}


def test_later_overrides_win(basic: str) -> None:
    result = changed(basic, ("finetuning.seed", "2"), ("finetuning.seed", "5"))
    assert result["finetuning"]["seed"] == 5


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        (
            "finetuning.num_epoch",
            "5",
            "finetuning.num_epoch: `finetuning` has no `num_epoch`; did you mean `num_epochs`?",
        ),
        ("fintuning.num_epochs", "5", "there is no `fintuning`; did you mean `finetuning`?"),
        ("llms.polcy.seed", "5", "`llms` has no `polcy`; did you mean `policy`?"),
        ("llms.policy.temprature", "5", "did you mean `temperature`?"),
        ("trainer_adapters.adapter.backend.prt", "5", "did you mean `port`?"),
        ("functions.f.x", "5", "`functions` has no `f` (it is empty)"),
        ("finetuning.num_epochs.x", "5", "`finetuning.num_epochs` is a single value: it has no `x`"),
        ("eval.general.output.s3.bucket", "5", "`eval.general.output.s3` is not set: it has no `bucket`"),
        ("finetuning.target_functions.1", "5", "`1` is not an index of the list (valid: 0 to 0)"),
        ("finetuning.target_functions.-1", "5", "`-1` is not an index"),
        ("finetuning.num_epochs", "many", "finetuning.num_epochs: 'many' cannot be read as a whole number"),
        ("finetuning.num_epochs", "0.5", "'0.5' cannot be read as a whole number"),
        ("finetuning.enabled", "perhaps", "'perhaps' cannot be read as true or false"),
        ("finetuning.rollout_timeout_seconds", "nan", "'nan' cannot be read as a number"),
        ("finetuning.target_functions", "a,b", "'a,b' cannot be read as a list in JSON"),
        ("finetuning.target_functions", '{"a": 1}', "cannot be read as a list in JSON"),
        ("finetuning.early_stopping", "[1]", "cannot be read as a mapping in JSON"),
        ("", "5", "there is no ``"),
    ],
)
def test_what_is_refused(basic: str, path: str, text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        changed(basic, (path, text))
    assert said in error.value.message


def test_all_refusals_at_once(basic: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        changed(basic, ("finetuning.num_epoch", "5"), ("finetuning.seed", "x"))
    assert error.value.message.startswith("-o: 2 problems")


def test_the_result_is_validated_again(write: Write, basic: str) -> None:
    loaded = load_config(write(basic), [("finetuning.num_epochs", "50"), ("llms.policy.temperature", "0.5")])
    assert loaded.config.finetuning.num_epochs == 50
    assert loaded.source["finetuning"]["num_epochs"] == 50
    assert loaded.config.llms["policy"].options == {"temperature": 0.5}
    with pytest.raises(InvalidRequest, match=r"finetuning.num_epochs: should be greater than or equal to 1"):
        load_config(write(basic), [("finetuning.num_epochs", "0")])
    with pytest.raises(InvalidRequest, match="no entry `other`"):
        load_config(write(basic), [("finetuning.trainer", "other")])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), plain, min_size=1, max_size=4), st.data())
def test_any_value_written_out_replaces_itself(args: dict[str, Any], data: st.DataObject) -> None:
    """Writing the present value of a free setting changes nothing, whatever its type."""
    source = {"workflow": {"_type": "unregistered", "args": args}}
    name = data.draw(st.sampled_from(sorted(args)))
    value = args[name]
    text = value if isinstance(value, str) else json.dumps(value)
    assert override(source, [(f"workflow.args.{name}", text)], Config) == source


@given(st.integers(min_value=1))
def test_any_whole_number(number: int) -> None:
    source = {"finetuning": {"num_epochs": 1}}
    assert (
        override(source, [("finetuning.num_epochs", str(number))], Config)["finetuning"]["num_epochs"]
        == number
    )


@given(st.text(), st.text())
def test_no_path_crashes(path: str, text: str) -> None:
    """A path is applied or refused with a message."""
    with contextlib.suppress(InvalidRequest):
        override({"finetuning": {"target_functions": ["a"]}}, [(path, text)], Config)


@pytest.mark.parametrize("there", ["", "    training: {learning_rate: 1e-4}\n"], ids=["nothing", "a part"])
def test_settings_of_a_step_are_reached_whether_the_file_has_them_or_not(
    write: Write, basic: str, there: str
) -> None:
    adapter = basic.replace("_type: test_adapter\n", f"_type: openpipe_art_trainer_adapter\n{there}")
    place = "trainer_adapters.adapter.training"
    given = [
        (f"{place}.num_passes", "3"),
        (f"{place}.clip_high", "0.5"),
        (f"{place}.max_sampler_weight", "null"),
    ]
    config = load_config(write(adapter), given).config
    training = config.trainer_adapters["adapter"].training  # type: ignore[attr-defined]
    assert (training.num_passes, training.clip_high, training.max_sampler_weight) == (3, 0.5, None)
    assert training.learning_rate == (1e-4 if there else 5e-5)
    for path, value, said in (
        (f"{place}.num_passes", "50", f"{place}.num_passes: should be less than or equal to 32, not 50"),
        (f"{place}.num_passes", "1.5", f"{place}.num_passes: '1.5' cannot be read as a whole number"),
        (f"{place}.num_pases", "2", f"`{place}` has no `num_pases`; did you mean `num_passes`?"),
        (place, "3", f"{place}: '3' cannot be read as a mapping in JSON"),
    ):
        with pytest.raises(InvalidRequest) as error:
            load_config(write(adapter), [(path, value)])
        assert said in error.value.message
