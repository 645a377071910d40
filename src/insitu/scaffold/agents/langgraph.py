"""A shop's till with LangGraph: a graph of one node."""

from __future__ import annotations

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from insitu import current_rollout

INSTRUCTIONS = "You are the till of a shop. Reply with the total price in euros, the number only."


async def till(state: MessagesState) -> dict[str, list[AnyMessage]]:
    """Ask the model. Its object is made here, not at the top: every rollout has an address of its own."""
    llm: ChatOpenAI = current_rollout().client("langchain")
    return {"messages": [await llm.ainvoke(state["messages"])]}


GRAPH = StateGraph(MessagesState).add_node(till).add_edge(START, "till").add_edge("till", END).compile()


async def run(question: str) -> str:
    """Return the model's answer to an order."""
    asked: list[AnyMessage] = [SystemMessage(INSTRUCTIONS), HumanMessage(question)]
    state = await GRAPH.ainvoke(MessagesState(messages=asked))
    return state["messages"][-1].text
