"""Chat templates of many families, read from installed packages, and agents that are hard on them.

Each script is one rollout. They differ in what they do to the history between two calls: echo it, parse it
into tool calls, split reasoning off, rewrite it, fork it, run sub-agents beside it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Template:
    """One chat template, and what it can render."""

    name: str
    family: str
    folder: str
    can: frozenset[str]

    def text(self) -> str:
        spec = importlib.util.find_spec(self.folder.split("/")[0])
        assert spec is not None
        assert spec.submodule_search_locations
        (package,) = spec.submodule_search_locations
        return (Path(package).joinpath(*self.folder.split("/")[1:]) / f"{self.name}.jinja").read_text()


_TRL, _VLLM = "trl/chat_templates", "vllm/transformers_utils/chat_templates"
_PLAIN = frozenset[str]({"system"})
_ONE, _MANY = _PLAIN | {"tools"}, _PLAIN | {"tools", "parallel"}

TEMPLATES = (
    Template("template_chatml", "ChatML", _VLLM, _PLAIN),
    Template("qwen2_5", "Qwen 2.5", _TRL, _MANY),
    Template("qwen3", "Qwen 3", _TRL, _MANY),
    Template("qwen3_5_think", "Qwen 3.5", _TRL, _MANY),
    Template("llama3", "Llama 3", _TRL, _PLAIN),
    Template("llama3_1", "Llama 3.1", _TRL, _ONE),
    Template("deepseekv3", "DeepSeek V3", _TRL, _PLAIN),
    Template("deepseek_r1_distill", "DeepSeek R1", _TRL, _MANY),
    Template("gemma", "Gemma", _TRL, frozenset()),
    Template("gemma4", "Gemma 4", _TRL, _MANY),
    Template("glm4moe", "GLM 4", _TRL, _MANY),
    Template("gptoss", "GPT-OSS", _TRL, _MANY),
    Template("phi3", "Phi 3", _TRL, _PLAIN),
    Template("cohere2", "Cohere 2", _TRL, _PLAIN),
    Template("nemotron_3_nano", "Nemotron 3", _TRL, _MANY),
    Template("lfm2_2_5", "LFM 2.5", _TRL, _MANY),
)

SAYINGS = (
    "Name a colour.",
    "日本語で、もう一度。 你好嗎？",
    "👩‍👩‍👧‍👦 and 🇩🇪, please 🙂",
    "e\u0301 is not é, o\u0308 is not ö;\tñ",
    "שלום, مرحبا — and back",
    "A literal <|im_end|> and </think> and [/INST] in the text.",
    "line one\n\n  line two  ",
    'quotes "\'` and {"json": [1, 2]} and \\n',
)
SYSTEMS = ("Be brief.", "Você é gentil ✨.", "Only speak in rhymes.\nAlways.")


def _tool(name: str, described: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": kind} for key, kind in properties.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "description": described, "strict": True, "parameters": schema},
    }


TOOLS = [_tool("look", "Look around 👀", far="boolean"), _tool("count", "Zähle", far="boolean")]


def _shaped(pattern: str) -> dict[str, Any]:
    """Sample within a pattern: a random model would never write a tool call or close its reasoning."""
    return {
        "response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}},
        "max_tokens": 96,
    }


_CALL = r'<tool_call>\n\{"name": "(look|count)", "arguments": \{"far": (true|false)\}\}\n</tool_call>'
TWO_CALLS = _shaped(rf"[a-z ]{{2,6}}\n{_CALL}\n{_CALL}")
THOUGHT = _shaped(r"<think>\n[a-z ,]{3,12}\n</think>\n\n[A-Za-zäéß ]{2,10}")


@dataclass(slots=True)
class Agent:
    """One rollout: asks, remembers how often."""

    http: aiohttp.ClientSession
    gateway_url: str
    rollout_id: str
    template: Template
    rng: random.Random
    num_calls: int = 0
    system: str = field(init=False)

    def __post_init__(self) -> None:
        self.system = self.rng.choice(SYSTEMS)

    def opening(self, system: str | None = None) -> list[Message]:
        start = (
            [{"role": "system", "content": system or self.system}] if "system" in self.template.can else []
        )
        return [*start, self.user()]

    def user(self) -> Message:
        return {"role": "user", "content": self.rng.choice(SAYINGS)}

    async def ask(self, messages: list[Message], **options: Any) -> Message:
        """The assistant's message, streamed or whole."""
        self.num_calls += 1
        body = {"model": self.template.name, "messages": messages, "max_tokens": self.rng.randint(1, 12)}
        body |= {"stream": self.rng.random() < 0.3} | options
        url = f"{self.gateway_url}/rollouts/{self.rollout_id}/v1/chat/completions"
        async with self.http.post(url, json=body, headers={"authorization": "Bearer default"}) as got:
            text = (await got.read()).decode()
            assert got.status == 200, f"{self.template.name}: {text}"
        return _assembled(text) if body["stream"] else json.loads(text)["choices"][0]["message"]


