"""Trained models are reached through the rollout's own address, others as configured."""

from __future__ import annotations

import pytest

from insitu.errors import InvalidRequest
from insitu.workflow.binding import LLMBinding, gateway_root
from tests.unit.workflow.conftest import BINDING, Entry


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("http://h:8000", "http://h:8000"),
        ("https://h/proxy/v1", "https://h/proxy"),
        ("http://v1:8000/", "http://v1:8000"),
    ],
)
def test_gateway_root(url: str, root: str) -> None:
    assert gateway_root(url) == root


@pytest.mark.parametrize("url", ["", "h:8000/v1", "ftp://h/v1", "http:///v1"])
def test_gateway_root_refuses_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidRequest, match="address of a gateway"):
        gateway_root(url)


def test_a_trained_model_is_bound_to_rollout_and_function() -> None:
    outside = BINDING.settings("policy")
    assert (outside.base_url, outside.model, outside.api_key) == (
        "http://gateway:8000/v1",
        "my-run",
        "gateway-key",
    )
    assert outside.headers == {}
    inside = BINDING.settings("policy", "r 1/x", "<workflow>")
    assert inside.base_url == "http://gateway:8000/rollouts/r%201%2Fx/v1"
    assert inside.headers == {"x-insitu-rollout": "r 1/x", "x-insitu-function": "<workflow>"}
    assert inside.call_args() == {"model": "my-run", "temperature": 0.4}
    assert (
        BINDING.settings("policy", "r1", "plan").base_url
        == "http://gateway:8000/rollouts/r1/functions/plan/v1"
    )


def test_an_untrained_model_is_not_bound() -> None:
    judge = BINDING.settings("judge-1", "r1", "plan")
    assert (judge.base_url, judge.model, judge.api_key) == ("http://judge:9000/v1", "big", "judge-key")
    assert judge.headers == {}
    assert LLMBinding({"x": Entry()}).settings("x").base_url == "https://api.openai.com/v1"


def test_keys_are_not_shown() -> None:
    assert "key" not in repr(BINDING.settings("policy")).replace("api_key", "")
    assert "gateway-key" not in repr(BINDING)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean `policy`"):
        BINDING.settings("polcy")
