"""A tic-tac-toe player with LangGraph: the model moves, the board answers, until the game has ended."""

from __future__ import annotations

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from rules import EXAMPLES, RULES, Game

from insitu import current_rollout


class State(MessagesState):
    """The conversation so far, and the game that it is about."""

    game: Game


async def player(state: State) -> dict[str, list[AnyMessage]]:
    """Ask the model for a move. Its object is made here: every rollout has an address of its own."""
    llm: ChatOpenAI = current_rollout().client("langchain")
    return {"messages": [await llm.ainvoke(state["messages"])]}


def board(state: State) -> dict[str, list[AnyMessage]]:
    """Play the move and show the board, unless the game has ended."""
    game = state["game"]
    game.move(state["messages"][-1].text)
    return {"messages": [] if game.ending else [HumanMessage(game.shown())]}


def following(state: State) -> str:
    """Return the node after the board's."""
    return END if state["game"].ending else "player"


GRAPH = (
    StateGraph(State)
    .add_node(player)
    .add_node(board)
    .add_edge(START, "player")
    .add_edge("player", "board")
    .add_conditional_edges("board", following, ["player", END])
    .compile()
)


async def play(question: dict[str, str]) -> dict[str, object]:
    """Return the model's legal moves and how the game ended: won, drawn, lost or illegal."""
    game = Game(question["opponent"])
    messages: list[AnyMessage] = [SystemMessage(RULES)]
    for asked, answered in EXAMPLES:
        messages += [HumanMessage(asked), AIMessage(answered)]
    await GRAPH.ainvoke(State(messages=[*messages, HumanMessage(game.shown())], game=game))
    return {"moves": game.mine, "ending": game.ending}
