"""What rewards can see of a rollout."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from insitu.rewards.calls import Call
from insitu.rewards.items import EvalItem
from insitu.rewards.trajectory import ToolCall, messages, spoken, tool_calls
from insitu.types import ModelCall

ASK = {"role": "user", "content": "What is 2 + 2, and 3 + 3?"}


def asks(call_id: str, *tools: tuple[str, str, str]) -> dict[str, Any]:
    """A call of which the answer asks for tools: (id, name, arguments)."""
    asked = [
        {"id": tool_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for tool_id, name, arguments in tools
    ]
    return {"id": call_id, "answer": {"role": "assistant", "content": None, "tool_calls": asked}}


def after(call: dict[str, Any], *told: dict[str, Any]) -> dict[str, Any]:
    return {**call, "messages": list(told)}


def says(call_id: str, text: str) -> dict[str, Any]:
    return {"id": call_id, "answer": {"role": "assistant", "content": text}}


def told(tool_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": tool_id, "content": content}


def item(*calls: dict[str, Any]) -> EvalItem:
    return EvalItem("a", "in", "out", "out", calls=calls, seconds=1.5)


def test_tool_calls_come_with_their_results_and_their_model_call() -> None:
    first = after(asks("c1", ("t1", "add", '{"a": 2}'), ("t2", "add", "{broken")), ASK)
    history = [ASK, first["answer"], told("t2", ""), told("t1", [{"type": "text", "text": "4"}])]
    second = after(asks("c2", ("t3", "stop", "{}")), *history)
    assert tool_calls(item(first, second)) == [
        ToolCall("c1", "t1", "add", {"a": 2}, '{"a": 2}', "4"),
        ToolCall("c1", "t2", "add", None, "{broken", ""),
        ToolCall("c2", "t3", "stop", {}, "{}", None),
    ]


def test_ids_that_are_used_again_in_every_turn_pair_with_their_own_results() -> None:
    first = after(asks("c1", ("0", "add", "1")), ASK)
    second = after(asks("c2", ("0", "add", "2")), ASK, first["answer"], told("0", "one"))
    third = after(asks("c3", ("0", "add", "3")), *second["messages"], second["answer"], told("0", "two"))
    assert [each.result for each in tool_calls(item(first, second, third))] == ["one", "two", None]


def test_a_rewritten_history_is_searched_too() -> None:
    first = after(asks("c1", ("t1", "look", "{}")), ASK)
    second = after(says("c2", "4"), {"role": "user", "content": "in short"}, told("t1", "4"))
    assert [each.result for each in tool_calls(item(first, second))] == ["4"]


def test_messages_are_told_once_with_the_calls_that_sampled_them() -> None:
    first = after(asks("c1", ("t1", "add", "{}")), ASK)
    answered = {key: value for key, value in first["answer"].items() if value is not None}
    second = after(says("c2", "4"), ASK, answered, told("t1", "4"))
    helper = {"role": "user", "content": "And you?"}
    third = after(says("c3", "no"), helper)
    assert messages(item(first, second, third)) == [
        ASK,
        first["answer"] | {"call_id": "c1"},
        told("t1", "4"),
        second["answer"] | {"call_id": "c2"},
        helper,
        third["answer"] | {"call_id": "c3"},
    ]


def test_plain_completions_and_rollouts_without_calls() -> None:
    plain = {"id": "c1", "messages": None, "answer": {"text": "4"}}
    assert messages(item(plain)) == [{"role": "assistant", "text": "4", "call_id": "c1"}]
    assert tool_calls(item(plain)) == tool_calls(item()) == messages(item()) == []


def test_a_call_has_the_fields_of_a_recorded_call_with_counts_in_place_of_its_tokens() -> None:
    tokens = {"prompt_ids", "output_ids", "logprobs"}
    counts = {"num_prompt_tokens", "num_output_tokens"}
    assert set(Call.__annotations__) == {field.name for field in fields(ModelCall)} - tokens | counts


def test_messages_are_copies_and_calls_come_back_as_they_were_given() -> None:
    call = after(says("c1", "4"), ASK)
    messages(item(call))[0]["content"] = "changed"
    assert call["messages"] == [ASK] == [{"role": "user", "content": "What is 2 + 2, and 3 + 3?"}]
    assert [given is call for _, given in spoken([call])] == [False, True]
