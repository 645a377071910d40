"""A LangGraph agent."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool


@tool
def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    graph = create_agent(
        context.client("langchain"), [measure], system_prompt="You measure things with the tool."
    )
    state = await graph.ainvoke({"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 8})
    return state["messages"][-1].text
