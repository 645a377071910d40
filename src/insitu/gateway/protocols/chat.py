"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, cast

from insitu.errors import InsituError, InvalidRequest
from insitu.gateway.engines.sample import Generated, Sample
from insitu.gateway.faults import reading, text_of
from insitu.gateway.protocols.base import (
    SEED_TOKENS,
    Answer,
    Event,
    Lane,
    Rendered,
    StopTrimmer,
    envelope,
    generate_body,
    tokens_only,
    usage_of,
)
from insitu.gateway.protocols.parts import kind_refusal, tool_calls
from insitu.gateway.protocols.request import CallRequest, check_count, check_object, common_request
from insitu.gateway.settings import Limits

_RENDER, _DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"
_DERENDER_TEXT = "/v1/completions/derender"
_FIELDS = frozenset(
    {"messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"}
    | {"top_logprobs", "max_completion_tokens", "thinking_token_budget"}
)
_TEXT_PARTS = frozenset({"text", "refusal"})


class ChatProtocol:
    """Messages in, an assistant message out."""

    name = "chat"
    sends_done = True

    def parse(self, body: dict[str, Any], limits: Limits) -> CallRequest:
        """Check a request; InvalidRequest names what is rejected and why."""
        body = {**body, "messages": _checked_messages(body.get("messages"), body.get("model"))}
        if "chat_template" in check_object(body, "chat_template_kwargs"):
            raise InvalidRequest("`chat_template` is refused: templates are the model's own.")
        max_tokens = check_count(body, "max_completion_tokens", limits.max_output_tokens)
        max_tokens = max_tokens or check_count(body, "max_tokens", limits.max_output_tokens)
        top = body.get("top_logprobs") or 0
        if not isinstance(top, int) or (top and not body.get("logprobs")):
            raise InvalidRequest(f"`top_logprobs` is {top!r}; it needs `logprobs: true` and an integer.")
        request = common_request(body, _FIELDS, top if body.get("logprobs") else None, limits)
        for key in ("top_logprobs", "max_completion_tokens", "max_tokens"):
            request.body.pop(key, None)
        if max_tokens is not None:
            request.body["max_completion_tokens"] = max_tokens
        return request

    async def render(self, lane: Lane, request: CallRequest) -> Rendered:
        rendered = await lane.engine.post(_RENDER, {**request.body, "model": lane.engine_model})
        return generate_body(lane, request, rendered)

    async def answer(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any], sample: Sample
    ) -> Answer:
        """Build the chat completion for a verified sample."""
        derender = await _derender_context(lane, request, rendered)
        given = generated["choices"][0]
        shown = await _without_end(lane, request, given)
        whole: dict[str, Any] = {"choices": [tokens_only(shown if shown["token_ids"] else given, request)]}
        if lane.engine.has_parser:
            whole["prompt_token_ids"] = rendered.prompt_ids
        answer = await lane.engine.post(_DERENDER, {**derender, "generate_response": whole})
        with reading():
            choice = answer["choices"][0]
            logprobs = _shown_logprobs(choice.get("logprobs"), request)
            said = _clean(choice["message"])
            if request.body.get("parallel_tool_calls") is False and "tool_calls" in said:
                said["tool_calls"] = said["tool_calls"][:1]  # the engine omits the others in streams only
        message: dict[str, Any] = said if shown["token_ids"] else {"role": "assistant", "content": ""}
        if isinstance(message.get("content"), str):
            message["content"] = StopTrimmer(request).feed(message["content"], sample)
        message.setdefault("content", None)
        out: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(sample, message, request),
        }
        body = envelope("chat.completion", lane, [out])
        body["usage"] = usage_of(len(rendered.prompt_ids), len(sample.output_ids))
        if request.return_token_ids:
            out["token_ids"], body["prompt_token_ids"] = sample.output_ids, rendered.prompt_ids
        return Answer(body, message)

    def stream_text(self, lane: Lane, request: CallRequest, rendered: Rendered) -> ChatStream:
        return ChatStream(lane, request, rendered)

    def error(self, error: InsituError, _num_sent: int = 0, /) -> Event:
        return None, error.to_wire()


