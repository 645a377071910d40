"""The engine's way back from tokens to a chat message, and what is shown of it."""

from __future__ import annotations

from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.engines.sample import Sample
from insitu.gateway.protocols.base import SEED_TOKENS, Lane, Rendered
from insitu.gateway.protocols.parts import tool_calls
from insitu.gateway.protocols.request import CallRequest
from insitu.gateway.shared.faults import reading, text_of
from insitu.gateway.texts import hermes
from insitu.gateway.texts.local_text import LocalText, Spelling

DERENDER = "/v1/chat/completions/derender"
_DERENDER_TEXT = "/v1/completions/derender"
_THINKING = ("chat_template_kwargs", "reasoning_effort")
_DECODING = ("skip_special_tokens", "spaces_between_special_tokens")


def local_text(
    lane: Lane, request: CallRequest, rendered: Rendered, *, spells_special: bool = False
) -> LocalText | None:
    """Begin an answer that is text alone; None if its text or its logprobs need the engine."""
    shows_text = request.num_logprobs is None and all(request.body[key] for key in _DECODING)
    if lane.spelling is None or not shows_text:
        return None
    return lane.spelling.start(rendered.prompt_ids, lane.counts, lane.call_id, spells_special=spells_special)


async def local_message(lane: Lane, request: CallRequest, rendered: Rendered) -> LocalText | None:
    """Begin an answer whose message can be read here; None if that needs the engine's parsers."""
    if not await has_parser(lane):
        return local_text(lane, request, rendered)
    if not await _reads_hermes(lane, request):
        return None
    return local_text(lane, request, rendered, spells_special=True)


def may_call(lane: Lane, request: CallRequest) -> bool:
    """Return True if the engine looks for tool calls in an answer that the model may also give as text."""
    choice = request.body.get("tool_choice")
    return bool(lane.engine.has_parser and request.body.get("tools")) and choice in (None, "auto")


async def decoded(lane: Lane, text: LocalText, ids: list[int]) -> str:
    """Return the text that these tokens complete; the engine is asked once for each special token."""
    for token in text.unsure(ids):
        if token not in lane.engine.unseen:
            lane.engine.unseen[token] = await _is_unseen(lane, token)
    return text.feed(ids, lane.engine.unseen)


async def has_parser(lane: Lane) -> bool:
    """Return True if the engine parses tools or reasoning; it is asked once."""
    if lane.engine.has_parser is None:
        lane.engine.has_parser = await _learn_parser(lane)
    return lane.engine.has_parser


async def derender_context(lane: Lane, request: CallRequest, rendered: Rendered) -> dict[str, Any]:
    """Return what derender needs of the request: everything for unknown parsers, else little."""
    context: dict[str, Any] = {"model": lane.engine_model, "prompt_tokens": len(rendered.prompt_ids)}
    context["prompt_token_ids"] = rendered.prompt_ids[-SEED_TOKENS:]
    if await has_parser(lane):
        context["chat_request"] = {**request.body, "model": lane.engine_model}
        if await _reads_hermes(lane, request):
            context["chat_request"]["messages"] = []
        else:
            context["prompt_token_ids"] = rendered.prompt_ids
        return context
    decoding = {key: request.body[key] for key in _DECODING}
    if not all(decoding.values()):
        context["chat_request"] = {"messages": [], **decoding}
    return context


async def without_end(lane: Lane, request: CallRequest, part: dict[str, Any]) -> dict[str, Any]:
    """Strip the token that ended an answer.

    An engine with parsers spells special tokens out, so that its parsers see them; the last one is not
    part of the answer. Without parsers they are omitted anyway.
    """
    ended = part["finish_reason"] == "stop" and not isinstance(part.get("stop_reason"), str)
    if not (ended and lane.engine.has_parser and part["token_ids"]) or request.keeps_stop:
        return part
    *before, last = cast("list[int]", part["token_ids"])
    if last not in lane.engine.unseen:
        lane.engine.unseen[last] = await _is_unseen(lane, last)
    return part | {"token_ids": before} if lane.engine.unseen[last] else part


