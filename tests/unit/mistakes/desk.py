"""Desk: a user's directory with an agent, a reward, data and a short configuration, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from insitu.cli import main
from insitu.config.load import load_config
from insitu.harness.assembly import Assembly
from insitu.harness.finetune import build_components
from insitu.rewards.items import EvalItem
from insitu.rewards.score import score_item
from insitu.workflow.execute import execute
from tests.support.finetuning import merged
from tests.unit.mistakes.two_doors import KEY, TwoDoors

DRY_RUN = ("finetune", "--config_file=config.yml", "--dry-run")
Said = tuple[int, str]
"""An exit code and all output."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Where a mistake is made."""

    path: Path
    doors: TwoDoors
    monkeypatch: pytest.MonkeyPatch

    def lay_out(self) -> None:
        """Write a project without a mistake."""
        self.write("agent.py", "async def run(question, context):\n    return 'an answer'\n")
        self.write("reward.py", "def score(item):\n    return float(item.output == item.expected)\n")
        self.write_rows([{"question": f"question {n}", "answer": str(n)} for n in range(4)])
        self.configure()

    def configure(self, **changes: Any) -> None:
        """Write config.yml; None removes a key."""
        base = {
            "model": {"model_name": "tiny", "api_key": KEY},
            "agent": "agent:run",
            "data": "train.json",
            "reward": "reward:score",
            "backend": {"port": self.doors.api_port, "api_key": KEY, "name": "first"},
        }
        config = {key: value for key, value in merged(base, changes).items() if value is not None}
        self.write("config.yml", yaml.safe_dump(config, sort_keys=False))

    def write(self, name: str, text: str | bytes) -> None:
        (self.path / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    def write_rows(self, rows: Any) -> None:
        self.write("train.json", json.dumps(rows))

    def run(self, *arguments: str) -> Said:
        """The command as a shell runs it, in this process."""
        self.monkeypatch.setattr(sys, "argv", ["insitu", *arguments])
        said, code = io.StringIO(), 0
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        return code, said.getvalue()

    def roll_out(self) -> Said:
        """One rollout of the agent, as every command that rolls out ends it."""

        async def ended() -> Said:
            async with Assembly(load_config("config.yml")) as parts:
                made = await build_components(parts)
                task = await made.training_task(parts)
                context = task.agent.context("r", task.examples[0])
                outcome = await execute(task.agent.workflow, task.examples[0].input, context, 5)
            return int(outcome.ending != "completed"), f"{outcome.ending}: {outcome.reason}"

        return asyncio.run(ended())

    def score(self) -> Said:
        """One reward, as every command that scores ends it."""

        async def ended() -> Said:
            async with Assembly(load_config("config.yml")) as parts:
                made = await build_components(parts)
                task = await made.training_task(parts)
                example = task.examples[0]
                item = EvalItem(example.id, example.input, example.expected, "an answer", example.row)
                result = await score_item(task.evaluator, item, 5)
            return int(result.error is not None), str(result.error)

        return asyncio.run(ended())


Provoke = Callable[[Desk], Said]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake, and what its message must say."""

    name: str
    provoke: Provoke
    cause: str
    value: str
    """The offending value, or its place."""
    next_step: str
    """A command or a setting."""


def config(*arguments: str, **changes: Any) -> Provoke:
    """A change of the configuration; the dry run finds it, unless other arguments are given."""

    def provoke(desk: Desk) -> Said:
        desk.configure(**changes)
        return desk.run(*(arguments or DRY_RUN))

    return provoke


def text(name: str, content: str | bytes) -> Provoke:
    """Another content of a file."""

    def provoke(desk: Desk) -> Said:
        desk.write(name, content)
        return desk.run(*DRY_RUN)

    return provoke


def command(*arguments: str) -> Provoke:
    """A command in a directory without a mistake."""
    return lambda desk: desk.run(*arguments)


def override(*pairs: str) -> Provoke:
    """The dry run with `-o` for each path and value."""
    given = [word for at in range(0, len(pairs), 2) for word in ("-o", pairs[at], pairs[at + 1])]
    return command(*DRY_RUN, *given)
