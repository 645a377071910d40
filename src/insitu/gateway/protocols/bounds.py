"""Bounds on what a client chooses and an engine's worker would fail on: sampling parameters, messages, tools.

vLLM checks most of a request in its front, where an error is an answer. What passes there is written into
arrays of fixed size and type in the worker, and there an error ends the engine. `tests/gates/test_death.py`
walks vLLM's code for such places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.parts import kind_refusal, known_fields
from insitu.gateway.shared.settings import Limits

MOST_BIASES = MOST_ALLOWED_IDS = 1024
MOST_STOP_IDS = 100
"""vLLM has room for 128, and adds the model's own."""
MOST_STOPS = 4
MOST_STOP_BYTES = 4096
MOST_BAD_WORDS = 64
"""vLLM tokenises each word with and without a space before it, and has room for 128 and 1,024 tokens."""
MOST_BAD_WORD_BYTES = 512
"""UTF-8 bytes of all words and one more for each: no tokenizer makes more tokens of them."""
MOST_TOOLS = 128
TOKEN_IDS = range(2**31)
SEEDS = range(-(2**63), 2**63)

_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "name", "tool_call_id")
_IGNORED = ("annotations", "cache_control")
"""Bookkeeping that clients send back with a message, a part or a tool."""
_MESSAGE = ("role", "tool_calls", *_TEXTS, *_IGNORED)
_FUNCTION: dict[str, tuple[type, str]] = {
    "description": (str, "a string"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}


def check_sampling(given: Mapping[str, Any], limits: Limits) -> None:
    """Reject sampling parameters of a type, size or value that no engine can honour."""
    for name, (low, high) in _NUMBERS.items():
        value: object = given.get(name)
        if value is not None and (not _is_number(value) or not low <= cast("float", value) <= high):
            raise InvalidRequest(
                f"`{name}` is {_shown(value)}; it must be a number from {low:g} to {high:g}."
            )
    counts = {
        "top_k": range(-1, 2**31),
        "min_tokens": range(limits.max_output_tokens + 1),
        "thinking_token_budget": range(-1, limits.max_output_tokens + 1),
        "seed": SEEDS,
    }
    for name, wanted in counts.items():
        value = given.get(name)
        if value is not None and (not _is_whole(value) or value not in wanted):
            raise InvalidRequest(
                f"`{name}` is {_shown(value)}; it must be an integer from {wanted[0]} to {wanted[-1]}."
            )
    _check_ids(given, "stop_token_ids", MOST_STOP_IDS)
    _check_ids(given, "allowed_token_ids", MOST_ALLOWED_IDS)
    _check_biases(given.get("logit_bias"))
    _check_bad_words(given.get("bad_words"))


def check_stops(stop: object) -> list[str]:
    """Return the stop strings of a request."""
    stops = cast("list[object]", stop if isinstance(stop, list) else [stop])
    if not all(isinstance(item, str) and item for item in stops):
        raise InvalidRequest("`stop` must be a string or a list of strings.")
    texts = cast("list[str]", stops)
    _check_most("stop", len(texts), MOST_STOPS, "strings")
    _check_most("stop", sum(map(_num_bytes, texts)), MOST_STOP_BYTES, "bytes in all")
    return texts


def check_ids(ids: object, name: str) -> list[int]:
    """Return a list of token ids."""
    if not isinstance(ids, list) or not all(map(_is_whole, cast("list[object]", ids))):
        raise InvalidRequest(f"`{name}` must be a list of token ids.")
    for token in cast("list[int]", ids):
        if token not in TOKEN_IDS:
            raise InvalidRequest(f"`{name}` has the token id {_shown(token)}; ids are 0 to {TOKEN_IDS[-1]}.")
    return cast("list[int]", ids)


def checked_tools(tools: object) -> list[dict[str, Any]]:
    """Return what is known of the tools; reject what is not of OpenAI's shape, and too many."""
    if not isinstance(tools, list | None):
        raise InvalidRequest("`tools` must be a list of objects.")
    listed = cast("list[object]", tools or [])
    _check_most("tools", len(listed), MOST_TOOLS, "tools")
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(listed)]


