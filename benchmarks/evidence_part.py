"""Part: one training run of the evidence, named by its task, seed and settings: `guess-0`, `guess-0-few`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

TASKS = ("guess", "tictactoe", "search", "sql")
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    **{
        f"{generations}x{groups}": {
            "trajectory_builders.groups.num_generations": str(generations),
            "finetuning.groups_per_step": str(groups),
            "finetuning.num_epochs": "4",
            "finetuning.max_steps": str(512 // (generations * groups)),
        }
        for generations, groups in ((2, 32), (4, 16), (8, 8), (16, 4), (8, 4), (8, 16))
    },
    "trl": {
        "trainer_adapters.backend.training.clip_high": "0.2",
        "trainer_adapters.backend.training.mask_truncated": "false",
        "trainer_adapters.backend.training.max_sampler_weight": "3.0",
        "trainer_adapters.backend.schedule.kind": "linear",
    },
}
"""Overrides of a task's YAML, which has 8 generations and 8 groups per update.

`2x32`: 2 generations, 32 groups per update. Each makes up to 512 rollouts, half of what `guess` and
`tictactoe` make; `2x32`, `4x16`, `8x8` and `16x4` have as many per update as the YAML. `trl`: the default
objective and schedule of TRL's GRPOConfig as far as insitu has them, at the YAML's learning rate (its own is
for full fine-tuning).
"""
PLANNED = (*(f"{task}-0" for task in TASKS), "sql-1", "tictactoe-1")
"""The parts that docs/evidence.md says are missing if they were not run."""


@dataclass(frozen=True, slots=True)
class Part:
    """A task, a seed and the name of its settings."""

    task: str
    seed: int
    settings: str = "default"

    @staticmethod
    def of(name: str) -> Part:
        """Read a name; raises ValueError with the names to choose from."""
        task, _, rest = name.partition("-")
        seed, _, settings = rest.partition("-")
        if task not in TASKS or not seed.isdigit() or (settings or "default") not in SETTINGS:
            known = f"<{'|'.join(TASKS)}>-<seed>[-<{'|'.join(SETTINGS)}>]"
            raise ValueError(f"no part is named {name!r}; a name is {known}")
        return Part(task, int(seed), settings or "default")

    @property
    def name(self) -> str:
        """The name that `of` reads."""
        return f"{self.task}-{self.seed}" + ("" if self.settings == "default" else f"-{self.settings}")

    @property
    def overrides(self) -> dict[str, str]:
        """The values of the task's YAML that this part changes; the seed decides the split and all draws."""
        seed = str(self.seed)
        return {
            "eval.general.dataset.kwargs.seed": seed,
            "finetuning.seed": seed,
            "llms.player.seed": seed,
            "trainer_adapters.backend.lora.seed": seed,
            **SETTINGS[self.settings],
        }

    def held_out(self) -> list[dict[str, Any]]:
        """Return the examples that are not trained on."""
        return importlib.import_module(f"benchmarks.tasks.{self.task}").rows(self.seed, "held_out")