async def _is_unseen(lane: Lane, token: int) -> bool:
    """Ask the engine whether a token has no text of its own."""
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [token], "logprobs": None}
    alone = {"generate_responses": [{"choices": [choice]}], "prompt_tokens": [1]}
    answer = await lane.engine.post(_DERENDER_TEXT, {"model": lane.engine_model, **alone})
    with reading():
        return not text_of(answer["choices"][0]["text"])


async def _learn_parser(lane: Lane) -> bool:
    """Probe for a tool or reasoning parser: with one, derender needs the chat request."""
    probe: dict[str, Any] = {"model": lane.engine_model, "stream": True, "generate_chunk": {"choices": []}}
    try:
        await lane.engine.post(DERENDER, probe)
    except InvalidRequest:
        return True
    return False


async def _reads_hermes(lane: Lane, request: CallRequest) -> bool:
    """Return True if the engine reads the answer as the hermes parser does; it is asked once."""
    if request.body.get("tool_choice") not in (None, "auto", "none"):
        return False  # the answer is then JSON alone
    if any(request.body.get(key) is not None for key in _THINKING):
        return False  # they can turn a parser for reasoning on, which the probe did not see
    if lane.engine.reads_hermes is None and lane.spelling is not None:
        lane.engine.reads_hermes = await _learn_hermes(lane, lane.spelling)
    return bool(lane.engine.reads_hermes)


async def _learn_hermes(lane: Lane, spelling: Spelling) -> bool:
    """Let the engine read a text that only this parser, without one for reasoning, reads as we do."""
    ids = spelling.some_ids(hermes.PROBE)
    if ids is None:
        return False
    function: dict[str, Any] = {"name": hermes.PROBE_TOOL, "parameters": {"type": "object", "properties": {}}}
    asked: dict[str, Any] = {"messages": [], "tools": [{"type": "function", "function": function}]}
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": None}
    probe: dict[str, Any] = {"model": lane.engine_model, "prompt_tokens": 1, "prompt_token_ids": ids[:1]}
    probe |= {"chat_request": asked, "generate_response": {"choices": [choice], "prompt_token_ids": ids[:1]}}
    try:
        answer = await lane.engine.post(DERENDER, probe)
    except InvalidRequest:
        return False
    expected = hermes.message_of("".join(hermes.PROBE))
    with reading():
        message = answer["choices"][0]["message"]
        same = expected is not None and hermes.flat(message) == hermes.flat(expected)
        return same and not message.get("reasoning")


def clean(message: dict[str, Any]) -> dict[str, Any]:
    """Remove the engine's empty fields from a message."""
    return {key: value for key, value in message.items() if value not in (None, [])}


def checked_delta(delta: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message from the engine without its empty fields; raise if it is malformed."""
    delta = clean(delta)
    texts: list[object] = [delta.get("content"), delta.get("reasoning")]
    for call in tool_calls(delta):
        function: dict[str, Any] = call.get("function") or {}
        texts += [str(int(call["index"])), function.get("name"), function.get("arguments")]
    for value in texts:
        text_of(value or "")
    return delta


def finish_reason(sample: Sample, message: dict[str, Any], request: CallRequest) -> str:
    """Return the finish reason as OpenAI does.

    A call that the model chose is `tool_calls`, one that the client named is `stop`, and one that may have
    been cut short is neither.
    """
    named = isinstance(request.body.get("tool_choice"), dict)
    called = message.get("tool_calls") and not named and sample.finish_reason == "stop"
    return "tool_calls" if called else sample.finish_reason


def shown_logprobs(logprobs: dict[str, Any] | None, request: CallRequest) -> dict[str, Any] | None:
    """Return the logprobs that the client asked for."""
    if logprobs is None or request.num_logprobs is None:
        return None
    for entry in logprobs["content"]:
        if request.num_logprobs == 0:
            entry["top_logprobs"] = []  # the engine always lists the sampled token itself
    return logprobs
