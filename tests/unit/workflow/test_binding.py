"""Trained models are reached through the rollout's own address, others as configured."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import SecretStr

from insitu.errors import InvalidRequest
from insitu.types import gateway_of
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


@pytest.mark.parametrize(
    "url", ["http://localhost:8000/v1", "http://127.0.0.1:8000", "http://[::1]:8000/v1/"]
)
def test_an_untrained_model_of_the_same_gateway_is_bound(url: str) -> None:
    llms = {"policy": Entry(), "judge": Entry("big", SecretStr(""), url)}
    binding = LLMBinding(llms, frozenset({"policy"}), "my-run", "http://127.0.0.1:8000", "gateway-key")
    judge = binding.settings("judge", "r1", "plan")
    assert judge.base_url == "http://127.0.0.1:8000/rollouts/r1/functions/plan/v1"
    assert judge.rollout_url == "http://127.0.0.1:8000/rollouts/r1/v1"
    assert (judge.model, judge.api_key) == ("big", "gateway-key")
    assert judge.headers == {"x-insitu-rollout": "r1", "x-insitu-function": "plan"}


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1", "http://127.0.0.1:8000/x/v1"]
)
def test_another_place_is_not_the_gateway(url: str) -> None:
    llms = {"judge": Entry("big", SecretStr("own"), url)}
    judge = LLMBinding(llms, frozenset(), "my-run", "http://127.0.0.1:8000", "gateway-key").settings(
        "judge", "r1"
    )
    assert (judge.base_url, judge.api_key, judge.headers) == (url, "own", {})
    assert judge.rollout_url == url


def test_all_calls_of_a_rollout_go_to_one_of_several_gateways() -> None:
    urls = ("http://127.0.0.1:8000", "http://127.0.0.1:8001", "http://127.0.0.1:8002")
    llms = {"policy": Entry(), "judge": Entry("big", SecretStr(""), "http://localhost:8001/v1")}
    binding = LLMBinding(
        llms, frozenset({"policy"}), "my-run", urls[0], "gateway-key", further_gateways=urls[1:]
    )
    used: Counter[str] = Counter()
    for index in range(300):
        rollout = f"run.e0.{index}"
        addresses = {
            binding.settings(name, rollout, function).base_url.partition("/rollouts/")[0]
            for name in llms
            for function in (None, "plan")
        }
        (address,) = addresses
        assert address == gateway_of(urls, rollout)
        used[address] += 1
    assert set(used) == set(urls)
    assert min(used.values()) > 70
    assert binding.settings("policy").base_url == "http://127.0.0.1:8000/v1"


def test_keys_are_not_shown() -> None:
    assert "key" not in repr(BINDING.settings("policy")).replace("api_key", "")
    assert "gateway-key" not in repr(BINDING)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean `policy`"):
        BINDING.settings("polcy")
