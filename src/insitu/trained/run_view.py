"""RunView: a run as the API describes it, with its steps, its checkpoints and what it descends from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from insitu.client import InsituClient
from insitu.errors import NotFound
from insitu.json_values import JsonObject
from insitu.types import RunState, parse_policy, policy_name
from insitu.wire.answers import CheckpointInfo, PromotionInfo, RunInfo, StepInfo
from insitu.wire.values import UPLOADED

MAIN_FIGURES = ("reward/mean", "reward/std", "loss", "entropy", "mismatch/kl", "time/step_seconds")
"""The metrics of a step that are shown to people; programs get all."""


@dataclass(frozen=True, slots=True)
class RunView:
    """One run, and all that the API has about it."""

    run: RunInfo
    steps: list[StepInfo]
    checkpoints: list[CheckpointInfo]
    lineage: list[str]
    """`<run>@<step>` or `sha256:<digest>`, nearest first; empty if it starts from the base model."""
    waiting: PromotionInfo | None = None
    """A promotion that is not served yet."""

    @property
    def served(self) -> str | None:
        """The version that answers calls to the run's name; None if the run is not served."""
        if self.run.state not in (RunState.READY, RunState.IDLE) or self.waiting is not None:
            return None
        promoted = self.run.promoted
        return policy_name(self.run.name, self.run.step if promoted is None else promoted)

    @property
    def errors(self) -> list[str]:
        """Problems: the run's error, steps lost with their checkpoints, a promotion that is not served."""
        lost = [f"step {step} was lost and is trained again" for step in self.run.lost_steps]
        waits = (
            [] if self.waiting is None else [f"step {self.waiting.step} is promoted: {self.waiting.reason}"]
        )
        return [*([self.run.error] if self.run.error else []), *lost, *waits]

    def to_dict(self) -> JsonObject:
        """Return the view for programs, in the shape that docs/serve.md documents."""
        return {
            "run": asdict(self.run),
            "served": self.served,
            "lineage": [*self.lineage],
            "steps": [asdict(step) for step in self.steps],
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "errors": [*self.errors],
        }

    def lines(self) -> list[str]:
        """Return the view for people."""
        run, lora = self.run, self.run.lora
        serves = f"calls to {run.name} get {self.served}" if self.served else "it is not served"
        if self.served and run.promoted is not None:
            serves += f", rollouts {policy_name(run.name, run.step)}"
        layers = "all linear layers" if lora.target_modules is None else ", ".join(lora.target_modules)
        rows = [
            ("base model", f"{run.base_model}, project {run.project}"),
            ("registered", f"{_time(run.created_at)}, changed {_time(run.updated_at)}"),
            ("adapter", f"rank {lora.rank}, alpha {lora.alpha}, seed {lora.seed}, {layers}"),
            *[(name, _settings(given)) for name, given in _arguments(run) if given],
            ("starts from", " < ".join(self.lineage) or "the base model"),
            ("checkpoints", ", ".join(map(_kept, self.checkpoints)) or "none"),
            *[("error", error) for error in self.errors],
        ]
        head = f"{run.name}   {run.state}, step {run.step}; {serves}"
        return [head, *(f"  {name:<13}{text}" for name, text in rows), *_step_table(self.steps)]


async def read_run(client: InsituClient, name: str) -> RunView:
    """Ask the API for everything about a run; raise NotFound if there is none."""
    run = await client.get_run(name)
    steps: list[StepInfo] = []
    while page := await client.steps(name, steps[-1].step if steps else 0):
        steps += page
    promotion = None if run.promoted is None else (await client.promotions(name))[-1]
    waiting = promotion if promotion is not None and promotion.reason else None
    return RunView(run, steps, await client.checkpoints(name), await _lineage(client, run), waiting)


async def _lineage(client: InsituClient, run: RunInfo) -> list[str]:
    """Follow the sources of a run until the base model, an upload, or a run that was deleted."""
    found: list[str] = []
    while run.source is not None and run.source not in found:
        found.append(run.source)
        if run.source.startswith(UPLOADED):
            break
        try:
            run = await client.get_run(parse_policy(run.source)[0])
        except NotFound:
            break
    return found


def _arguments(run: RunInfo) -> list[tuple[str, JsonObject]]:
    return [("engine args", run.engine_args), ("init args", run.init_args)]


def _settings(given: JsonObject) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(given.items()))


def _kept(checkpoint: CheckpointInfo) -> str:
    marks = {"pinned": checkpoint.pinned, "promoted": checkpoint.promoted}
    kept = ", ".join(name for name, is_set in marks.items() if is_set)
    return f"{checkpoint.step} ({kept})" if kept else str(checkpoint.step)


def _step_table(steps: Sequence[StepInfo]) -> list[str]:
    """Return a line per step with the main figures that any of them has."""
    if not steps:
        return []
    names = [name for name in MAIN_FIGURES if any(name in step.metrics for step in steps)]
    rows = [["step", *names], *([str(step.step), *(_figure(step, name) for name in names)] for step in steps)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return ["", *table]


def _figure(step: StepInfo, name: str) -> str:
    value = step.metrics.get(name)
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
