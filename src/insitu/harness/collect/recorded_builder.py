"""RecordedBuilder: the rollouts that an earlier run collected, in their groups, with their rewards.

    <output_dir>/trajectories/epoch-*.jsonl ──► one example per group ──► uploaded with their own tokens

The tokens come from the files of that run, so they are the sampled ones, whatever became of its backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from insitu.config.dump import dump_config
from insitu.datasets.example import Example
from insitu.errors import InsituError, InvalidRequest
from insitu.harness.collect.collecting_builder import CollectingBuilder
from insitu.harness.collect.rollout_plan import RolloutPlan
from insitu.harness.collect.run_rollouts import RunRollouts
from insitu.harness.files.rollout_store import read_rollouts
from insitu.harness.files.run_directory import CONFIG_FILE, TRAJECTORIES, is_epoch_name
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.settings import RecordedRolloutsConfig
from insitu.harness.rollouts.rollout import InMemory, Rollout
from insitu.json_values import JsonObject, JsonValue, as_object, parse_json
from insitu.plugins import Parts
from insitu.types import Ending


class RecordedBuilder(CollectingBuilder):
    """Trains on what an earlier run collected; nothing is rolled out again."""

    methods = frozenset({"sft", "dpo"})
    runs_agent = False

    def __init__(self, config: RecordedRolloutsConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        super().__init__()
        self._path = config.path
        self._config = _read_config(config.path)
        self._groups = _read_groups(config.path)

    def own_examples(self) -> Sequence[Example]:
        """Return one example per recorded group."""
        return [Example(group.name, None, None, {}) for group in self._groups]

    async def initialize(self, run: FinetuneRun) -> None:
        """Reject rollouts of another model, whose tokens would mean something else."""
        recorded, ours = _base_model(self._config), _base_model(dump_config(run.config))
        if recorded is not None and ours is not None and recorded != ours:
            raise InvalidRequest(
                f"{self._path} has rollouts of {recorded!r}, but this run trains {ours!r}",
                hint="recorded tokens fit only the model that they were sampled from",
            )
        await super().initialize(run)

    def rollouts_of(self, run: FinetuneRun) -> RunRollouts:
        """Return the recorded rollouts of each group."""
        sizes = [len(group.rollouts) for group in self._groups]
        return RunRollouts(run, sizes, _Recorded(self._groups))

    def starting(self, run_id: str) -> str:
        """Return the line that announces the rollouts of an epoch."""
        return f"Taking the rollouts of {self._path} for run_id: {run_id}"


@dataclass(frozen=True, slots=True)
class _Group:
    """The rollouts of one example in one epoch or step of the earlier run."""

    name: str
    rollouts: list[Rollout] = field(default_factory=list[Rollout])


@dataclass(frozen=True, slots=True)
class _Recorded:
    groups: Sequence[_Group]
    num_outages: int = 0
    """The gateway is not asked."""

    async def make(self, plan: RolloutPlan) -> Rollout:
        recorded = self.groups[plan.index].rollouts[plan.generation]
        taken = replace(
            recorded,
            rollout_id=plan.new_id(),
            example_id=plan.example.id,
            index=plan.index,
            generation=plan.generation,
            inline=True,
        )
        try:
            details = await asyncio.to_thread(recorded.details, tokens=True)
        except InsituError as error:
            reason = f"{recorded.rollout_id}: {error}"
            return replace(
                taken,
                ending=Ending.INFRASTRUCTURE,
                reason=reason,
                reward=None,
                call_ids=(),
                source=InMemory(),
            )
        return replace(taken, source=InMemory(details))


def _read_config(path: Path) -> JsonObject:
    """Return the configuration of the earlier run."""
    if not (path / CONFIG_FILE).is_file():
        raise InvalidRequest(
            f"trajectory_builders.<name>.path is {path}, where no run of `insitu finetune` has written "
            "its files",
            hint="name the finetuning.output_dir of an earlier run",
        )
    known = as_object(parse_json((path / CONFIG_FILE).read_bytes())) or {}
    return as_object(known.get("config")) or {}


def _base_model(config: JsonObject) -> JsonValue:
    """Return the model that a configuration trains; None if its adapter does not name one."""
    chosen = as_object(config.get("finetuning")) or {}
    adapters = as_object(config.get("trainer_adapters")) or {}
    adapter = as_object(adapters.get(str(chosen.get("trainer_adapter")))) or {}
    return (as_object(adapter.get("backend")) or {}).get("base_model")


def _read_groups(path: Path) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for file in sorted((path / TRAJECTORIES).glob("*.jsonl")):
        if is_epoch_name(file.stem):
            for rollout in sorted(read_rollouts(file), key=lambda each: (each.index, each.generation)):
                name = f"{file.stem}:{rollout.example_id}"
                groups.setdefault(name, _Group(name)).rollouts.append(rollout)
    if not groups:
        raise InvalidRequest(
            f"trajectory_builders.<name>.path is {path}, whose run has collected no rollouts for training",
            hint="name the finetuning.output_dir of a run that has",
        )
    return list(groups.values())