class ChatStream:
    """The chunks of one streamed chat answer, and the message that they add up to."""

    def __init__(self, lane: Lane, request: CallRequest, rendered: Rendered) -> None:
        self._lane, self._request, self._rendered = lane, request, rendered
        self._trimmer = StopTrimmer(request)
        self._state: dict[str, Any] | None = None
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._first = True

    async def chunk(self, generated: Generated, finished: Sample | None) -> list[Event]:
        """Return the client's chunk for the tokens that arrived together."""
        part = {
            "finish_reason": generated.finish_reason if finished else None,
            "stop_reason": generated.stop_reason,
            "token_ids": generated.token_ids,
            "logprobs": {"content": generated.logprob_entries},
        }
        context = await _derender_context(self._lane, self._request, self._rendered)
        shown = await _without_end(self._lane, self._request, part)
        answer = await self._lane.engine.post(
            _DERENDER,
            {
                **context,
                "stream": True,
                "generate_chunk": {"choices": [tokens_only(shown, self._request)]},
                "stream_state": self._state,
            },
        )
        with reading():
            self._state = answer["stream_state"]
            choice = answer["chunk"]["choices"][0]
            delta, logprobs = _checked_delta(choice["delta"]), choice.get("logprobs")
        delta["content"] = self._trimmer.feed(delta.get("content") or "", finished)
        if self._first:
            delta = {"role": "assistant", **delta}
        elif not delta["content"]:
            del delta["content"]
        _add_delta(self._message, delta)
        out: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        logprobs = logprobs or await self._logprobs(part)
        with reading():
            out["logprobs"] = _shown_logprobs(logprobs, self._request)
        if finished is not None:
            out["finish_reason"] = _finish_reason(finished, self._message, self._request)
        body = envelope("chat.completion.chunk", self._lane, [out])
        if self._request.return_token_ids:
            out["token_ids"] = generated.token_ids
            if self._first:
                body["prompt_token_ids"] = self._rendered.prompt_ids
        self._first = False
        return [(None, body)]

    async def _logprobs(self, part: dict[str, Any]) -> dict[str, Any] | None:
        """Fetch logprobs that the client requested: an engine with parsers omits them from streams."""
        if self._request.num_logprobs is None or not part["token_ids"]:
            return None
        whole = {"choices": [tokens_only(part | {"finish_reason": "stop"}, self._request)]}
        context = await _derender_context(self._lane, self._request, self._rendered)
        answer = await self._lane.engine.post(_DERENDER, {**context, "generate_response": whole})
        with reading():
            return cast("dict[str, Any] | None", answer["choices"][0].get("logprobs"))

    def recorded(self) -> dict[str, Any]:
        return self._message

    def end(self, usage: dict[str, int]) -> list[Event]:
        if not self._request.include_usage:
            return []
        return [(None, {**envelope("chat.completion.chunk", self._lane, []), "usage": usage})]


async def _derender_context(lane: Lane, request: CallRequest, rendered: Rendered) -> dict[str, Any]:
    """Return what derender needs of the request: everything for an engine with parsers, else little."""
    engine = lane.engine
    if engine.has_parser is None:
        engine.has_parser = await _learn_parser(lane)
    context: dict[str, Any] = {"model": lane.engine_model, "prompt_tokens": len(rendered.prompt_ids)}
    if engine.has_parser:
        context["prompt_token_ids"] = rendered.prompt_ids
        context["chat_request"] = {**request.body, "model": lane.engine_model}
        return context
    context["prompt_token_ids"] = rendered.prompt_ids[-SEED_TOKENS:]
    decoding = {key: request.body[key] for key in ("skip_special_tokens", "spaces_between_special_tokens")}
    if not all(decoding.values()):
        context["chat_request"] = {"messages": [], **decoding}
    return context


