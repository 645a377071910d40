"""One conversation per protocol, each held with the vendor's own client. The same three verbs for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

TOOL, DESCRIBED = "look", "Look around 👀"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"far": {"type": "boolean"}},
    "required": ["far"],
    "additionalProperties": False,
}
RESULT = "nothing 無"
_CHOICES: dict[str, Any] = {"offered": "auto", "any": "required", "shown": "none"}


@dataclass(frozen=True, slots=True)
class Ask:
    """How a turn is asked for."""

    stream: bool
    max_tokens: int
    tools: str = "none"
    """`none`; `offered`; `forced`: that tool; `any`: some tool; `shown`: none may be called."""
    schema: bool = False
    """Whether the answer must be an object like the tool's input."""
    logit_bias: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def strict(self) -> dict[str, bool]:
        """Strict where a call is forced: a random model would otherwise make up any arguments. Where tools
        are only offered, strictness is a grammar, and those tokens are to be free."""
        return {} if self.tools == "offered" else {"strict": True}

    @property
    def extra(self) -> dict[str, Any]:
        return {"logit_bias": self.logit_bias} if self.logit_bias else {}


class ChatSpeaker:
    """Chat completions."""

    def __init__(self, url: str, model: str) -> None:
        self._model, self._history = model, list[Any]()
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="default", max_retries=0)
        self.shown: list[list[float]] = []
        """The logprobs of each answer; asked for where tools are offered."""

    def say(self, text: str) -> None:
        self._history.append({"role": "user", "content": text})

    async def ask(self, ask: Ask) -> int:
        """Take the answer into the conversation, with tool results; returns the number of tool calls."""
        options: dict[str, Any] = {"max_tokens": ask.max_tokens, "extra_body": ask.extra}
        if ask.tools != "none":
            function = {"name": TOOL, "description": DESCRIBED, "parameters": PARAMETERS, **ask.strict}
            options["tools"] = [{"type": "function", "function": function}]
            named = {"type": "function", "function": {"name": TOOL}}
            options["tool_choice"] = (_CHOICES | {"forced": named})[ask.tools]
        if ask.schema:
            schema = {"name": "out", "schema": PARAMETERS, "strict": True}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        options["logprobs"] = ask.tools == "offered"
        self.shown.append([])
        asked = {"model": self._model, "messages": self._history, **options}
        message = await (self._streamed(asked) if ask.stream else self._whole(asked))
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
        self._history += [message, *results]
        return len(calls)

    async def _whole(self, asked: dict[str, Any]) -> dict[str, Any]:
        completion = await self._client.chat.completions.create(**asked)
        self._note(completion.choices[0].logprobs)
        return completion.choices[0].message.to_dict()  # type: ignore[return-value]

    async def _streamed(self, asked: dict[str, Any]) -> dict[str, Any]:
        text, calls = "", dict[int, Any]()
        async for chunk in await self._client.chat.completions.create(**asked, stream=True):
            delta = chunk.choices[0].delta
            self._note(chunk.choices[0].logprobs)
            text += delta.content or ""
            for part in delta.tool_calls or []:
                empty = {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
                function = calls.setdefault(part.index, empty)["function"]
                function["name"] += (part.function and part.function.name) or ""
                function["arguments"] += (part.function and part.function.arguments) or ""
        return {"role": "assistant", "content": text} | ({"tool_calls": [*calls.values()]} if calls else {})

    def _note(self, logprobs: Any) -> None:
        self.shown[-1] += [entry.logprob for entry in logprobs.content] if logprobs else []


class CompletionsSpeaker:
    """Plain completions: the conversation is one text that grows."""

    def __init__(self, url: str, model: str) -> None:
        self._model, self._text = model, ""
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="default", max_retries=0)

    def say(self, text: str) -> None:
        self._text += f"\n{text}\n"

    async def ask(self, ask: Ask) -> int:
        asked: Any = {"model": self._model, "prompt": self._text, "max_tokens": ask.max_tokens}
        if ask.stream:
            async for chunk in await self._client.completions.create(**asked, stream=True):
                self._text += chunk.choices[0].text
        else:
            self._text += (await self._client.completions.create(**asked)).choices[0].text
        return 0


class ResponsesSpeaker:
    """Responses: the conversation is a list of items."""

    def __init__(self, url: str, model: str) -> None:
        self._model, self._items = model, list[Any]()
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="default", max_retries=0)

    def say(self, text: str) -> None:
        self._items.append({"role": "user", "content": text})

    async def ask(self, ask: Ask) -> int:
        options: dict[str, Any] = {"max_output_tokens": ask.max_tokens, "extra_body": ask.extra}
        if ask.tools != "none":
            named = {"type": "function", "name": TOOL}
            tool = {**named, "description": DESCRIBED, "parameters": PARAMETERS, **ask.strict}
            options["tools"] = [tool]
            options["tool_choice"] = (_CHOICES | {"forced": named})[ask.tools]
        if ask.schema:
            form = {"type": "json_schema", "name": "out", "schema": PARAMETERS, "strict": True}
            options["text"] = {"format": form}
        asked: Any = {"model": self._model, "input": self._items, **options}
        if ask.stream:
            *_, last = [event async for event in await self._client.responses.create(**asked, stream=True)]
            response = last.response  # type: ignore[union-attr]
        else:
            response = await self._client.responses.create(**asked)
        calls = [item.call_id for item in response.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": RESULT} for call in calls]
        self._items += [*(item.to_dict() for item in response.output), *results]
        return len(calls)


class MessagesSpeaker:
    """Anthropic's messages: the conversation is made of content blocks."""

    def __init__(self, url: str, model: str) -> None:
        self._model, self._messages = model, list[Any]()
        self._client = AsyncAnthropic(base_url=url, api_key="default", max_retries=0)

    def say(self, text: str) -> None:
        self._add_user({"type": "text", "text": text})

    async def ask(self, ask: Ask) -> int:
        options: dict[str, Any] = {"max_tokens": ask.max_tokens, "extra_body": ask.extra}
        if ask.tools != "none":
            tool = {"name": TOOL, "description": DESCRIBED, "input_schema": PARAMETERS, **ask.strict}
            options["tools"] = [tool]
            kinds = {"offered": "auto", "any": "any", "shown": "none"}
            named = {"type": "tool", "name": TOOL}
            options["tool_choice"] = named if ask.tools == "forced" else {"type": kinds[ask.tools]}
        if ask.schema:
            options["output_config"] = {"format": {"type": "json_schema", "schema": PARAMETERS}}
        asked: Any = {"model": self._model, "messages": self._messages, **options}
        if ask.stream:
            async with self._client.messages.stream(**asked) as events:
                message: Any = await events.get_final_message()
        else:
            message = await self._client.messages.create(**asked)
        self._messages.append(message.to_param())
        calls = [block.id for block in message.content if block.type == "tool_use"]
        for call in calls:
            self._add_user({"type": "tool_result", "tool_use_id": call, "content": RESULT})
        return len(calls)

    def _add_user(self, block: dict[str, Any]) -> None:
        if not self._messages or self._messages[-1]["role"] != "user":
            self._messages.append({"role": "user", "content": []})
        self._messages[-1]["content"].append(block)


SPEAKERS = {
    "chat": ChatSpeaker,
    "completions": CompletionsSpeaker,
    "responses": ResponsesSpeaker,
    "messages": MessagesSpeaker,
}