def _tool(given: object, where: str) -> dict[str, Any]:
    tool = _object(given, where)
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"`{where}.type` is {_shown(tool.get('type'))}: only tools of the type `function`, which the "
            "agent runs itself, are supported."
        )
    tool = known_fields(tool, ("type", "function", *_IGNORED), where)
    function = _object(tool.get("function"), f"{where}.function")
    function = known_fields(function, ("name", *_FUNCTION), f"{where}.function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"`{where}.function.name` must be a string that is not empty.")
    for key, (kind, called) in _FUNCTION.items():
        if not isinstance(function.get(key), kind | None):
            raise InvalidRequest(f"`{where}.function.{key}` must be {called}.")
    return {"type": "function", "function": function}


def checked_choice(choice: object, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    """Return the choice among the tools; reject one that they cannot meet."""
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise InvalidRequest("`tool_choice` is `required`, but `tools` is empty.")
        return choice
    if not isinstance(choice, dict) or cast("dict[str, object]", choice).get("type") != "function":
        raise InvalidRequest(
            "`tool_choice` must be `none`, `auto`, `required` or an object of the type `function`."
        )
    choice = known_fields(cast("dict[str, Any]", choice), ("type", "function"), "tool_choice")
    function = _object(choice.get("function"), "tool_choice.function")
    name = known_fields(function, ("name",), "tool_choice.function").get("name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise InvalidRequest(f"`tool_choice` asks for {_shown(name)}, which is not in `tools`.")
    return {"type": "function", "function": {"name": name}}


def checked_messages(given: object, model: object) -> list[dict[str, Any]]:
    """Return what is known of the messages, each with its reasoning under the name that the engine reads."""
    if not isinstance(given, list) or not given:
        raise InvalidRequest("`messages` must be a list with at least one message.")
    listed = enumerate(cast("list[object]", given))
    return [_message(message, model, f"messages[{place}]") for place, message in listed]


def _message(given: object, model: object, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(cast("dict[str, object]", given).get("role"), str):
        raise InvalidRequest("Each message must be an object with a `role`.")
    message = known_fields(cast("dict[str, Any]", given), _MESSAGE, where)
    for key in _TEXTS:
        value: object = message.get(key)
        if value is not None and not isinstance(value, str) and not (key == "content" and _is_list(value)):
            text = "a string or a list of parts" if key == "content" else "a string"
            raise InvalidRequest(f"`{where}.{key}` must be {text}.")
    calls: object = message.pop("tool_calls", None)
    if not isinstance(calls, list | None):
        raise InvalidRequest(f"`{where}.tool_calls` must be a list of objects.")
    reasoning = message.pop("reasoning", message.pop("reasoning_content", None))
    made = {"role": message["role"], "content": message.get("content")}
    if isinstance(made["content"], list):
        parts = enumerate(cast("list[object]", made["content"]))
        made["content"] = [_part(part, model, f"{where}.content[{place}]") for place, part in parts]
    made |= {key: message[key] for key in ("refusal", "name", "tool_call_id") if key in message}
    if reasoning is not None:
        made["reasoning"] = reasoning
    if calls:
        each = enumerate(cast("list[object]", calls))
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in each]
    return made


def _part(given: object, model: object, where: str) -> dict[str, Any]:
    part = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise kind_refusal(kind, model, where)
    known = known_fields(part, ("type", kind, *_IGNORED), where)
    return {key: known[key] for key in ("type", kind) if key in known}


def _call(given: object, where: str) -> dict[str, Any]:
    call = known_fields(_object(given, where), ("id", "type", "function", "index"), where)
    function = _object(call.get("function"), f"{where}.function")
    function = known_fields(function, ("name", "arguments"), f"{where}.function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"`{where}.function.name` must be a string that is not empty.")
    if not isinstance(function.get("arguments", ""), str):
        raise InvalidRequest(f"`{where}.function.arguments` must be a string of JSON.")
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequest(f"`{where}.id` must be a string.")
    return {key: call[key] for key in ("id", "type") if key in call} | {"function": function}


def _check_ids(given: Mapping[str, Any], name: str, most: int) -> None:
    if (ids := given.get(name)) is not None:
        _check_most(name, len(check_ids(ids, name)), most, "token ids")


def _check_biases(biases: object) -> None:
    if biases is None:
        return
    for token, bias in _object(biases, "logit_bias").items():
        if not token.isdecimal() or not token.isascii() or int(token) not in TOKEN_IDS:
            raise InvalidRequest(f"`logit_bias` has the key {_shown(token)}; keys are token ids.")
        if not _is_number(bias) or not -100 <= cast("float", bias) <= 100:
            raise InvalidRequest(f"`logit_bias` of {token} is {_shown(bias)}; it must be from -100 to 100.")
    _check_most("logit_bias", len(cast("dict[str, object]", biases)), MOST_BIASES, "tokens")


def _check_bad_words(words: object) -> None:
    if words is None:
        return
    listed = cast("list[object]", words) if isinstance(words, list) else [None]
    if not all(isinstance(word, str) and word.strip() for word in listed):
        raise InvalidRequest("`bad_words` must be a list of strings that are not blank.")
    texts = cast("list[str]", listed)
    _check_most("bad_words", len(texts), MOST_BAD_WORDS, "words")
    num_bytes = sum(_num_bytes(word) + 1 for word in texts)
    _check_most("bad_words", num_bytes, MOST_BAD_WORD_BYTES, "bytes in all, one more for each word")


def _check_most(name: str, number: int, most: int, what: str) -> None:
    if number > most:
        raise InvalidRequest(f"`{name}` has {number} {what}; the limit is {most}.")


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{where}` must be an object.")
    return cast("dict[str, object]", value)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