async def _without_end(lane: Lane, request: CallRequest, part: dict[str, Any]) -> dict[str, Any]:
    """Strip the token that ended an answer.

    An engine with parsers spells special tokens out, so that its parsers see them; the last one is not
    part of the answer. Without parsers they are omitted anyway.
    """
    ended = part["finish_reason"] == "stop" and not isinstance(part.get("stop_reason"), str)
    if not (ended and lane.engine.has_parser and part["token_ids"]) or request.keeps_stop:
        return part
    *before, last = cast("list[int]", part["token_ids"])
    if last not in lane.engine.unseen:
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [last], "logprobs": None}
        alone = {"generate_responses": [{"choices": [choice]}], "prompt_tokens": [1]}
        answer = await lane.engine.post(_DERENDER_TEXT, {"model": lane.engine_model, **alone})
        with reading():
            lane.engine.unseen[last] = not answer["choices"][0]["text"]
    return part | {"token_ids": before} if lane.engine.unseen[last] else part


async def _learn_parser(lane: Lane) -> bool:
    """Probe for a tool or reasoning parser: with one, derender is refused without the chat request."""
    probe: dict[str, Any] = {"model": lane.engine_model, "stream": True, "generate_chunk": {"choices": []}}
    try:
        await lane.engine.post(_DERENDER, probe)
    except InvalidRequest:
        return True
    return False


def _checked_messages(given: object, model: object) -> list[dict[str, Any]]:
    """Check the messages and return each with its reasoning under the name that the engine reads."""
    if not isinstance(given, list) or not given:
        raise InvalidRequest("`messages` must be a list with at least one message.")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(cast("list[object]", given)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):  # pyright: ignore[reportUnknownMemberType]
            raise InvalidRequest("Each message must be an object with a `role`.")
        message = cast("dict[str, Any]", message)
        content: object = message.get("content")
        for j, part in enumerate(cast("list[object]", content) if isinstance(content, list) else []):
            kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
            if kind not in _TEXT_PARTS:
                raise kind_refusal(kind, model, f"messages[{i}].content[{j}]")
        if isinstance(message.get("reasoning_content"), str):
            message = {"reasoning": message["reasoning_content"], **message}
            del message["reasoning_content"]
        messages.append(message)
    return messages


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    """Remove the engine's empty fields from a message."""
    return {key: value for key, value in message.items() if value not in (None, [])}


def _checked_delta(delta: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message from the engine without its empty fields; raise if it is malformed."""
    delta = _clean(delta)
    texts: list[object] = [delta.get("content"), delta.get("reasoning")]
    for call in tool_calls(delta):
        function: dict[str, Any] = call.get("function") or {}
        texts += [str(int(call["index"])), function.get("name"), function.get("arguments")]
    for value in texts:
        text_of(value or "")
    return delta


def _finish_reason(sample: Sample, message: dict[str, Any], request: CallRequest) -> str:
    # As OpenAI does: a call that the model chose is `tool_calls`, one that the client named is `stop`, and
    # one that may have been cut short is neither.
    named = isinstance(request.body.get("tool_choice"), dict)
    called = message.get("tool_calls") and not named and sample.finish_reason == "stop"
    return "tool_calls" if called else sample.finish_reason


def _shown_logprobs(logprobs: dict[str, Any] | None, request: CallRequest) -> dict[str, Any] | None:
    if logprobs is None or request.num_logprobs is None:
        return None
    for entry in logprobs["content"]:
        if request.num_logprobs == 0:
            entry["top_logprobs"] = []  # the engine always lists the sampled token itself
    return logprobs


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add one delta to the message as clients do."""
    for key, value in delta.items():
        if key == "tool_calls":
            _add_tool_calls(message.setdefault("tool_calls", []), value)
        elif key != "role" and isinstance(value, str):
            message[key] = (message.get(key) or "") + value


def _add_tool_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    for delta in deltas:
        index = int(delta["index"])
        while len(calls) <= index:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], cast("dict[str, str]", delta.get("function") or {})
        call["id"] = delta.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""
