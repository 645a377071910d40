"""Trial: real rollouts and rewards of a few examples.

examples ──► AgentRollouts (the harness's own, on a gateway or any server) ──► TriedExample
                  │ LoopWatch                                                        │
                  └──► gold, empty and constant answers ──► RewardCheck ──► Trial ◄──┘
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from insitu.config.load import LoadedConfig
from insitu.datasets.example import Example
from insitu.errors import InvalidRequest
from insitu.harness.assembly import Assembly
from insitu.harness.collect.agent_rollouts import AgentRollouts, Limits, eval_item
from insitu.harness.collect.rollout_plan import RolloutPlan
from insitu.harness.collect.targets import Targets
from insitu.harness.files.redaction import Redaction
from insitu.harness.finetune import Components, build_components
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import Task
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.trial.answering import Answering, answering
from insitu.harness.trial.loop_watch import Blocked, LoopWatch
from insitu.harness.trial.reward_check import CheckedExample, check_reward
from insitu.harness.trial.tried_example import Trial, TriedExample
from insitu.rewards.evaluator import GroupEvaluator
from insitu.rewards.score import score_group
from insitu.types import SCORED

OnStart = Callable[[Answering], None]
OnExample = Callable[[TriedExample], None]


async def try_out(loaded: LoadedConfig, limit: int, on_start: OnStart, on_example: OnExample) -> Trial:
    """Roll out the first examples one by one, score each, and check the reward with made-up answers."""
    async with Assembly(loaded) as parts:
        made = await build_components(parts)
        task = await _task(parts, made, loaded.path)
        async with answering(task.agent.binding, made.adapter.trained_model) as who:
            on_start(who)
            trial = _Trial(loaded, task.with_binding(who.binding), who, f"try_{secrets.token_hex(4)}.e0")
            tried: list[TriedExample] = []
            for index, example in enumerate(task.examples[:limit]):
                tried.append(await trial.example(index, example))
                on_example(tried[-1])
    return Trial(who.binding.model, who.address, who.gateway is not None, tried, parts.notes)


async def _task(parts: Assembly, made: Components, file: Path | None) -> Task:
    """Return the training examples; those of validation if training does not run the agent."""
    task = await made.training_task(parts)
    if made.builder.runs_agent:
        return task
    validation = await parts.validation_task(task, made.adapter.trained_model)
    if validation is None:
        raise InvalidRequest(
            f"training by {made.adapter.method} from given rollouts does not run the agent",
            hint=f"check it with `insitu finetune --config_file={shlex.quote(str(file))} --dry-run`, or add "
            "a validation dataset to run the agent on",
        )
    return validation


@dataclass(frozen=True, slots=True)
class _Trial:
    """The parts that all examples share."""

    loaded: LoadedConfig
    task: Task
    who: Answering
    prefix: str

    @property
    def _limits(self) -> Limits:
        general, finetuning = self.loaded.config.eval.general, self.loaded.config.finetuning
        rewards = finetuning.ending_rewards.given
        return Limits(1, finetuning.rollout_timeout_seconds, general.evaluator_timeout_seconds, rewards)

    async def example(self, index: int, example: Example) -> TriedExample:
        """Run the agent once, score its answer, and score made-up ones."""
        limits, redaction = self._limits, Redaction(self.loaded.config)
        async with LoopWatch() as watch:
            rollout = await self._rollout(RolloutPlan(index, example, 0, self.prefix), limits)
        checked = await check_reward(
            self.task.evaluator, example, rollout, limits.evaluator_seconds, redaction
        )
        return self._tried(rollout, watch.blocked, checked, redaction)

    async def _rollout(self, plan: RolloutPlan, limits: Limits) -> Rollout:
        functions = frozenset(self.loaded.config.finetuning.target_functions)
        binding = self.who.binding
        targets = Targets(self.who.run, functions, binding.gateway_url, binding.model)
        maker = AgentRollouts(self.task, targets, self.who.gateway, limits, Progress())
        rollout = await maker.make(plan)
        if not isinstance(self.task.evaluator, GroupEvaluator) or rollout.ending not in SCORED:
            return rollout
        item = eval_item(plan.example, rollout)
        (result,) = await score_group(self.task.evaluator, [item], limits.evaluator_seconds)
        return rollout.scored(result)

    def _tried(
        self, rollout: Rollout, blocked: Blocked | None, checked: CheckedExample, redaction: Redaction
    ) -> TriedExample:
        details = rollout.details()
        recorded = self.who.gateway is not None
        return TriedExample(
            id=rollout.example_id,
            input=details.input,
            expected=details.expected,
            output=details.output,
            ending=rollout.ending,
            reward=rollout.reward,
            reasoning=details.reasoning,
            reason=redaction.hide(rollout.reason),
            traceback=None if details.traceback is None else redaction.hide_traceback(details.traceback),
            num_calls=rollout.figures.num_calls if recorded else None,
            num_output_tokens=rollout.figures.num_output_tokens if recorded else None,
            seconds=rollout.seconds or 0.0,
            blocked=blocked,
            checked=checked,
        )
