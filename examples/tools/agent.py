"""A tool agent with the OpenAI SDK: it looks numbers up until it answers."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from shop import TOOLS, use

from insitu import WorkflowContext

MAX_CALLS = 4
RULES = "You answer questions about a shop. Look up every number with your tools. Reply with the number only."
SPELLED_OUT = (
    'To look up a price, reply <tool_call>{"name": "price", "arguments": {"item": "ITEM"}}</tool_call>, '
    'for the number in stock <tool_call>{"name": "stock", "arguments": {"item": "ITEM"}}</tool_call>.'
)
EXAMPLES = (
    ("What is the price of the sofa?", "price", "sofa", "81"),
    ("How many of the hat are in stock?", "stock", "hat", "7"),
)


async def run(question: str, context: WorkflowContext, spell_out: bool = False) -> str:
    """Return the model's answer. `spell_out` is for models whose template does not show tools to them."""
    client: AsyncOpenAI = context.client("openai")
    messages = [*first_messages(spell_out), {"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        answered = await client.chat.completions.create(
            model=context.llm().model, messages=messages, tools=TOOLS
        )
        reply = answered.choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply.model_dump(include={"role", "content", "tool_calls"}))
        for call in reply.tool_calls:
            said = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return ""


def first_messages(spell_out: bool) -> list[dict[str, Any]]:
    """Return the rules, and for a model that needs it the form of a tool call with examples."""
    if not spell_out:
        return [{"role": "system", "content": RULES}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{RULES} {SPELLED_OUT}"}]
    for asked, tool, item, found in EXAMPLES:
        call = f'<tool_call>{{"name": "{tool}", "arguments": {{"item": "{item}"}}}}</tool_call>'
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": call},
            {"role": "tool", "content": found, "tool_call_id": "example"},
            {"role": "assistant", "content": found},
        ]
    return messages
