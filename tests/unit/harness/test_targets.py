"""Which calls of a rollout are trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from insitu.config.load import parse_config
from insitu.errors import InvalidRequest
from insitu.harness.assembly import bind_llms
from insitu.harness.collect.targets import Targets
from insitu.harness.interfaces.trained_model import TrainedModel

MODEL = TrainedModel("my-run", "base/model", "http://10.0.0.1:8000", "key")


def call(
    run: str | None = "my-run",
    function: str | None = None,
    model: str = "my-run",
    finish_reason: str = "stop",
) -> dict[str, Any]:
    name = f"{run}-{function}-{model}-{finish_reason}"
    return {"id": name, "run": run, "function": function, "model": model, "finish_reason": finish_reason}


SEVERAL = replace(MODEL, further_gateways=("http://10.0.0.1:8001", "http://10.0.0.1:8002"))


@pytest.mark.parametrize(
    ("base_url", "urls"),
    [
        (None, SEVERAL.gateway_urls),
        ("http://10.0.0.1:8000/v1", SEVERAL.gateway_urls),
        ("http://10.0.0.1:8001/v1", SEVERAL.gateway_urls),
        ("https://proxy/insitu/v1", ("https://proxy/insitu",)),
    ],
)
def test_rollouts_use_all_gateways_unless_another_address_is_given(
    base_url: str | None, urls: tuple[str, ...]
) -> None:
    entry = {"model_name": "my-run"} | ({} if base_url is None else {"base_url": base_url})
    assert bind_llms(config(policy=entry), SEVERAL).gateway_urls == urls


def test_only_calls_of_the_run_and_of_targeted_functions_are_chosen() -> None:
    calls = [call(), call(function="planner"), call(run=None, model="base/model"), call(run="other")]
    assert Targets("my-run", frozenset({"<workflow>"})).chosen(calls) == calls[:1]
    assert Targets("my-run", frozenset({"planner"})).chosen(calls) == calls[1:2]
    assert Targets("my-run", frozenset({"planner", "<workflow>"})).chosen(calls) == calls[:2]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"run": None, "model": "base/model"}, "other_model"),
        ({"run": "other", "model": "other", "function": "planner"}, "other_model"),
        ({"model": "my-run@3", "function": "planner"}, "other_model"),
        ({"run": None, "model": "base/model", "finish_reason": "broken"}, "other_model"),
        ({}, "other_function"),
        ({"function": "worker", "finish_reason": "cancelled"}, "other_function"),
        ({"function": "planner", "finish_reason": "cancelled"}, "incomplete"),
        ({"function": "planner", "finish_reason": "broken"}, "incomplete"),
        ({"function": "planner", "finish_reason": "length"}, None),
    ],
)
def test_what_is_not_trained_has_a_kind(fields: dict[str, Any], kind: str | None) -> None:
    assert Targets("my-run", frozenset({"planner"})).dropped_as(call(**fields)) == kind


def test_no_call_at_all_names_the_address_that_should_have_been_used() -> None:
    reason = Targets("my-run", frozenset({"<workflow>"}), "http://g:8000").why_none([])
    assert "no model call of this rollout passed the gateway" in reason
    assert "http://g:8000/rollouts/<id>/v1" in reason
    assert "OPENAI_BASE_URL" in reason


def test_calls_that_were_never_answered_are_not_taken_for_none() -> None:
    reason = Targets("my-run", frozenset({"<workflow>"})).why_none([], {"refused": 2, "failed": 1})
    assert "3 model calls of this rollout reached the gateway" in reason
    assert "2 refused, 1 failed" in reason


def test_calls_of_other_models_name_the_model_that_should_have_been_called() -> None:
    targets = Targets("my-run", frozenset({"<workflow>"}))
    reason = targets.why_none([call(run=None, model="base/model"), call(model="my-run@2")])
    assert "went to base/model, my-run@2, not to my-run" in reason
    assert "OPENAI_MODEL" in reason


def test_a_misspelt_function_is_shown_beside_those_that_were_seen() -> None:
    targets = Targets("my-run", frozenset({"planer"}))
    reason = targets.why_none([call(function="planner"), call(function="planner"), call()])
    assert "['planer']" in reason
    assert "planner (2)" in reason
    assert "<workflow> (1)" in reason
    assert "insitu.function" not in reason


def test_functions_that_were_never_marked_say_how_to_mark_them() -> None:
    reason = Targets("my-run", frozenset({"planner"})).why_none([call(), call()])
    assert "insitu.function('planner')" in reason
    assert "functions/planner/v1" in reason


def test_calls_that_all_broke_off_are_said_to() -> None:
    broken = [call(finish_reason="cancelled"), call(finish_reason="broken")]
    reason = Targets("my-run", frozenset({"<workflow>"})).why_none([*broken, call(function="worker")])
    assert "all 2 model calls to train on broke off" in reason
    assert "1 cancelled, 1 broken" in reason


def config(target_model: str | None = None, **llms: dict[str, Any]) -> Any:
    entries = {name: {"_type": "openai", **fields} for name, fields in llms.items()}
    return parse_config({"llms": entries, "finetuning": {"target_model": target_model}})


def test_entries_with_the_base_model_or_the_run_are_trained() -> None:
    binding = bind_llms(
        config(
            policy={"model_name": "base/model", "base_url": "http://g:8000/v1", "api_key": "own"},
            same={"model_name": "my-run"},
            judge={"model_name": "gpt", "base_url": "http://judge/v1"},
        ),
        MODEL,
    )
    assert binding.trained == {"policy", "same"}
    assert (binding.model, binding.gateway_url, binding.api_key) == ("my-run", "http://g:8000", "own")
    bound = binding.settings("policy", "r1", "<workflow>")
    assert (bound.model, bound.base_url) == ("my-run", "http://g:8000/rollouts/r1/v1")
    assert binding.settings("judge", "r1", "<workflow>").base_url == "http://judge/v1"


def test_target_model_picks_one_entry() -> None:
    policy = {"model_name": "base/model"}
    assert bind_llms(config("first", first=policy, second=policy), MODEL).trained == {"first"}


def test_without_an_address_the_backends_gateway_is_used() -> None:
    binding = bind_llms(config(policy={"model_name": "base/model"}), MODEL)
    assert (binding.gateway_url, binding.api_key) == ("http://10.0.0.1:8000", "key")


@pytest.mark.parametrize(
    ("llms", "target", "complaint"),
    [
        ({"policy": {"model_name": "base/modle"}}, None, "llms.policy: base/modle"),
        ({}, None, "the configuration has none"),
        ({"a": {"model_name": "base/model"}, "b": {"model_name": "x"}}, "b", "llms.b: x"),
        ({"a": {"model_name": "base/model"}, "b": {"model_name": "my-run"}}, "a", "llms.b calls the run"),
        (
            {
                "a": {"model_name": "base/model", "base_url": "http://one/v1"},
                "b": {"model_name": "base/model", "base_url": "http://two/v1"},
            },
            None,
            "several addresses",
        ),
    ],
)
def test_models_that_would_not_be_trained_are_refused(
    llms: dict[str, Any], target: str | None, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        bind_llms(config(target, **llms), MODEL)
