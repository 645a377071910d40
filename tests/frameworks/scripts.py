"""Scripts of the stand-in engine for frameworks with a protocol of their own over tool calls or over text."""

from __future__ import annotations

import json

from tests.support.standin_tools import THING, measured, next_words

Messages = list[dict[str, str]]


def smolagents_words(messages: Messages) -> str:
    """smolagents ends with a call of its tool `final_answer`."""
    words = next_words(messages)
    if not words.startswith("The answer is"):
        return words
    return "<call>" + json.dumps({"name": "final_answer", "arguments": {"answer": words}}) + "</call>"


def dspy_words(messages: Messages) -> str:
    """DSPy's ReAct asks for a thought and a tool until the tool is `finish`, then for the answer."""
    said = "\n".join(message["content"] for message in messages)
    found = THING.search(said)
    assert found is not None, said
    known = measured(found[0]) in said
    if "next_tool_name" not in messages[-1]["content"]:
        fields = {"reasoning": "The tool said it.", "answer": f"The answer is {measured(found[0])}."}
    elif known:
        fields = {"next_thought": "I know it.", "next_tool_name": "finish", "next_tool_args": "{}"}
    else:
        args = json.dumps({"thing": found[0]})
        fields = {"next_thought": "I measure.", "next_tool_name": "measure", "next_tool_args": args}
    return (
        "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items())
        + "[[ ## completed ## ]]"
    )
