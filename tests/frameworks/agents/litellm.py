"""A loop over LiteLLM."""

from __future__ import annotations

import json
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measures a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
    },
}


def measure(thing: str) -> str:
    return thing.replace("thing-", "measured-")


def start(question: str) -> list[Any]:
    return [
        {"role": "system", "content": "You measure things with the tool."},
        {"role": "user", "content": question},
    ]


def go_on(messages: list[Any], message: litellm.Message) -> bool:
    """Call the tools that the model asks for; False when it asks for none."""
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        result = measure(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return bool(message.tool_calls)


async def agent(question: str, context: Any) -> str:
    llm, messages = context.client("litellm"), start(question)
    for _ in range(3):
        reply = await llm.acompletion(messages, tools=[TOOL])
        if not go_on(messages, reply.choices[0].message):
            break
    return messages[-1].get("content") or ""


def blocking_agent(question: str, context: Any) -> str:
    llm, messages = context.client("litellm"), start(question)
    for _ in range(3):
        reply = llm.completion(messages, tools=[TOOL])
        if not go_on(messages, reply.choices[0].message):
            break
    return messages[-1].get("content") or ""
