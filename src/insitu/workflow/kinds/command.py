"""`_type: command`: an agent that is a separate program, in any language."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Literal

from pydantic import Field

from insitu.errors import InvalidRequest, escape, one_line
from insitu.json_values import JsonValue, parse_json
from insitu.plugins import ComponentConfig, EnvironmentValue, Kind, Parts, register
from insitu.system.child_process import MAX_STDOUT_BYTES, ChildProcess
from insitu.types import Ending
from insitu.workflow.classify import says_overflow
from insitu.workflow.context import WorkflowContext
from insitu.workflow.hints import overflow_hint
from insitu.workflow.outcome import WorkflowFailed
from insitu.workflow.workflow import Workflow

SHOWN_STDERR_CHARS = 2_000


class CommandConfig(ComponentConfig):
    """A program, its input and its output."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments, run without a shell."""
    llm: str | None = None
    """The entry of `llms` whose address the program receives; by default a trained one, or the only one."""
    cwd: Path | None = None
    """The working directory; by default the configuration file's."""
    env: dict[str, EnvironmentValue] = Field(default_factory=dict)
    """Further environment variables."""
    input: Literal["stdin", "argument"] = "stdin"
    """The place of the input: standard input, or the last argument."""
    output: Literal["text", "json"] = "text"
    """The format of its standard output: text, or JSON."""


@register(Kind.WORKFLOW, "command", CommandConfig)
class CommandWorkflow(Workflow):
    """Starts the program once per rollout; its standard output is the result."""

    def __init__(self, config: CommandConfig, parts: Parts) -> None:  # noqa: ARG002 - every maker takes parts
        self._config = config
        self._cwd = str(_directory(config.cwd))
        self._env = {name: value.get_secret_value() for name, value in config.env.items()}
        self._command = [_program(config.command[0], self._cwd, self._env), *config.command[1:]]

    async def run(self, value: object, context: WorkflowContext) -> JsonValue:
        """Run the program once; on cancellation, end its whole process group."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        fed = self._config.input == "stdin"
        process = ChildProcess()
        try:
            await process.run(
                self._command if fed else [*self._command, text],
                text.encode("utf-8", "replace") if fed else None,
                self._cwd,
                os.environ | context.environment() | self._env,
            )
        except OSError as error:
            raise self._not_started(error) from error
        self._check(process)
        return self._result(process.stdout.decode("utf-8", "replace"))

    def _check(self, process: ChildProcess) -> None:
        name = self._config.command[0]
        if process.overflowed:
            raise WorkflowFailed(
                f"`{name}` wrote more than {MAX_STDOUT_BYTES} bytes to its standard output",
                hint="write logs to the standard error, and only the result to the standard output",
            )
        if process.returncode == 0:
            return
        stderr = process.stderr.decode("utf-8", "replace").strip()
        said = escape(stderr[-SHOWN_STDERR_CHARS:]) or "nothing on its standard error"
        ending = _ending(process, stderr)
        hint = overflow_hint(stderr) if ending is Ending.CONTEXT_OVERFLOW else ""
        raise WorkflowFailed(f"`{name}` {_exit(process.returncode)}: {said}", ending=ending, hint=hint)

    def _result(self, stdout: str) -> JsonValue:
        if self._config.output == "text":
            return stdout.rstrip("\r\n")
        try:
            return parse_json(stdout)
        except (ValueError, RecursionError) as error:
            raise WorkflowFailed(
                f"`{self._config.command[0]}` did not write JSON ({one_line(str(error))}): "
                f"{escape(stdout[:200])!r}",
                hint="print one JSON value, or set `output: text`",
            ) from None

    def _not_started(self, error: OSError) -> WorkflowFailed:
        name = self._config.command[0]
        if error.errno == errno.E2BIG:
            return WorkflowFailed(
                f"the input is too long to be an argument of `{name}`", hint="set `input: stdin`"
            )
        return WorkflowFailed(f"`{name}` cannot be started: {error}", ending=Ending.INFRASTRUCTURE)


def _directory(cwd: Path | None) -> Path:
    directory = Path.cwd() / (cwd or "")
    if not directory.is_dir():
        raise InvalidRequest(f"cwd `{cwd}` is not a directory in {Path.cwd()}", hint="correct workflow.cwd")
    return directory


def _program(name: str, cwd: str, env: dict[str, str]) -> str:
    """Resolve the program's full path, before the first rollout."""
    in_directory = os.sep in name
    found = shutil.which(str(Path(cwd) / name) if in_directory else name, path=env.get("PATH"))
    if found is None:
        where = f"in {cwd}" if in_directory else "on the PATH"
        raise InvalidRequest(
            f"there is no program `{name}` {where}",
            hint=f"check the name, and that it may be executed (chmod +x {name})"
            if in_directory
            else f"install it, or write its path (./{name})",
        )
    return found


def _exit(returncode: int | None) -> str:
    if returncode is None:
        return "could not be ended"
    if returncode >= 0:
        return f"exited with {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _ending(process: ChildProcess, stderr: str) -> Ending:
    if process.returncode == os.EX_TEMPFAIL:
        return Ending.INFRASTRUCTURE
    return Ending.CONTEXT_OVERFLOW if says_overflow(stderr) else Ending.TOOL_ERROR