def _assembled(events: str) -> Message:
    """The message that a stream adds up to."""
    message: Message = {"role": "assistant", "content": ""}
    calls: dict[int, Message] = {}
    for event in events.split("\n\n"):
        if not event.startswith("data: {"):
            continue
        chunk = json.loads(event[6:])
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
                call |= {"id": part["id"]} if part.get("id") else {}
                function = part.get("function") or {}
                call["function"] |= {"name": function["name"]} if function.get("name") else {}
                call["function"]["arguments"] += function.get("arguments") or ""
    return message | ({"tool_calls": list(calls.values())} if calls else {})


async def echo(agent: Agent) -> None:
    """Plain turns, every answer sent back as it came."""
    messages = agent.opening()
    for _ in range(agent.rng.randint(2, 4)):
        messages += [await agent.ask(messages), agent.user()]


async def rewrite(agent: Agent) -> None:
    """The agent edits what was said: trims it, shortens the middle, drops the first exchange."""
    messages = agent.opening()
    for _ in range(3):
        answer = await agent.ask(messages)
        text = answer.get("content") or "…"
        edited = agent.rng.choice([text.strip() or "-", text.upper() or "-", text[: len(text) // 2] or "-"])
        messages += [{"role": "assistant", "content": edited}, agent.user()]
    await agent.ask([*messages[:-4], *messages[-2:]] if agent.rng.random() < 0.5 else messages[-1:])


async def think(agent: Agent) -> None:
    """Reasoning, sent back apart from the answer in half of the rollouts, within the text in the others."""
    messages, apart = agent.opening(), agent.rng.random() < 0.5
    for _ in range(3):
        # every second thought is cut out of free words: those are no tokens of a grammar
        shaped = agent.rng.random() < 0.5
        answer = await agent.ask(messages, **(THOUGHT if shaped else {}))
        text = answer.get("content") or ""
        said = re.fullmatch(r"<think>\n(.*)\n</think>\n\n(.*)", text, re.DOTALL)
        before, after = said.groups() if said else (text[: len(text) // 2], text[len(text) // 2 :])
        if apart:
            answer = {"role": "assistant", "reasoning": before, "content": after}
        messages += [answer, agent.user()]


async def forced_tool(agent: Agent) -> None:
    """A tool call that the engine itself parsed, its result, and a last word."""
    messages = agent.opening()
    answer = await agent.ask(messages, tools=TOOLS, tool_choice=_named("look"), max_tokens=64)
    results = _results(answer)
    messages += [answer, *results] if results else [answer | {"content": "no"}, agent.user()]
    messages += [await agent.ask(messages, tools=TOOLS, tool_choice="none"), agent.user()]
    await agent.ask(messages, tools=TOOLS, tool_choice="none")


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def parallel_tools(agent: Agent) -> None:
    """Two tool calls in one answer, found in the text by the agent, and both results."""
    messages = agent.opening()
    answer = await agent.ask(messages, tools=TOOLS, tool_choice="none", **TWO_CALLS)
    text = answer["content"] or ""
    found = [json.loads(call) for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text)]
    calls = [
        {
            "id": f"call{number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for number, call in enumerate(found)
    ]
    spoken = {"role": "assistant", "content": text.split("\n<tool_call>")[0], "tool_calls": calls}
    messages += [spoken, *_results(spoken)]
    messages += [await agent.ask(messages, tools=TOOLS, tool_choice="none"), agent.user()]
    await agent.ask(messages, tools=TOOLS, tool_choice="none")


def _results(answer: Message) -> list[Message]:
    return [
        {
            "role": "tool",
            "tool_call_id": call.get("id") or "call",
            "name": call["function"]["name"],
            "content": "nothing 無",
        }
        for call in answer.get("tool_calls") or []
    ]


async def sub_agents(agent: Agent) -> None:
    """Two helpers at once with conversations of their own, while the main one waits, then goes on."""

    async def helper(number: int) -> str:
        messages = agent.opening(f"You are helper {number}.")
        messages += [await agent.ask(messages), agent.user()]
        return (await agent.ask(messages))["content"] or "-"

    messages = agent.opening()
    messages.append(await agent.ask(messages))
    found = await asyncio.gather(helper(1), helper(2))
    messages.append({"role": "user", "content": "They say: " + " / ".join(found)})
    await agent.ask(messages)


async def fork(agent: Agent) -> None:
    """The same question three times at once; the conversation goes on from two of the answers."""
    messages = agent.opening()
    answers = await asyncio.gather(*(agent.ask(messages) for _ in range(3)))
    last = agent.user()
    await asyncio.gather(*(agent.ask([*messages, answer, last]) for answer in answers[1:]))


Script = Callable[[Agent], Awaitable[None]]
SCRIPTS: dict[Script, frozenset[str]] = {
    echo: frozenset(),
    think: frozenset(),
    parallel_tools: frozenset({"tools", "parallel"}),
    rewrite: frozenset(),
    forced_tool: frozenset({"tools"}),
    sub_agents: frozenset(),
    fork: frozenset(),
}


def scripts_for(template: Template, count: int) -> list[Script]:
    """`count` rollouts, every script that the template can render in turn."""
    able = [script for script, needs in SCRIPTS.items() if needs <= template.can]
    return [able[number % len(able)] for number in range(count)]
