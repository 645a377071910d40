"""FinetuneBench: a stand-in backend and a project, run in this process. Faster than the command, and agents
and rewards may be functions of the test module that runs them."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.client import InsituClient
from insitu.config.dump import dump_config
from insitu.config.load import LoadedConfig, load_config
from insitu.gateway_client import GatewayClient
from insitu.harness import finetune as command
from insitu.harness.assembly import Assembly
from insitu.harness.files.rollout_line import to_line
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.options import with_options
from insitu.harness.screen.summary import Summary
from tests.support.finetuning import Project
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour


class Messages(Progress):
    """Keeps what the run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, message: str) -> None:
        self.said.append(message)

    def warn(self, message: str) -> None:
        self.said.append(f"WARNING {message}")


class FinetuneBench:
    """One backend, one project."""

    def __init__(self, backend: StandinBackend, project: Project) -> None:
        self.backend = backend
        self.project = project
        self.progress = Messages()

    def loaded(self, **options: Any) -> LoadedConfig:
        return with_options(load_config("config.yml"), options)

    async def run(self, *, accept_changes: bool = False, **options: Any) -> Summary:
        """`insitu finetune` with these options, to its end."""
        return await command.finetune(
            self.loaded(**options), self.progress, "insitu finetune", accept_changes=accept_changes
        )

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[tuple[FinetuneRun, command.Components]]:
        """A run whose parts are built and bound; the test drives them."""
        loaded = self.loaded(**options)
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(Assembly(loaded))
            made = await command.build_components(parts)
            task = await parts.training_task(made.adapter.trained_model)
            validation = await parts.validation_task(task, made.adapter.trained_model)
            directory = stack.enter_context(
                RunDirectory.open(loaded.config.finetuning.output_dir, dump_config(loaded.config))
            )
            binding = task.agent.binding
            gateway = await stack.enter_async_context(GatewayClient(binding.gateway_url, binding.api_key))
            await made.trainer.bind_components(made.builder, made.adapter)
            yield FinetuneRun(loaded.config, directory, task, validation, gateway, self.progress), made

    def epochs(self) -> list[dict[str, Any]]:
        return self.project.lines("training_metrics.jsonl")

    def validations(self, *, all_of_them: bool = False) -> list[dict[str, Any]]:
        """The validations that were due; the best step may have been measured again, by luck or not."""
        history = self.project.json("validation_history.json")
        return [entry for entry in history if all_of_them or not entry.get("remeasured")]

    def records(self, name: str = "epoch-0000") -> list[dict[str, Any]]:
        """Every stored rollout of an epoch or a validation, whole."""
        with self.store(name) as store:
            rollouts = store.rollouts()
        return [to_line(each, each.details()) | {"calls": each.read_calls()} for each in rollouts]

    def store(self, name: str = "epoch-0000") -> RolloutStore:
        return RolloutStore(self.project.output / "trajectories" / f"{name}.jsonl")

    def jobs(self) -> list[Any]:
        """The job of every committed step."""
        ledger = self.backend.ledger
        return [ledger.get_job(step.job_id) for step in ledger.steps("small")]

    def trained_groups(self) -> list[Any]:
        """Every group that a committed step trained on."""
        return [group for job in self.jobs() for group in self.backend.ledger.groups_of_job(job.id)]


@asynccontextmanager
async def open_bench(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Behaviour | None = None,
    num_examples: int = 3,
    plots: bool = False,
    **options: Any,
) -> AsyncIterator[FinetuneBench]:
    """Without `plots` nothing is drawn: it would take most of the time."""
    monkeypatch.setattr("insitu.harness.loop.epoch_trainer._POLL_SECONDS", 0.02)
    monkeypatch.setitem(InsituClient.wait_run_ready.__kwdefaults__, "poll_seconds", 0.02)
    if not plots:
        monkeypatch.setattr("insitu.harness.loop.epoch_trainer.write_plot", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "small_agent", raising=False)
    async with StandinBackend(path / "state", behaviour, train_seconds=0.01, **options) as backend:
        project = Project(path / "project", backend.port, backend.gateway_url, num_examples)
        monkeypatch.chdir(project.path)
        yield FinetuneBench(backend, project)
    monkeypatch.delitem(sys.modules, "small_agent", raising=False)


def entry(function: Callable[..., Any]) -> str:
    """How the configuration names a function of a test module."""
    return f"{function.__module__}:{function.__name__}"


def agent(function: Callable[..., Any], **fields: Any) -> dict[str, Any]:
    """`workflow:` for a function."""
    return {"_type": "python", "entry": entry(function), "llm": "policy", **fields}


def rewards(function: Callable[..., Any]) -> dict[str, Any]:
    """`eval:` for a reward function."""
    return {"evaluators": {"reward": {"_type": "python", "entry": entry(function)}}}


async def ask(llm: Any, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """One chat call over plain HTTP; the first choice."""
    body = {"messages": messages, **llm.call_args(), **fields}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {llm.api_key}"}) as http:
        async with http.post(f"{llm.base_url}/chat/completions", json=body) as got:
            got.raise_for_status()
            return (await got.json())["choices"][0]


async def one_call(value: Any, context: Any) -> str:
    """The smallest agent."""
    return (await ask(context.llm(), [{"role": "user", "content": str(value)}]))["message"]["content"]


RUNS: list[str] = []
"""The rollouts that `counted` has run, without run and nonce: `e0.3.1`."""


async def counted(value: Any, context: Any) -> str:
    """The smallest agent, noted in `RUNS`."""
    RUNS.append(".".join(context.rollout_id.split(".")[1:-1]))
    return await one_call(value, context)


def position(rollout_id: str) -> tuple[int, int]:
    """Example and generation of a rollout, as its id tells them."""
    _, _, index, generation, _ = rollout_id.split(".")
    return int(index), int(generation)


def by_generation(item: Any) -> float:
    """The same rewards in every run, different within every group."""
    index, generation = position(item.rollout_id)
    return (index + 1) * (generation + 1) / 100


def strict_json(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)
