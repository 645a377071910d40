"""A stand-in engine with a script: it calls the tool that it is offered, then answers with what that said.

It stands in for a model that has learnt to use tools. The script knows two words: a question names a thing
(`thing-0a1b2c3d`), and the tool says of it `measured-0a1b2c3d`. Tool calls are text here as in any engine,
`<call>{...}</call>`, which derender parses, streamed or not.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from aiohttp import web

from tests.support.standin_engine import (
    Behaviour,
    StandinEngine,
    _error,
    _json,
    spell_messages,
)

THING = re.compile(r"thing-([0-9a-f]{8})")
_CALL, _END = "<call>", "</call>"


def measured(thing: str) -> str:
    """What the tool of every test agent says."""
    return thing.replace("thing-", "measured-")


def next_words(messages: list[dict[str, str]]) -> str:
    """The script: call the tool, then answer."""
    said = "\n".join(message["content"] for message in messages)
    found = THING.search(said)
    if found is None:
        return "There is nothing to measure."
    if (result := measured(found[0])) in said:
        return f"The answer is {result}."
    tools = json.loads(messages[0]["content"]) if messages[0]["role"] == "developer" else []
    return call_text(tools, found[0]) if tools else f"I cannot measure {found[0]}."


def call_text(tools: list[dict[str, Any]], thing: str) -> str:
    """A call of the tool for measuring, or of the first one, with the thing as its first argument."""
    offered = [tool["function"] for tool in tools]
    chosen = next((tool for tool in offered if "measure" in tool["name"]), offered[0])
    name = next(iter(chosen["parameters"]["properties"]))
    return _CALL + json.dumps({"name": chosen["name"], "arguments": {name: thing}}) + _END


class StandinToolEngine(StandinEngine):
    """`StandinEngine` whose prompts hold tools and tool calls, and whose answers are parsed."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        super().__init__(behaviour or Behaviour(answers=next_words))

    async def _render_chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if self.behaviour.fault == "overflow":  # in vLLM's words
            return _error(400, "This model's maximum context length is 256 tokens. However, you sent more.")
        messages = [_as_text(message) for message in body["messages"]]
        if body.get("tools"):
            messages.insert(0, {"role": "developer", "content": json.dumps(body["tools"])})
        return self._model_error(body) or _json(self._rendered(body, spell_messages(messages)))

    async def _derender_chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if (wrong := self._model_error(body)) is not None:
            return wrong
        if "chat_request" not in body:
            return _error(400, "chat_request is required when a tool or reasoning parser is configured")
        if body.get("stream"):
            return _json(self._streamed(body))
        choice = body["generate_response"]["choices"][0]
        message = {"role": "assistant", "refusal": None, **_parsed(self._text(choice["token_ids"]))}
        return _json({"choices": [{"index": 0, "message": message, "logprobs": self._named(choice)}]})

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        """A call goes out whole with its last token, other words as they come."""
        held = (body.get("stream_state") or {}).get("held", "")
        choices: list[dict[str, Any]] = []
        for choice in body["generate_chunk"]["choices"]:
            held += self._text(choice["token_ids"])
            delta: dict[str, Any] = {"role": None}
            if not (_CALL.startswith(held) or held.startswith(_CALL)) or choice["finish_reason"]:
                parsed, held = _parsed(held), ""
                calls = [{"index": i, **call} for i, call in enumerate(parsed.get("tool_calls", []))]
                delta |= {"content": parsed["content"], "tool_calls": calls}
            out = {"index": 0, "delta": delta, "logprobs": choice["logprobs"]}
            choices.append(out | {"finish_reason": choice["finish_reason"]})
        return {"chunk": {"choices": choices}, "stream_state": {"held": held}}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    texts = [
        _CALL + json.dumps({**call, "arguments": json.loads(call["arguments"])}) + _END for call in calls
    ]
    return {**message, "content": "".join(texts)} if texts else message


def _parsed(text: str) -> dict[str, Any]:
    if not (text.startswith(_CALL) and text.endswith(_END)):
        return {"content": text}
    call = json.loads(text.removeprefix(_CALL).removesuffix(_END))
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    call_id = f"call-{uuid.uuid4().hex[:12]}"
    return {"content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
