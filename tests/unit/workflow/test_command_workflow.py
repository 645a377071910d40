"""`_type: command`: real programs, real process groups, nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from insitu.errors import InvalidRequest
from insitu.types import Ending
from insitu.workflow.context import WorkflowContext
from insitu.workflow.execute import execute
from insitu.workflow.kinds.command import CommandConfig, CommandWorkflow
from insitu.workflow.outcome import Outcome

NO_PARTS: Any = None


def build(*command: str, **fields: Any) -> CommandWorkflow:
    config = CommandConfig.model_validate({"_type": "command", "command": list(command), **fields})
    return CommandWorkflow(config, NO_PARTS)


async def run(
    context: WorkflowContext, *command: str, value: Any = "in", seconds: float = 10.0, **fields: Any
) -> Outcome:
    async with asyncio.timeout(15):
        return await execute(build(*command, **fields), value, context, seconds)


async def gone(*pids: int) -> bool:
    """Whether these processes end within a second; an unreaped one counts as ended."""
    for _ in range(100):
        alive = [pid for pid in pids if psutil.pid_exists(pid) and _status(pid) != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        await asyncio.sleep(0.01)
    return False


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def no_children() -> bool:
    """Nothing unreaped is left of this process."""
    return not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


async def pids_in(path: Path, number: int) -> list[int]:
    async with asyncio.timeout(30):
        while not path.exists() or len(path.read_text().split()) < number:
            await asyncio.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]


async def test_stdin_to_stdout(context: WorkflowContext) -> None:
    assert (await run(context, "cat", value="Grüße\n\n")).output == "Grüße"
    assert (await run(context, "cat", value={"a": ["é"]})).output == '{"a": ["é"]}'
    assert (await run(context, "cat", value={"a": 1}, output="json")).output == {"a": 1}
    assert no_children()


async def test_input_as_the_last_argument(context: WorkflowContext) -> None:
    outcome = await run(context, "printf", "%s|", "first", value="a b; $(rm x)", input="argument")
    assert outcome.output == "first|a b; $(rm x)|"  # no shell reads it
    big = await run(context, "echo", value="x" * 3_000_000, input="argument")
    assert big.ending is Ending.TOOL_ERROR
    assert "too long to be an argument" in big.reason


async def test_the_environment(
    context: WorkflowContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FROM_OUTSIDE", "yes")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    show = "import json, os; print(json.dumps(dict(os.environ) | {'cwd': os.getcwd()}))"
    given = {"PORT": 8080, "INSITU_MODEL": "mine"}
    (outcome) = await run(context, sys.executable, "-c", show, env=given, cwd=str(tmp_path), output="json")
    seen = outcome.output
    assert seen["FROM_OUTSIDE"] == "yes"
    assert seen["OPENAI_BASE_URL"] == "http://gateway:8000/rollouts/r1/v1"
    assert seen["OPENAI_API_KEY"] == "gateway-key"
    assert (seen["PORT"], seen["INSITU_MODEL"]) == ("8080", "mine")
    assert seen["cwd"] == str(tmp_path.resolve())


def test_values_of_env_are_not_shown() -> None:
    fields = {"_type": "command", "command": ["cat"], "env": {"KEY": "hush"}}
    assert "hush" not in repr(CommandConfig.model_validate(fields))


async def test_a_failing_program_says_its_last_words(context: WorkflowContext) -> None:
    script = (
        "print('ignored'); import sys; sys.stderr.write('x' * 5000 + '\\x1b[31mlast\\nwords\\n'); sys.exit(3)"
    )
    outcome = await run(context, sys.executable, "-c", script)
    assert (outcome.ending, outcome.output) == (Ending.TOOL_ERROR, None)
    assert "exited with 3" in outcome.reason
    assert outcome.reason.endswith("\\x1b[31mlast\\nwords")
    assert 1_900 < len(outcome.reason) < 2_200
    silent = await run(context, "false")
    assert silent.reason == "`false` exited with 1: nothing on its standard error"
    killed = await run(context, sys.executable, "-c", "import os; os.kill(os.getpid(), 11)")
    assert "was killed by SIGSEGV" in killed.reason


async def test_a_program_can_say_what_kind_of_failure_it_was(context: WorkflowContext) -> None:
    lost = await run(context, "sh", "-c", "echo gateway away >&2; exit 75")
    assert lost.ending is Ending.INFRASTRUCTURE
    full = await run(context, "sh", "-c", "echo 'maximum context length is 2048 tokens' >&2; exit 1")
    assert full.ending is Ending.CONTEXT_OVERFLOW


async def test_output_that_is_not_json(context: WorkflowContext) -> None:
    outcome = await run(context, "echo", "not json", output="json")
    assert outcome.ending is Ending.TOOL_ERROR
    assert "`echo` did not write JSON" in outcome.reason
    assert "not json" in outcome.reason
    assert (await run(context, "printf", r"\377\376")).output == "��"


async def test_too_much_output_ends_the_program(context: WorkflowContext) -> None:
    started = time.monotonic()
    outcome = await run(context, "yes", seconds=30.0)
    assert time.monotonic() - started < 5
    assert outcome.ending is Ending.TOOL_ERROR
    assert "wrote more than 1048576 bytes" in outcome.reason
    assert no_children()
    just = await run(context, sys.executable, "-c", "print('x' * (2**20 - 1))")
    assert len(just.output) == 2**20 - 1
    noisy = "import sys; sys.stderr.write('log' * 10**6); print('fine')"
    assert (await run(context, sys.executable, "-c", noisy)).output == "fine"


async def test_a_program_that_does_not_read_its_input(context: WorkflowContext) -> None:
    outcome = await run(context, "echo", "done", value="x" * 3_000_000)
    assert (outcome.ending, outcome.output) == (Ending.COMPLETED, "done")


FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
open(sys.argv[1], "w").write(f"{{os.getpid()}} {{child.pid}}")
{then}
"""


