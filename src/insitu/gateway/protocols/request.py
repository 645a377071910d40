"""A client's request: what is known of it is checked, and the engine gets nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.bounds import check_sampling, check_stops, checked_choice, checked_tools
from insitu.gateway.protocols.grammars import check_grammars
from insitu.gateway.protocols.parts import known_fields
from insitu.gateway.shared.settings import Limits

# Sent with every call, so that no default of the engine or of the model's files applies.
NEUTRAL_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop": [],
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
SAMPLING_FIELDS = frozenset(NEUTRAL_SAMPLING) | {
    "seed",
    "max_tokens",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "response_format",
}
EXTRA_SAMPLING = (SAMPLING_FIELDS | {"chat_template_kwargs"}) - {"max_tokens", "stop", "response_format"}
"""Parameters of the engine's chat requests that the other protocols accept under the same names."""
# Handled here, or bookkeeping of OpenAI's own service that has no effect on an answer.
HANDLED_FIELDS = frozenset({"model", "n", "stream", "stream_options", "logprobs", "return_token_ids"})
BOOKKEEPING_FIELDS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_retention", "prompt_cache_options"}
)
_STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
COMMON_FIELDS = SAMPLING_FIELDS | HANDLED_FIELDS | BOOKKEEPING_FIELDS
MASKING_FIELDS = (
    *("structured_outputs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    "thinking_token_budget",
)
"""Sampling parameters that mask or shift the distribution: the free model's logprobs are then others."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One call as the client requested it."""

    model: str
    body: dict[str, Any]
    """The engine's render request: prompt and sampling, every parameter explicit."""
    stream: bool
    include_usage: bool
    num_logprobs: int | None
    """Alternatives per token that the client wants to see; None if it did not ask for logprobs."""
    return_token_ids: bool
    stops: list[str] = field(default_factory=list[str])
    num_choices: int = 1
    """Answers requested, `n`; each is a call of its own."""
    original: dict[str, Any] = field(default_factory=dict[str, Any])
    """The client's original request, if the answer repeats parts of it."""

    @property
    def keeps_stop(self) -> bool:
        return bool(self.body["include_stop_str_in_output"])


def load_body(data: bytes, limits: Limits) -> dict[str, Any]:
    """Parse the JSON object of a request body."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body is not a JSON object.")
    parsed = cast("dict[str, Any]", body)
    if _depth(parsed, limits.max_json_depth) > limits.max_json_depth:
        raise InvalidRequest(f"The body is nested deeper than {limits.max_json_depth} levels.")
    return parsed


def common_request(
    body: dict[str, Any], own_fields: frozenset[str], num_logprobs: int | None, limits: Limits
) -> CallRequest:
    """Check what chat and plain completions have in common. `own_fields` are the protocol's own keys."""
    body = known_fields(body, own_fields | COMMON_FIELDS)
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise InvalidRequest("`model` is missing.", hint="GET /v1/models lists what is served")
    if num_logprobs is not None and not 0 <= num_logprobs <= limits.max_top_logprobs:
        raise InvalidRequest(
            f"{num_logprobs} logprobs per token were requested; the limit is {limits.max_top_logprobs}."
        )
    given = {k: v for k, v in body.items() if k in own_fields | SAMPLING_FIELDS}
    given["stop"] = stops = check_stops(given.get("stop", []))
    check_sampling(given, limits)
    if "tools" in given:
        given["tools"] = checked_tools(given["tools"])
    if "tool_choice" in given:
        given["tool_choice"] = checked_choice(given["tool_choice"], given.get("tools", []))
    check_grammars(given, limits)
    options = known_fields(check_object(body, "stream_options"), _STREAM_OPTIONS, "stream_options")
    return CallRequest(
        model=body["model"],
        body={**NEUTRAL_SAMPLING, **given},
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        num_logprobs=num_logprobs,
        return_token_ids=bool(body.get("return_token_ids")),
        stops=stops,
        num_choices=check_count(body, "n", limits.max_choices) or 1,
    )


def check_object(body: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an optional object of the body; empty if it is missing."""
    value = body.get(key)
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"`{key}` must be an object.")
    return cast("dict[str, Any]", value or {})


def check_count(body: dict[str, Any], key: str, limit: int) -> int | None:
    """Return an optional positive integer of the body, within its limit."""
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidRequest(f"`{key}` is {value!r}; it must be an integer from 1 to {limit}.")
    return value


def _depth(root: dict[str, Any], limit: int) -> int:
    """Return the nesting depth of a JSON object; stop counting just beyond the limit."""
    level: list[object] = [root]
    depth = 0
    while level and depth <= limit:
        children: list[object] = []
        for value in level:
            inner = cast("dict[str, object]", value).values() if isinstance(value, dict) else value
            children.extend(filter(_nests, cast("Iterable[object]", inner)))
        level, depth = children, depth + 1
    return depth


def _nests(value: object) -> bool:
    return isinstance(value, (dict, list))
