"""Calls that are stored without what their parents hold come back whole."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from insitu.wire.listed_calls import expand


def talk(num_turns: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation, whole and as it is listed."""
    whole: list[dict[str, Any]] = []
    listed: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    prompt: list[int] = []
    tools = [{"name": "look"}]
    for turn in range(num_turns):
        question, answer = (
            {"role": "user", "content": f"{turn}"},
            {"role": "assistant", "content": f"a{turn}"},
        )
        own_messages, own_prompt = ([answer, question] if turn else [question]), [turn, 7]
        if turn:
            own_messages = [whole[-1]["answer"], question]
        messages, prompt = [*messages, *own_messages], [*prompt, *own_prompt]
        call = {"id": f"c{turn}", "answer": answer, "output_ids": [turn], "logprobs": [-0.5]}
        whole.append({**call, "messages": messages, "prompt_ids": prompt, "tools": tools})
        parent = f"c{turn - 1}" if turn else None
        shared = (len(prompt) - len(own_prompt), len(messages) - len(own_messages), bool(turn))
        sharing = dict(zip(("shared_tokens", "shared_messages", "shared_tools"), shared, strict=True))
        own = {"messages": own_messages, "prompt_ids": own_prompt, "tools": None if turn else tools}
        listed.append({**call, **own, "parent_id": parent, **sharing})
        prompt = [*prompt, turn]
    return whole, listed


@given(num_turns=st.integers(0, 12))
def test_a_conversation_comes_back_whole(num_turns: int) -> None:
    whole, listed = talk(num_turns)
    assert expand(listed) == whole
    bare = [{k: v for k, v in c.items() if k not in ("prompt_ids", "output_ids", "logprobs")} for c in whole]
    assert expand(listed, tokens=False) == bare


def test_whole_calls_stay_as_they_are() -> None:
    whole, _ = talk(3)
    assert expand(whole) == whole