def family(child: str, then: str) -> str:
    return FAMILY.format(child=child, then=then)


async def test_a_hanging_family_is_ended_as_a_whole(context: WorkflowContext, tmp_path: Path) -> None:
    program = family("import time; time.sleep(600)", "time.sleep(600)")
    path = tmp_path / "pids"
    outcome = await run(context, sys.executable, "-c", program, str(path), seconds=0.7)
    assert outcome.ending is Ending.TIMEOUT
    assert await gone(*await pids_in(path, 2))
    assert no_children()


async def test_a_family_that_ignores_sigterm_is_killed(
    context: WorkflowContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.system.child_process.TERM_SECONDS", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    path = tmp_path / "pids"
    started = time.monotonic()
    outcome = await run(context, sys.executable, "-c", family(deaf, deaf), str(path), seconds=1.0)
    assert outcome.ending is Ending.TIMEOUT
    assert outcome.reason == "no result within 1 s"
    assert time.monotonic() - started < 3
    assert await gone(*await pids_in(path, 2))
    assert no_children()


async def test_what_a_finished_program_leaves_is_ended(context: WorkflowContext, tmp_path: Path) -> None:
    """Also when it holds the pipes, which would otherwise look as if the program were still writing."""
    path = tmp_path / "pids"
    started = time.monotonic()
    program = family("import time; time.sleep(600)", "print('answer')")
    outcome = await run(context, sys.executable, "-c", program, str(path))
    assert (outcome.ending, outcome.output) == (Ending.COMPLETED, "answer")
    assert time.monotonic() - started < 3
    assert await gone(*await pids_in(path, 2))


async def test_a_daemon_that_left_the_group_does_not_hold_the_rollout(
    context: WorkflowContext, tmp_path: Path
) -> None:
    path = tmp_path / "pids"
    script = f"setsid sleep 600 & echo $! > {path}; echo answer"
    outcome = await run(context, "sh", "-c", script)
    (daemon,) = await pids_in(path, 1)
    for process in [psutil.Process(daemon)] if psutil.pid_exists(daemon) else []:
        process.kill()
    assert (outcome.ending, outcome.output) == (Ending.COMPLETED, "answer")
    assert outcome.seconds < 4


async def test_cancelling_the_harness_ends_the_program(context: WorkflowContext, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    agent = build("sh", "-c", f"echo $$ > {path}; sleep 600")
    task = asyncio.create_task(execute(agent, "in", context, 60))
    (pid,) = await pids_in(path, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    assert await gone(pid)
    assert no_children()


async def test_cancelling_while_it_starts(context: WorkflowContext) -> None:
    agent = build("sleep", "600")
    before = {child.pid for child in psutil.Process().children()}
    for delay in range(6):
        task = asyncio.create_task(execute(agent, "in", context, 60))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
    assert {child.pid for child in psutil.Process().children()} <= before


async def test_many_at_once(context: WorkflowContext) -> None:
    agent = build("cat")
    outcomes = await asyncio.gather(*(execute(agent, str(i), context, 10) for i in range(30)))
    assert [outcome.output for outcome in outcomes] == [str(i) for i in range(30)]
    assert no_children()


def test_programs_are_looked_up_when_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "bin" / "agent.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\ncat\n")
    with pytest.raises(InvalidRequest, match=r"no program `bin/agent.sh`[^!]*chmod \+x") as caught:
        build("bin/agent.sh")
    assert str(tmp_path) in str(caught.value)
    script.chmod(0o755)
    build("bin/agent.sh")
    build("./agent.sh", cwd="bin")
    with pytest.raises(InvalidRequest, match=r"no program `agent.sh` on the PATH"):
        build("agent.sh")
    build("agent.sh", env={"PATH": str(script.parent)})
    with pytest.raises(InvalidRequest, match="cwd `nowhere` is not a directory"):
        build("cat", cwd="nowhere")
    with pytest.raises(ValidationError):
        build()


async def test_a_program_that_vanished(context: WorkflowContext, tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\ncat\n")
    script.chmod(0o755)
    agent = build(str(script))
    script.unlink()
    outcome = await execute(agent, "in", context, 5)
    assert outcome.ending is Ending.INFRASTRUCTURE
    assert "cannot be started" in outcome.reason


async def test_a_null_character_as_an_argument(context: WorkflowContext) -> None:
    outcome = await run(context, "echo", value="a\0b", input="argument")
    assert outcome.ending is Ending.TOOL_ERROR
    assert "null byte" in outcome.reason


def test_ctrl_c_ends_the_program(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    program = tmp_path / "harness.py"
    program.write_text(
        "import asyncio\n"
        "from insitu.workflow.binding import LLMBinding\n"
        "from insitu.workflow.kinds.command import CommandConfig, CommandWorkflow\n"
        "from insitu.workflow.context import WorkflowContext\n"
        "from insitu.workflow.execute import execute\n"
        f"command = ['sh', '-c', 'echo $$ > {path}; sleep 600 & wait']\n"
        "config = CommandConfig(type_name='command', command=command)\n"
        "context = WorkflowContext(rollout_id='r', example_id='e', binding=LLMBinding({}), config=config)\n"
        "asyncio.run(execute(CommandWorkflow(config, None), 1, context, 60))\n"
    )
    harness = subprocess.Popen(
        [sys.executable, program],
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C and hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        (pid,) = asyncio.run(pids_in(path, 1))
        group = [pid, *(child.pid for child in psutil.Process(pid).children())]
        harness.send_signal(signal.SIGINT)
        _, stderr = harness.communicate(timeout=10)
    finally:
        harness.kill()
    assert "KeyboardInterrupt" in stderr
    assert asyncio.run(gone(*group))
