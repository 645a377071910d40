"""The examples of docs/frameworks.md run in a rollout; every framework has one, and a version that passed."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from insitu.types import Ending
from insitu.workflow.frameworks import FRAMEWORKS as ALL
from tests.frameworks.checks import run_rollouts
from tests.frameworks.test_matrix import FRAMEWORKS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
NO_CALL = {"google_adk"}
"""Their examples end before the model is called."""


def example(framework: str) -> str:
    (found,) = re.findall(rf"```python\n(# {framework}\n.*?)```", DOCUMENT, re.DOTALL)
    return found


def tools_of(framework: str) -> list[Any]:
    from tests.frameworks.agents import google_adk, langchain, openai, openai_agents

    chosen = {"openai": openai.TOOL, "langchain": langchain.measure, "openai_agents": openai_agents.measure}
    return [chosen.get(framework, google_adk.measure)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_the_example_runs(
    framework: str, scripted_gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)  # with it the Agents SDK sends its traces away
    body = textwrap.indent(example(framework), "    ")
    names: dict[str, Any] = {}
    exec(f"async def run(question, context, messages, tools):\n{body}\n    return 'done'", names)

    async def agent(question: str, context: Any) -> str:
        messages = [{"role": "user", "content": question}]
        return await names["run"](question, context, messages, tools_of(framework))

    for rollout in await run_rollouts(framework, agent, scripted_gateway, "run", {"max_tokens": 300}):
        assert rollout.outcome.ending is Ending.COMPLETED, rollout.outcome.reason
        assert bool(rollout.calls) is (framework not in NO_CALL)


@pytest.mark.parametrize("framework", ALL)
def test_every_framework_is_described(framework: str) -> None:
    assert f'context.client("{framework}"' in example(framework)
    assert re.search(rf"^\| .* \| `{framework}` \| .*\d+\.\d+.* \|$", DOCUMENT, re.MULTILINE)
