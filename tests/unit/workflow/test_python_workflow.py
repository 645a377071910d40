"""`_type: python` and `@register_workflow`: the user's functions, async or blocking."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from insitu import plugins
from insitu.entry import load_entry
from insitu.errors import Conflict, InvalidRequest
from insitu.plugins import ComponentConfig, Kind
from insitu.types import Ending
from insitu.workflow.context import WorkflowContext, current_rollout
from insitu.workflow.execute import execute
from insitu.workflow.kinds import function as function_module
from insitu.workflow.kinds.function import FunctionWorkflow
from insitu.workflow.kinds.python import PythonConfig, make_python
from insitu.workflow.kinds.registered import RegisteredConfig, register_workflow

NO_PARTS: Any = SimpleNamespace(directory=Path("/nowhere"))


async def run(agent: Any, context: WorkflowContext, seconds: float = 5.0, **args: Any) -> Any:
    async with asyncio.timeout(30):
        return await execute(FunctionWorkflow("f", agent, args), "in", context, seconds, grace_seconds=0.2)


class Instance:
    def __init__(self, is_async: bool) -> None:
        self.threads: list[int] = []

    def __call__(self, value: Any) -> Any:
        self.threads.append(threading.get_ident())
        return f"called {value}"


class AsyncInstance:
    async def __call__(self, value: Any, context: WorkflowContext) -> Any:
        return [value, context.rollout_id]


async def test_sync_and_async_with_and_without_context(context: WorkflowContext) -> None:
    async def with_both(question: Any, ctx: WorkflowContext) -> Any:
        return [question, ctx.rollout_id]

    def blocking(question: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert threading.current_thread().daemon
        return [question, current_rollout().rollout_id]

    def returns_awaitable(question: Any) -> Any:
        return asyncio.sleep(0, [question, "r1"])

    for agent in (with_both, blocking, returns_awaitable, AsyncInstance()):
        assert (await run(agent, context)).output == ["in", "r1"]
    assert (await run(Instance(False), context)).output == "called in"
    partial = functools.partial(lambda extra, question: [question, extra], "r1")
    assert (await run(partial, context)).output == ["in", "r1"]


async def test_args(context: WorkflowContext) -> None:
    def agent(question: Any, rounds: int, tools: list[str], *, extra: str = "-") -> Any:
        tools.append("changed")
        return [question, rounds, tools, extra]

    wrapped = FunctionWorkflow("f", agent, {"rounds": 3, "tools": ["t"]})
    for _ in range(2):  # what one rollout changes, the next one does not see
        outcome = await execute(wrapped, "in", context, 5)
        assert outcome.output == ["in", 3, ["t", "changed"], "-"]


@pytest.mark.parametrize(
    ("agent", "args"),
    [
        (lambda: 1, {}),
        (lambda a, b, c: 1, {}),
        (lambda a, *, needed: 1, {}),
        (lambda a: 1, {"unknown": 1}),
        (lambda question: 1, {"question": 1}),
    ],
)
def test_wrong_signatures_are_refused_before_the_first_rollout(agent: Any, args: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be called with"):
        FunctionWorkflow("`m:f`", agent, args)


async def _async_generator(value: Any) -> Any:
    yield value


def _generator(value: Any) -> Any:
    yield value


@pytest.mark.parametrize(
    ("what", "said"),
    [(_async_generator, "generator"), (_generator, "generator"), (Instance, "class"), (3, "not a function")],
)
def test_what_is_no_function_is_refused(what: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        FunctionWorkflow("`m:f`", what)


async def test_exceptions_of_threads(context: WorkflowContext) -> None:
    def raises(value: Any) -> Any:
        raise ValueError("wrong")

    def stops(value: Any) -> Any:
        return next(iter([]))

    def exits(value: Any) -> Any:
        sys.exit("bye")

    endings = [await run(agent, context) for agent in (raises, stops, exits)]
    assert [outcome.ending for outcome in endings] == [Ending.TOOL_ERROR] * 3
    assert endings[0].reason == "ValueError: wrong"
    assert "StopIteration" in endings[1].reason
    assert "sys.exit(bye)" in endings[2].reason


async def test_hung_threads_are_left_counted_and_bounded(
    context: WorkflowContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_module, "MAX_ABANDONED", 3)
    release = threading.Event()

    def hangs(value: Any) -> Any:
        release.wait(30)
        return "late"

    agent = FunctionWorkflow("`m:hangs`", hangs)
    started = time.monotonic()
    outcomes = await asyncio.gather(*(execute(agent, "in", context, 0.05) for _ in range(4)))
    assert time.monotonic() - started < 3
    assert {outcome.ending for outcome in outcomes} == {Ending.TIMEOUT}
    assert agent.threads.alive_abandoned == 4
    refused = await execute(agent, "in", context, 5)
    assert refused.ending is Ending.INFRASTRUCTURE
    assert "4 threads of `m:hangs` still run" in refused.reason
    assert "async def" in refused.reason
    assert "_type: command" in refused.reason
    release.set()
    async with asyncio.timeout(30):
        while agent.threads.alive_abandoned:
            await asyncio.sleep(0.01)
    assert (await execute(agent, "in", context, 5)).output == "late"


def test_a_hung_thread_does_not_keep_the_program(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(
        "import asyncio, time\n"
        "from insitu.workflow.binding import LLMBinding\n"
        "from insitu.workflow.context import WorkflowContext\n"
        "from insitu.workflow.execute import execute\n"
        "from insitu.workflow.kinds.function import FunctionWorkflow\n"
        "from insitu.workflow.kinds.registered import RegisteredConfig\n"
        "context = WorkflowContext(rollout_id='r', example_id='e', binding=LLMBinding({}),\n"
        "    config=RegisteredConfig(type_name='t'))\n"
        "workflow = FunctionWorkflow('f', lambda value: time.sleep(600))\n"
        "print(asyncio.run(execute(workflow, 1, context, 0.05)).ending)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "timeout"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


async def test_an_entry_of_the_current_directory(
    project: Path, context: WorkflowContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)  # of another test's project
    (project / "my_agent.py").write_text(
        "class Tools:\n    @staticmethod\n    def run(x, n=1):\n        return x * n\n"
    )
    config = PythonConfig.model_validate({"_type": "python", "entry": "my_agent:Tools.run", "args": {"n": 2}})
    agent = make_python(config, NO_PARTS)
    make_python(config, NO_PARTS)
    assert sys.path.count(os.getcwd()) == 1
    assert (await execute(agent, "ab", context, 5)).output == "abab"


def test_entries_that_cannot_be_imported(project: Path) -> None:
    (project / "broken_agent.py").write_text("import no_such_library_here\n")
    (project / "exiting_agent.py").write_text("import sys\nsys.exit(2)\n")
    (project / "fine_agent.py").write_text("def answer(x):\n    return x\n")
    cases = {
        "missing_agent:run": ["no module `missing_agent`", str(project)],
        "missing_pkg.sub:run": ["no module `missing_pkg`", str(project)],
        "broken_agent:run": ["importing `broken_agent` failed", "no_such_library_here"],
        "exiting_agent:run": ["importing `exiting_agent` failed: SystemExit: 2"],
        "fine_agent:anwser": ["has no `anwser`", "did you mean `answer`", "fine_agent.py"],
    }
    for entry, said in cases.items():
        with pytest.raises(InvalidRequest) as caught:
            load_entry(entry)
        for part in said:
            assert part in str(caught.value), entry


@pytest.mark.parametrize("entry", ["module", "module:", ":f", "a b:c", "module.py:f()", "m:f:g"])
def test_malformed_entries(entry: str) -> None:
    with pytest.raises(ValidationError):
        PythonConfig.model_validate({"_type": "python", "entry": entry})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))


async def test_a_registered_function(registry: None, context: WorkflowContext) -> None:
    class TurnsConfig(ComponentConfig):
        turns: int = 3

    @register_workflow("test_turns", config=TurnsConfig)
    async def play(value: Any, ctx: WorkflowContext) -> Any:
        return [value, ctx.config.turns]  # type: ignore[attr-defined]

    @register_workflow("test_plain")
    def plain(value: Any) -> Any:
        return value

    assert plain("itself") == "itself"  # still a plain function
    component = plugins.find(Kind.WORKFLOW, "test_turns")
    config = component.config.model_validate({"_type": "test_turns", "turns": 5})
    async with plugins.build(component, config, NO_PARTS) as built:
        context.config = config
        assert (await execute(built, "in", context, 5)).output == ["in", 5]
    found = plugins.find(Kind.WORKFLOW, "test_plain")
    assert found.config is RegisteredConfig
    assert found.config.model_validate({"_type": "test_plain", "llm": "x", "description": "d"})
    with pytest.raises(ValidationError):
        found.config.model_validate({"_type": "test_plain", "lm": "x"})


def test_registering_refuses_early(registry: None) -> None:
    with pytest.raises(InvalidRequest, match="cannot be called with"):
        register_workflow("test_wrong")(lambda a, b, c: 1)
    with pytest.raises(InvalidRequest, match="generator"):
        register_workflow("test_wrong")(_generator)
    with pytest.raises(Conflict, match="python"):
        register_workflow("python")(lambda value: value)


def test_the_kinds_are_known() -> None:
    plugins.load_entry_points()
    assert {"python", "command", "http"} <= set(plugins.names(Kind.WORKFLOW))
