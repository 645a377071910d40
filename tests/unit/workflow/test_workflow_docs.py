"""The examples of docs/workflows.md do what the page says."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from insitu import plugins
from insitu.plugins import Kind
from insitu.types import Ending
from insitu.workflow.context import WorkflowContext
from insitu.workflow.execute import execute
from insitu.workflow.kinds.command import CommandWorkflow
from insitu.workflow.kinds.function import FunctionWorkflow
from insitu.workflow.kinds.http import HttpConfig, HttpWorkflow

DOCUMENT = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text()
NO_PARTS: Any = SimpleNamespace(directory=Path("/nowhere"))


def block(language: str, mark: str) -> str:
    """The code block of the page that contains `mark`."""
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL) if mark in code]
    return found


class Gateway:
    """Stands in for the gateway: answers every chat and remembers what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []

    async def chat(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, request.headers["authorization"], await request.json()))
        message = {"role": "assistant", "content": "4"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )


@pytest.fixture
async def gateway(context: WorkflowContext) -> AsyncIterator[Gateway]:
    gateway, app = Gateway(), web.Application()
    app.router.add_post("/rollouts/r1/v1/chat/completions", gateway.chat)
    async with TestServer(app) as server:
        context.binding = replace(context.binding, gateway_url=str(server.make_url("")).rstrip("/"))
        yield gateway


async def check(workflow: Any, context: WorkflowContext, gateway: Gateway) -> None:
    """It answers, and its model call belongs to the rollout."""
    outcome = await execute(workflow, '2 + "2"?', context, 20)
    assert (outcome.ending, outcome.output) == (Ending.COMPLETED, "4"), outcome.reason
    ((_, key, body),) = gateway.calls
    assert key == "Bearer gateway-key"
    assert body["model"] == "my-run"
    assert body["messages"] == [{"role": "user", "content": '2 + "2"?'}]


async def test_python(context: WorkflowContext, gateway: Gateway) -> None:
    names: dict[str, Any] = {}
    exec(block("python", "# my_agent.py"), names)
    await check(FunctionWorkflow("answer", names["answer"], {"max_turns": 4}), context, gateway)


async def test_command(context: WorkflowContext, gateway: Gateway, tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(block("bash", "agent.sh"))
    script.chmod(0o755)
    fields = yaml.safe_load(block("yaml", "agent.sh"))["workflow"] | {"cwd": str(tmp_path)}
    component = plugins.find(Kind.WORKFLOW, "command")
    workflow = CommandWorkflow(component.config.model_validate(fields), NO_PARTS)  # type: ignore[arg-type]
    await check(workflow, context, gateway)


async def test_http(context: WorkflowContext, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_API_KEY", "gateway-key")
    names: dict[str, Any] = {"__name__": "server"}
    exec(block("python", "# server.py"), names)
    fields = yaml.safe_load(block("yaml", "_type: http"))["workflow"]
    async with TestServer(names["app"]) as server:
        fields |= {"url": str(server.make_url("/run")), "headers": {}}
        workflow = HttpWorkflow(HttpConfig.model_validate(fields), NO_PARTS)
        await check(workflow, context, gateway)
        await workflow.aclose()


async def test_registered(context: WorkflowContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))
    exec(block("python", "@register_workflow"), {"__name__": "my_game.workflow"})
    component = plugins.find(Kind.WORKFLOW, "tic_tac_toe")
    context.config = component.config.model_validate({"_type": "tic_tac_toe", "max_turns": 3})
    async with plugins.build(component, context.config, NO_PARTS) as built:
        outcome = await execute(built, "X", context, 5)
    assert outcome.output == "X played 3 turns"


@pytest.mark.parametrize("kind", ["python", "command", "http"])
def test_every_field_is_documented(kind: str) -> None:
    shown = yaml.safe_load(block("yaml", f"_type: {kind}"))["workflow"]
    component = plugins.find(Kind.WORKFLOW, kind)
    component.config.model_validate(shown)
    fields = {field.alias or name for name, field in component.config.model_fields.items()}
    assert fields - shown.keys() <= {"llm"}
