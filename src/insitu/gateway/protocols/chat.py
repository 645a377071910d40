"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, cast

from insitu.errors import InsituError, InvalidRequest
from insitu.gateway.engines.sample import Generated, Sample
from insitu.gateway.protocols.base import (
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
from insitu.gateway.protocols.bounds import checked_messages
from insitu.gateway.protocols.derender import (
    DERENDER,
    checked_delta,
    clean,
    decoded,
    derender_context,
    finish_reason,
    local_message,
    may_call,
    shown_logprobs,
    without_end,
)
from insitu.gateway.protocols.request import (
    COMMON_FIELDS,
    CallRequest,
    check_count,
    check_object,
    common_request,
)
from insitu.gateway.shared.faults import reading, text_of
from insitu.gateway.shared.settings import Limits
from insitu.gateway.texts import hermes
from insitu.gateway.texts.hermes import BeforeCalls
from insitu.gateway.texts.local_text import LocalText

RENDER = "/v1/chat/completions/render"
_FIELDS = frozenset(
    {"messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"}
    | {"top_logprobs", "max_completion_tokens", "thinking_token_budget"}
)


class ChatProtocol:
    """Messages in, an assistant message out."""

    name = "chat"
    fields = _FIELDS | COMMON_FIELDS
    sends_done = True

    def parse(self, body: dict[str, Any], limits: Limits) -> CallRequest:
        """Check a request; InvalidRequest names what is rejected and why."""
        body = {**body, "messages": checked_messages(body.get("messages"), body.get("model"))}
        if "chat_template" in check_object(body, "chat_template_kwargs"):
            raise InvalidRequest("`chat_template` is not accepted: the model's own template is used.")
        max_tokens = check_count(body, "max_completion_tokens", limits.max_output_tokens)
        max_tokens = max_tokens or check_count(body, "max_tokens", limits.max_output_tokens)
        top = body.get("top_logprobs") or 0
        if not isinstance(top, int) or (top and not body.get("logprobs")):
            raise InvalidRequest(
                f"`top_logprobs` is {top!r}; it must be an integer and needs `logprobs: true`."
            )
        request = common_request(body, _FIELDS, top if body.get("logprobs") else None, limits)
        for key in ("top_logprobs", "max_completion_tokens", "max_tokens"):
            request.body.pop(key, None)
        if max_tokens is not None:
            request.body["max_completion_tokens"] = max_tokens
        return request

    async def render(self, lane: Lane, request: CallRequest) -> Rendered:
        rendered = await lane.engine.post(RENDER, {**request.body, "model": lane.engine_model})
        return generate_body(lane, request, rendered)

    async def answer(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any], sample: Sample
    ) -> Answer:
        """Build the chat completion for a verified sample."""
        local = await local_message(lane, request, rendered)
        own = None if local is None else await self._read(lane, request, local, generated)
        if local is not None and local.alone and own is not None:
            return self._assembled(lane, request, rendered, sample, own, None)
        message, logprobs = await self._derendered(lane, request, rendered, generated)
        if local is not None and own is not None:
            with reading():
                local.compare(hermes.flat(own), text_of(hermes.flat(message)))
        return self._assembled(lane, request, rendered, sample, message, logprobs)

    async def _read(
        self, lane: Lane, request: CallRequest, local: LocalText, generated: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return the message that the tokens are without asking the engine; None if that cannot be."""
        shown = await without_end(lane, request, generated["choices"][0])
        text = await decoded(lane, local, shown["token_ids"])
        if may_call(lane, request):
            return hermes.message_of(text)
        return {"role": "assistant", "content": text}

    async def _derendered(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the message that the engine makes of the tokens, and the logprobs to show."""
        derender = await derender_context(lane, request, rendered)
        given = generated["choices"][0]
        shown = await without_end(lane, request, given)
        whole: dict[str, Any] = {"choices": [tokens_only(shown if shown["token_ids"] else given, request)]}
        if lane.engine.has_parser:
            whole["prompt_token_ids"] = derender["prompt_token_ids"]
        answer = await lane.engine.post(DERENDER, {**derender, "generate_response": whole})
        with reading():
            choice = answer["choices"][0]
            logprobs = shown_logprobs(choice.get("logprobs"), request)
            said = clean(choice["message"])
        return said if shown["token_ids"] else {"role": "assistant", "content": ""}, logprobs

    def _assembled(
        self,
        lane: Lane,
        request: CallRequest,
        rendered: Rendered,
        sample: Sample,
        message: dict[str, Any],
        logprobs: dict[str, Any] | None,
    ) -> Answer:
        if isinstance(message.get("content"), str):
            message["content"] = StopTrimmer(request).feed(message["content"], sample)
        message.setdefault("content", None)
        if request.body.get("parallel_tool_calls") is False and "tool_calls" in message:
            message["tool_calls"] = message["tool_calls"][:1]  # the engine omits the others in streams only
        out: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(sample, message, request),
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
        self._local: LocalText | None = None
        self._before_calls: BeforeCalls | None = None
        self._own = self._derendered = ""
        self._ids: list[int] = []
        """The tokens that were read without the engine."""
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
        if self._first:
            self._local = await local_message(self._lane, self._request, self._rendered)
            self._before_calls = BeforeCalls() if may_call(self._lane, self._request) else None
        delta, logprobs = await self._delta(part, last=finished is not None)
        delta["content"] = self._trimmer.feed(delta.get("content") or "", finished)
        if self._first:
            delta = {"role": "assistant", **delta}
        elif not delta["content"]:
            del delta["content"]
        _add_delta(self._message, delta)
        out: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        logprobs = logprobs or await self._logprobs(part)
        with reading():
            out["logprobs"] = shown_logprobs(logprobs, self._request)
        if finished is not None:
            out["finish_reason"] = finish_reason(finished, self._message, self._request)
        body = envelope("chat.completion.chunk", self._lane, [out])
        if self._request.return_token_ids:
            out["token_ids"] = generated.token_ids
            if self._first:
                body["prompt_token_ids"] = self._rendered.prompt_ids
        self._first = False
        return [(None, body)]

    async def _delta(
        self, part: dict[str, Any], *, last: bool
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return what the tokens add to the message, and their logprobs if the engine told them."""
        if (local := self._local) is None:
            return await self._derender(part)
        shown = await without_end(self._lane, self._request, part)
        text = await decoded(self._lane, local, shown["token_ids"])
        if self._before_calls is not None:
            text = self._before_calls.feed(text)
        self._own += text
        if not local.alone:
            delta, logprobs = await self._derender(part)
            self._derendered += delta.get("content") or ""
            if last:
                local.compare(self._own, self._derendered)
            return delta, logprobs
        self._ids += part["token_ids"]
        if self._before_calls is None or not self._before_calls.opened:
            return {"content": text}, None
        return await self._hand_over(local, part, num_sent=len(self._own) - len(text)), None

    async def _hand_over(self, local: LocalText, part: dict[str, Any], num_sent: int) -> dict[str, Any]:
        """Let the engine read the answer from its beginning: arguments are streamed as it streams them."""
        self._local = None
        delta, _ = await self._derender(part | {"token_ids": self._ids})
        content = delta.get("content") or ""
        local.compare(self._own, content)
        return {**delta, "content": content[num_sent:]}

    async def _derender(self, part: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the delta that the engine makes of the tokens, and their logprobs."""
        context = await derender_context(self._lane, self._request, self._rendered)
        shown = await without_end(self._lane, self._request, part)
        answer = await self._lane.engine.post(
            DERENDER,
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
            return checked_delta(choice["delta"]), choice.get("logprobs")

    async def _logprobs(self, part: dict[str, Any]) -> dict[str, Any] | None:
        """Fetch logprobs that the client requested: an engine with parsers omits them from streams."""
        if self._request.num_logprobs is None or not part["token_ids"]:
            return None
        whole = {"choices": [tokens_only(part | {"finish_reason": "stop"}, self._request)]}
        context = await derender_context(self._lane, self._request, self._rendered)
        answer = await self._lane.engine.post(DERENDER, {**context, "generate_response": whole})
        with reading():
            return cast("dict[str, Any] | None", answer["choices"][0].get("logprobs"))

    def recorded(self) -> dict[str, Any]:
        return self._message

    def end(self, usage: dict[str, int]) -> list[Event]:
        if not self._request.include_usage:
            return []
        return [(None, {**envelope("chat.completion.chunk", self._lane, []), "usage": usage})]


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
