"""The README.md of exported weights: what they are, what they come from, and how good they are."""

from __future__ import annotations

import json
from dataclasses import dataclass

from insitu.trained.run_view import RunView
from insitu.trained.training_record import TrainingRecord

_FIGURES = ("reward/mean", "loss", "entropy", "mismatch/kl")
UNKNOWN = "not given"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Everything that the card says."""

    view: RunView
    step: int
    base_model: str
    """Directory or hub id."""
    merged: bool
    licence: str | None
    record: TrainingRecord | None
    command: str
    """Serves the weights with vLLM."""

    def text(self) -> str:
        """Return the card as Markdown, with the front matter that model hubs read."""
        run, lora = self.view.run, self.view.run.lora
        version = f"{run.name}@{self.step}"
        kind = "Merged weights" if self.merged else "A LoRA adapter"
        layers = "all linear layers" if lora.target_modules is None else ", ".join(lora.target_modules)
        record = self.record
        figures = [*(record.figures if record is not None else []), *self._step_figures()]
        return "\n".join(
            [
                *self._front_matter(),
                f"# {version}",
                "",
                f"{kind} of step {self.step} of the run `{run.name}`, trained with insitu.",
                "",
                "| | |",
                "|---|---|",
                f"| base model | {self.base_model} |",
                f"| data | {record.data if record is not None else UNKNOWN} |",
                f"| reward | {record.reward if record is not None else UNKNOWN} |",
                f"| adapter | rank {lora.rank}, alpha {lora.alpha}, {layers} |",
                f"| lineage | {' < '.join([version, *self.view.lineage])} < the base model |",
                f"| licence of the base model | {self.licence or UNKNOWN} |",
                "",
                "## Figures",
                "",
                *(f"- {line}" for line in figures or ["None are recorded."]),
                "",
                "## Serve it",
                "",
                "```sh",
                self.command,
                "```",
                "",
            ]
        )

    def _front_matter(self) -> list[str]:
        fields = {
            "base_model": self.base_model,
            "library_name": "transformers" if self.merged else "peft",
            "license": self.licence or "unknown",
            "tags": ["insitu", "reinforcement-learning", *([] if self.merged else ["lora"])],
        }
        return ["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---", ""]

    def _step_figures(self) -> list[str]:
        """Return the figures of the step itself, on the rollouts that it was trained on."""
        metrics = next((step.metrics for step in self.view.steps if step.step == self.step), {})
        known = [(name, metrics[name]) for name in _FIGURES if name in metrics]
        shown = ", ".join(f"{name} {value:.4g}" for name, value in known if isinstance(value, int | float))
        return [f"Of the rollouts that the step was trained on: {shown}."] if shown else []
