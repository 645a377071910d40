"""Rewards that are programs of others, each run in a process with limits of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from pydantic import Field

from insitu.errors import ChildFailed, DeadlineExceeded, InvalidRequest, one_line
from insitu.json_values import as_object, parse_json
from insitu.plugins import ComponentConfig, EnvironmentValue, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import to_score
from insitu.system.child_process import MAX_STDOUT_BYTES, ChildProcess

_MIB = 1 << 20
_LIMITER = Path(__file__).with_name("limited.py")
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables of the environment that the program gets; keys are not among them."""
_SHOWN_STDERR_CHARS = 300


class CommandEvaluatorConfig(ComponentConfig):
    """The program, and the limits of each of its processes."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments, run without a shell in the configuration file's directory."""
    env: dict[str, EnvironmentValue] = Field(default_factory=dict)
    """Further variables; of the environment only a few are passed on."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Wall-clock time for the program and all processes that it starts."""
    cpu_seconds: int = Field(default=10, ge=1)
    """CPU time."""
    max_memory_mib: int = Field(default=2048, ge=16)
    """Address space."""
    max_file_mib: int = Field(default=64, ge=0)
    """Size of each file that is written."""
    max_open_files: int = Field(default=64, ge=8)
    """Files open at once."""


@register(Kind.EVALUATOR, "command", CommandEvaluatorConfig)
class CommandEvaluator(Evaluator):
    """Starts the program once per rollout: it reads the rollout as JSON and writes the score."""

    def __init__(self, config: CommandEvaluatorConfig, parts: Parts) -> None:
        self._config = config
        self._cwd = str(parts.directory)
        given = {name: value.get_secret_value() for name, value in config.env.items()}
        self._env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | given
        limits = {
            "CPU": config.cpu_seconds,
            "AS": config.max_memory_mib * _MIB,
            "FSIZE": config.max_file_mib * _MIB,
            "NOFILE": config.max_open_files,
            "CORE": 0,
        }
        text = ",".join(f"{name}={value}" for name, value in limits.items())
        program = _found(config.command[0], self._cwd, self._env)
        self._command = [sys.executable, "-I", "-S", str(_LIMITER), text, program, *config.command[1:]]

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Run the program to its end; a limit that it reaches is an error that names the setting."""
        fields = {"id": item.id, "input": item.input, "expected": item.expected, "output": item.output}
        sent = json.dumps({**fields, "row": dict(item.row)}, ensure_ascii=False).encode("utf-8", "replace")
        process = ChildProcess()
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                await process.run(self._command, sent, self._cwd, self._env)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._config.command[0]} ran for longer than {self._config.timeout_seconds:g} s",
                hint="raise timeout_seconds",
            ) from error
        return self._result(item, process)

    def _result(self, item: EvalItem, process: ChildProcess) -> EvalResult:
        program, stderr = self._config.command[0], process.stderr.decode("utf-8", "replace")
        if process.overflowed:
            raise ChildFailed(f"{program} wrote more than {MAX_STDOUT_BYTES} bytes")
        if process.returncode != 0:
            said = one_line(stderr[-_SHOWN_STDERR_CHARS:]) or "nothing on its standard error"
            raise ChildFailed(f"{program} {self._ending(process.returncode)}: {said}")
        text = process.stdout.decode("utf-8", "replace").strip()
        try:
            value = parse_json(text)
            found = as_object(value)
            if found is None:
                return EvalResult(item.id, to_score(value))
            return EvalResult(item.id, to_score(found["score"]), found.get("reasoning"))
        except (ValueError, TypeError, KeyError) as error:
            raise ChildFailed(
                f"{program} wrote {one_line(text, 100)!r}",
                hint='write a number, or {"score": 0.5, "reasoning": "…"}',
            ) from error

    def _ending(self, returncode: int | None) -> str:
        limits = {
            -signal.SIGXCPU: f"used more than cpu_seconds ({self._config.cpu_seconds})",
            -signal.SIGXFSZ: f"wrote a file of more than max_file_mib ({self._config.max_file_mib})",
        }
        return limits.get(returncode or 0, f"ended with exit code {returncode}")


def _found(program: str, cwd: str, env: dict[str, str]) -> str:
    """Return the program's path; a relative one starts at the configuration file's directory."""
    path = str(Path(cwd, program)) if "/" in program else program
    found = shutil.which(path, path=env.get("PATH"))
    if found is None:
        raise InvalidRequest(f"`{program}` is not a program", hint=f"check it with: ls -l {path}")
    return found
