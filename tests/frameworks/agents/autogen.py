"""An assistant of AutoGen's AgentChat."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent


async def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    measurer = AssistantAgent(
        "measurer",
        model_client=context.client("autogen"),
        tools=[measure],
        system_message="You measure things with the tool.",
        reflect_on_tool_use=True,
    )
    result = await measurer.run(task=question)
    return result.messages[-1].content  # type: ignore[attr-defined]
