"""A loop over the SDK of OpenAI."""

from __future__ import annotations

import json
from typing import Any

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


async def agent(question: str, context: Any) -> str:
    client = context.client("openai")
    messages: list[Any] = [
        {"role": "system", "content": "You measure things with the tool."},
        {"role": "user", "content": question},
    ]
    for _ in range(3):
        reply = await client.chat.completions.create(
            model=context.llm().model, messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = measure(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no answer"
