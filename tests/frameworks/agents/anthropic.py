"""A loop over the SDK of Anthropic."""

from __future__ import annotations

from typing import Any

TOOL = {
    "name": "measure",
    "description": "Measures a thing.",
    "input_schema": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
}


def measure(thing: str) -> str:
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    client = context.client("anthropic")
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        reply = await client.messages.create(
            model=context.llm().model,
            max_tokens=context.llm().options["max_tokens"],
            system="You measure things with the tool.",
            messages=messages,
            tools=[TOOL],
        )
        messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": u.id, "content": measure(**u.input)} for u in uses]
        messages.append({"role": "user", "content": results})
    return "no answer"
