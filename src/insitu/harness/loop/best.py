"""The best step: measured again before it is announced, and compared with the model before training.

    validations ──► highest mean, step 0 included ──► new samples of that step ──► interval against step 0

The highest of several noisy figures is too high on average; new samples are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from insitu.errors import InsituError
from insitu.harness.files.metrics import ValidationEntry, measurement_of
from insitu.harness.gains.gain import Gain, compare
from insitu.harness.gains.measurement import plus_minus
from insitu.harness.interfaces import events
from insitu.harness.loop.running_loop import RunningLoop
from insitu.harness.loop.state import LoopState
from insitu.harness.loop.validation import entry_of, rollouts_of, takes_plans
from insitu.harness.rollouts.episode import Trajectory


def is_better(entry: ValidationEntry, best: events.Best | None) -> bool:
    """Return True if a validation beats the best so far; the earlier of equal ones stays."""
    reward = entry["avg_reward"]
    if reward is None:
        return False
    return best is None or best.reward is None or reward > best.reward


async def remeasure_best(loop: RunningLoop) -> None:
    """Measure the best step again and note it; say why, if it cannot be served."""
    best = loop.state.best
    if loop.run.validation is None or best is None or not best.step or best.step in loop.state.remeasured:
        return
    chosen = next(each for each in reversed(loop.state.validations) if each["step"] == best.step)
    try:
        entry = await _measured_again(loop, chosen)
    except InsituError as error:
        # The run itself is over and good; the same command tries again.
        loop.run.progress.warn(f"Step {best.step}, the best, could not be measured again: {error}")
        return
    if entry is not None:
        loop.note(events.Remeasured(entry))


def gain_of(state: LoopState) -> Gain | None:
    """Compare the best step, as measured again, with step 0; None if one of them is not known."""
    best = state.best
    again = state.remeasured.get(best.step) if best else None
    start = next((each for each in state.validations if each["step"] == 0), None)
    if again is None or start is None or "rewards" not in start or "rewards" not in again:
        return None
    candidates = {each["step"] for each in state.validations if each["avg_reward"] is not None} - {0}
    return compare(
        measurement_of(start),
        measurement_of(again),
        num_candidates=max(1, len(candidates)),
        clusters=again.get("clusters"),
    )


def announcement(state: LoopState) -> str:
    """Say what the best step is worth; "" if it was not measured again."""
    best = state.best
    again = state.remeasured.get(best.step) if best else None
    if best is None or again is None or again["avg_reward"] is None:
        return ""
    reward = plus_minus(again["avg_reward"], again.get("standard_error"), 4)
    said = f"Best: step {best.step} - Avg Reward: {reward} measured again"
    gain = gain_of(state)
    return f"{said}. {gain.sentence('step 0', f'step {best.step}')}" if gain else said


def listed_validations(state: LoopState) -> list[ValidationEntry]:
    """Return the validations and the best one's second measurement with its gain, as files show them."""
    best = state.best
    if best is None or best.step not in state.remeasured:
        return [*state.validations]
    gain = gain_of(state)
    again: ValidationEntry = {**state.remeasured[best.step], "gain": gain.to_dict() if gain else None}
    return [*state.validations, again]


async def validate_start(loop: RunningLoop) -> ValidationEntry | None:
    """Validate step 0 of a run that has gone on since; None, with a warning, if it cannot be served."""
    try:
        found = await _rollouts_at(loop, 0, "validation-0000", "Step 0", "anew")
    except InsituError as error:
        loop.run.progress.warn(f"Step 0 could not be measured anew, so no gain will be known: {error}")
        return None
    return None if found is None else entry_of(loop.run, found, 0, 0, loop.run.run_id)


async def _rollouts_at(
    loop: RunningLoop, step: int, name: str, what: str, again: str
) -> Sequence[Trajectory] | None:
    """Run the validation examples on the weights of a step; None, with a warning, if that is not possible."""
    newest = step == loop.state.step
    if not newest and not takes_plans(loop.builder):
        loop.run.progress.warn(
            f"{what} is not measured {again}: {type(loop.builder).__qualname__}.run_eval has no parameter "
            "`plan` (docs/plugins.md)"
        )
        return None
    lease: AbstractAsyncContextManager[str | None] = nullcontext() if newest else loop.adapter.leased(step)
    async with lease as model:
        if model is None and not newest:
            loop.run.progress.warn(f"{what} is not measured {again}: the backend serves only the newest step")
            return None
        return await rollouts_of(loop.run, loop.builder, name, f"{what.lower()} {again}", model)


async def _measured_again(loop: RunningLoop, chosen: ValidationEntry) -> ValidationEntry | None:
    step = chosen["step"]
    name = f"remeasured-{step:06d}"
    found = await _rollouts_at(loop, step, name, f"Step {step}, the best,", "again")
    if found is None:
        return None
    entry = entry_of(loop.run, found, chosen["epoch"], step, chosen["run_id"])
    if entry["avg_reward"] is None:
        kept = loop.run.directory.set_aside(name)
        loop.run.progress.warn(
            f"Step {step}, the best, could not be measured again: all {len(found)} rollouts failed, for "
            f"example {found[0].ending}: {found[0].reason}; they are kept in {kept}, and the same command "
            "tries again"
        )
        return None
    entry["remeasured"] = True
    if "pass_share" in chosen:
        entry["pass_share"] = chosen["pass_share"]
    return entry
