"""Runs that learn within seconds: a random Llama of two layers, sampled and trained in the process itself.

Sampling, advantages, the training step, the probe and the harness's accounts are the project's own; only the
engine is missing, and `Odd` puts faults where it would be. Each step gives a line of steps.jsonl.

    python -m tests.support.small_runs     # records the runs of tests/fixtures/verdicts anew, in a minute
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.backend.serving.probe import compare
from insitu.config.curriculum import CurriculumConfig
from insitu.harness.files.metrics import StepLine
from insitu.harness.loop.account import Account
from insitu.harness.loop.curriculum import initial_state, select
from insitu.harness.loop.metrics import step_line
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.rollout import Rollout, RolloutFigures
from insitu.training.selection import build_batch
from insitu.types import (
    Ending,
    LoraSettings,
    ModelCall,
    StepSettings,
    TrainingSequence,
    Trajectory,
    TrajectoryGroup,
)
from tests.support.recorded_runs import write_run
from tests.support.sequences import stored_whole, train
from tests.support.small_world import build_model

VOCABULARY, NUM_EXAMPLES, GROUP_SIZE, NUM_TOKENS = 32, 8, 8, 6
RUN = "run"


@dataclass(frozen=True)
class Odd:
    """A run's oddities; without any it is healthy."""

    temperature: float = 1.0
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Recorded beside the temperature."""
    noise: float = 0.0
    """Spread of the difference between the logits that are sampled from and the trainer's."""
    arriving: float = 1.0
    """The share of an update that the probed engine shows."""
    tamper: Callable[[list[TrainingSequence]], list[TrainingSequence]] = list


def likes_its_example(example: int, tokens: Sequence[int]) -> float:
    """The share of the tokens that are the one that this example asks for."""
    return sum(token == 3 + example % 4 for token in tokens) / len(tokens)


def easy_way_out(example: int, tokens: Sequence[int]) -> float:
    """A little for a token that is right for no example, much for the right one at first."""
    return 0.3 * sum(token == 9 for token in tokens) / len(tokens) + 0.7 * (tokens[0] == 3 + example % 4)


class SmallRun:
    """One run, from random weights."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        rate: float = 1e-2,
        odd: Odd | None = None,
        reward: Callable[[int, Sequence[int]], float] = likes_its_example,
    ) -> None:
        self.odd = odd or Odd()
        self._reward = reward
        self._settings = StepSettings(learning_rate=rate)
        build_model(folder, VOCABULARY, seed)
        self._rank = TrainerRank(0, 1, "127.0.0.1", 0, str(folder), "float32", 1)
        self._rank.open_run(RUN, LoraSettings(seed=seed))
        self._generator = torch.Generator().manual_seed(seed)
        self._fixed: list[list[int]] = []
        self.step = 0

    def line(self) -> StepLine:
        """Roll out and train one step; return its line."""
        calls = self._rolled_out()
        rollouts = [[self._rollout(*place, call) for place, call in group] for group in calls]
        collection = TrajectoryCollection(rollouts, "run_0000abcd", self.step)
        off = CurriculumConfig()
        selection = select(rollouts, self.step, off, initial_state(off), 0)
        line = step_line(collection, selection, curriculum=False)
        if not selection.groups:
            return line
        recorded = stored_whole([call for group in calls for _, call in group])
        groups = [
            TrajectoryGroup(
                str(number), RUN, [Trajectory(r.rollout_id, list(r.call_ids), r.reward or 0.0) for r in g]
            )
            for number, g in enumerate(selection.groups)
        ]
        batch = build_batch(groups, lambda _: recorded, self._settings, self.step)
        self._fixed = self._fixed or [s.token_ids.tolist() for s in batch.sequences[:6]]
        before = self._rank.score(RUN, self._fixed)
        metrics = train(self._rank, RUN, self.odd.tamper(batch.sequences), self._settings)
        after = self._rank.score(RUN, self._fixed)
        probe = compare(before, after, before, self._arrived(before, after)).metrics()
        self.step += 1
        figures = {**batch.metrics, **metrics, **probe}
        account = Account.from_dict(line["account"]).after_training(figures)
        return {**line, "step": self.step, "training": figures, "account": account.to_dict()}

    @torch.no_grad()
    def _rolled_out(self) -> list[list[tuple[tuple[int, int], ModelCall]]]:
        places = [(example, number) for example in range(NUM_EXAMPLES) for number in range(GROUP_SIZE)]
        prompt_bp = torch.tensor([[1, 8 + example, 2] for example, _ in places])
        self._rank.score(RUN, [[1, 2]])  # makes the run's adapter the active one
        ids_bt, logprobs = prompt_bp, []
        for _ in range(NUM_TOKENS):
            logits_bv = self._rank._policy.model(ids_bt).logits[:, -1].float()
            if self.odd.noise:
                logits_bv = logits_bv + self.odd.noise * torch.randn(
                    logits_bv.shape, generator=self._generator
                )
            logprob_bv = (logits_bv / self.odd.temperature).log_softmax(-1)
            drawn_b1 = torch.multinomial(logprob_bv.exp(), 1, generator=self._generator)
            logprobs.append(logprob_bv.gather(-1, drawn_b1)[:, 0])
            ids_bt = torch.cat([ids_bt, drawn_b1], -1)
        rows = torch.stack(logprobs, -1).tolist()
        made = [
            (place, self._call(place, ids[:3], ids[3:], row))
            for place, ids, row in zip(places, ids_bt.tolist(), rows, strict=True)
        ]
        return [made[start : start + GROUP_SIZE] for start in range(0, len(made), GROUP_SIZE)]

    def _call(
        self, place: tuple[int, int], prompt: list[int], output: list[int], row: list[float]
    ) -> ModelCall:
        name = f"{self.step}-{place[0]}-{place[1]}"
        return ModelCall(
            id=f"call-{name}",
            rollout_id=f"rollout-{name}",
            model=RUN,
            run=RUN,
            policy_step=self.step,
            policy_version=f"{RUN}@{self.step}",
            prompt_ids=prompt,
            output_ids=output,
            logprobs=row,
            finish_reason="stop",
            messages=[],
            sampling={"temperature": self.odd.temperature, **self.odd.sampling},
        )

    def _rollout(self, example: int, number: int, call: ModelCall) -> Rollout:
        return Rollout(
            call.rollout_id or "",
            str(example),
            number,
            Ending.COMPLETED,
            self._reward(example, call.output_ids),
            call_ids=[call.id],
            figures=RolloutFigures(1, NUM_TOKENS, (self.step,), temperature=self.odd.temperature),
            index=example,
        )

    def _arrived(self, before: list[list[float]], after: list[list[float]]) -> list[list[float]]:
        share = self.odd.arriving
        return [
            [old + share * (new - old) for old, new in zip(*rows, strict=True)]
            for rows in zip(before, after, strict=True)
        ]


def record(name: str, num_steps: int, **options: Any) -> None:
    """Keep the figures of a run for tests."""
    with tempfile.TemporaryDirectory() as folder:
        run = SmallRun(Path(folder), **options)
        write_run(name, [run.line() for _ in range(num_steps)])


def main() -> None:
    for seed in range(3):
        record(f"small-{seed}", 25, seed=seed)
    record("slow", 25, rate=1e-4)
    record("collapse", 22, rate=3e-2, reward=easy_way_out)


if __name__ == "__main__":
    main()
