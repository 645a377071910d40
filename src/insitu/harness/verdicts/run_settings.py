"""RunSettings: the settings of a run that its verdict names or depends on."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from insitu.harness.interfaces.run import FinetuneRun
from insitu.types import Method


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Names in the configuration, and the planned length of the run."""

    planned_updates: int
    llm: str
    """The entry of `llms` that is trained."""
    builder: str
    adapter: str
    evaluator: str
    output_dir: str
    method: Method = "grpo"
    given: bool = False
    """True if the rollouts for training are given: their rewards do not show whether the run learns."""

    @staticmethod
    def of(run: FinetuneRun, method: Method = "grpo", *, given: bool = False) -> RunSettings:
        """Read them from the configuration of a run."""
        finetuning, binding = run.config.finetuning, run.training.agent.binding
        steps = 1
        if finetuning.groups_per_step is not None:
            steps = math.ceil(len(run.training.examples) / finetuning.groups_per_step)
        planned = finetuning.num_epochs * steps
        return RunSettings(
            planned_updates=min(planned, finetuning.max_steps or planned),
            llm=min(binding.trained, default="<name>"),
            builder=finetuning.trajectory_builder or "<name>",
            adapter=finetuning.trainer_adapter or "<name>",
            evaluator=finetuning.reward_function.name if finetuning.reward_function else "<name>",
            output_dir=str(run.directory.path),
            method=method,
            given=given,
        )

    def words(self) -> dict[str, str]:
        """Return the paths of settings, as the configuration file and `-o` spell them."""
        return {
            "llm": f"llms.{self.llm}",
            "training": f"trainer_adapters.{self.adapter}.training",
            "builder": f"trajectory_builders.{self.builder}",
            "evaluator": f"eval.evaluators.{self.evaluator}",
            "output_dir": shlex.quote(self.output_dir),
            "planned": f"{self.planned_updates} update{'' if self.planned_updates == 1 else 's'}",
        }
