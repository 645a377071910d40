"""A stand-in engine with a tool and a reasoning parser, for answers that a test has written.

An answer is `<think>…</think>`, text and `<tool_call>{…}</tool_call>`, each of them optional.
"""

from __future__ import annotations

import json
import re
from typing import Any

from aiohttp import web

from tests.support.standin_engine import Behaviour, StandinEngine, _error, _json

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"^<think>(.*?)(</think>|$)", re.DOTALL)


END = 2
"""The token that ends an answer when `ends`; a parser sees it as text."""


class StandinParserEngine(StandinEngine):
    """`behaviour.texts` is what it says."""

    ends = False

    def _sampled(self, body: dict[str, Any]) -> tuple[list[int], str]:
        ids, reason = super()._sampled(body)
        ids = ids if any(self.behaviour.texts) else []
        return ([*ids, END] if self.ends and reason == "stop" else ids), reason

    def _text(self, token_ids: list[int]) -> str:
        said = super()._text([token for token in token_ids if token != END])
        return said + "<|end|>" * token_ids.count(END)

    async def _derender_completion(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        (choice,) = body["generate_responses"][0]["choices"]
        shown = [token for token in choice["token_ids"] if token != END]
        return _json({"choices": [{"index": 0, "text": self._text(shown), "logprobs": None}]})

    def __init__(self, *texts: str) -> None:
        super().__init__(Behaviour(parser=True, texts=list(texts)))

    async def _derender_chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if "chat_request" not in body:
            return _error(400, "chat_request is required when a tool or reasoning parser is configured")
        if not body.get("stream"):
            choice = body["generate_response"]["choices"][0]
            message = parsed(self._text(choice["token_ids"]))
            return _json({"choices": [{"index": 0, "message": message, "logprobs": choice["logprobs"]}]})
        said = (body.get("stream_state") or {}).get("said", "")
        (choice,) = body["generate_chunk"]["choices"]
        now = said + self._text(choice["token_ids"])
        delta = {"index": 0, "delta": parsed_delta(said, now), "finish_reason": choice["finish_reason"]}
        return _json({"chunk": {"choices": [delta]}, "stream_state": {"said": now}})


def tool_call(tool: str, *instead: Any, **arguments: Any) -> str:
    """A call as the model writes it, with arguments, or with something else in their place."""
    said = {"name": tool, "arguments": instead[0] if instead else arguments}
    return f"<tool_call>{json.dumps(said)}</tool_call>"


def parsed(text: str) -> dict[str, Any]:
    """The message of a whole answer."""
    thought = _THOUGHT.match(text)
    rest = text[thought.end() :] if thought else text
    calls = [_call(i, json.loads(found)) for i, found in enumerate(_CALL.findall(rest))]
    content = _CALL.sub("", rest)
    return {
        "role": "assistant",
        "reasoning": thought.group(1) if thought else None,
        "content": content if content or not calls else None,
        "tool_calls": calls,
    }


def parsed_delta(before: str, after: str) -> dict[str, Any]:
    """What an answer that grew from `before` to `after` has more to say: calls come when they are whole."""
    old, new = parsed(_settled(before)), parsed(_settled(after))
    delta: dict[str, Any] = {"role": None, "tool_calls": []}
    for key in ("reasoning", "content"):
        delta[key] = (new[key] or "")[len(old[key] or "") :] or None
    for index, call in enumerate(new["tool_calls"][len(old["tool_calls"]) :], len(old["tool_calls"])):
        function = call["function"]
        named = {"name": function["name"], "arguments": ""}
        delta["tool_calls"] += [
            {"index": index, "id": call["id"], "type": "function", "function": named},
            {"index": index, "function": {"arguments": function["arguments"]}},
        ]
    return delta


def _settled(text: str) -> str:
    """The text without markup that is still being written."""
    opened = text.rfind("<tool_call>")
    if opened >= 0 and "</tool_call>" not in text[opened:]:
        return text[:opened]
    tail = text.rfind("<")
    return text[:tail] if tail >= 0 and ">" not in text[tail:] else text


def _call(index: int, said: dict[str, Any]) -> dict[str, Any]:
    function = {"name": said["name"], "arguments": json.dumps(said["arguments"])}
    return {"id": f"call-{index}", "type": "function", "function": function}
