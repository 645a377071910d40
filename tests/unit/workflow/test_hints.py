"""The hint that follows an agent's exception: the next thing to do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from insitu.entry import load_entry
from insitu.errors import InvalidRequest
from insitu.types import Ending
from insitu.workflow.context import WorkflowContext
from insitu.workflow.execute import execute
from insitu.workflow.kinds.function import FunctionWorkflow

REQUEST = httpx.Request("POST", "http://g/v1/chat/completions")


class AsyncCompletions:
    async def create(self) -> str:
        return "an answer"


async def reason_of(agent: Any, context: WorkflowContext) -> tuple[Ending, str]:
    outcome = await execute(FunctionWorkflow("agent", agent), "in", context, 5)
    return outcome.ending, outcome.reason


def refuse(status: int, message: str) -> Any:
    def agent(_: Any) -> str:
        response = httpx.Response(status, json={"error": {"message": message}}, request=REQUEST)
        raise openai.OpenAI(api_key="k")._make_status_error_from_response(response)

    return agent


async def test_an_async_client_in_a_blocking_agent(context: WorkflowContext) -> None:
    def agent(_: Any) -> str:
        answer: Any = AsyncCompletions().create()
        try:
            return answer.choices[0]
        finally:
            answer.close()

    _, reason = await reason_of(agent, context)
    assert (
        "'coroutine' object has no attribute 'choices'; a call of an async client was not awaited" in reason
    )
    assert "make the entry `async def`" in reason


async def test_a_blocking_client_in_an_async_agent(context: WorkflowContext) -> None:
    async def agent(_: Any) -> str:
        answer: Any = "an answer"
        return await answer

    _, reason = await reason_of(agent, context)
    assert "can't be used in 'await' expression; the call is not asynchronous: drop `await`" in reason


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("This model's maximum context length is 2048 tokens. However, your prompt contains 2060 input "
         "tokens", "more than 2048 tokens: insitu serve --max-seq-length 4096"),
        ("The decoder prompt (length 5000) is longer than the maximum model length of 2048.",
         "more than 2048 tokens: insitu serve --max-seq-length 8192"),
        ("This model's maximum context length is 256 tokens. However, your prompt contains 90000 characters "
         "(more than 2048 characters)", "more than 256 tokens: insitu serve --max-seq-length 512"),
        ("context_length_exceeded", "insitu serve --max-seq-length N"),
    ],
)  # fmt: skip
async def test_a_prompt_that_is_too_long(context: WorkflowContext, said: str, named: str) -> None:
    ending, reason = await reason_of(refuse(400, said), context)
    assert ending is Ending.CONTEXT_OVERFLOW
    assert reason.endswith(named)


async def test_a_wrong_key(context: WorkflowContext) -> None:
    _, reason = await reason_of(refuse(401, "The key is missing or wrong."), context)
    assert "check llms.policy.api_key, llms.judge-1.api_key" in reason
    assert "INSITU_API_KEY" in reason


async def test_any_other_exception_stands_alone(context: WorkflowContext) -> None:
    def agent(_: Any) -> str:
        raise KeyError("tool")

    assert await reason_of(agent, context) == (Ending.TOOL_ERROR, "KeyError: 'tool'")
    assert (await reason_of(refuse(404, "no such model"), context))[1].endswith("no such model")


def of_langgraph(name: str, **fields: Any) -> Any:
    return type(name, (), {"__module__": "langgraph.graph.state", **fields})()


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (of_langgraph("StateGraph"), 'graph = build_graph(context.client("langchain")).compile()\n'),
        (
            of_langgraph("CompiledStateGraph", ainvoke=None),
            'graph = build_graph(context.client("langchain"))\n',
        ),
    ],
)
def test_a_graph_is_no_function(monkeypatch: pytest.MonkeyPatch, found: Any, line: str) -> None:
    module = ModuleType("graph_agent")
    module.graph = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graph_agent", module)
    with pytest.raises(InvalidRequest, match=f"is a {type(found).__name__}, not a function") as caught:
        load_entry("graph_agent:graph")
    assert "async def run(question, context):" in caught.value.hint
    assert line in caught.value.hint
