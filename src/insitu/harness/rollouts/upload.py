"""Rollouts as they are uploaded to a backend."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.harness.rollouts.rollout import Rollout
from insitu.json_values import JsonObject
from insitu.returns import call_returns, returns_by_turn
from insitu.types import REWARD_COMPONENTS, ModelCall, Trajectory
from insitu.wire.model_call import DEMONSTRATION


def group_id_of(run_id: str, epoch: int, taken: Sequence[Rollout]) -> str:
    """Derive the id from the rollouts to upload, so that it is stable across resumes."""
    rollouts = "\n".join(sorted(rollout.rollout_id for rollout in taken))
    return f"{run_id}-e{epoch}-{hashlib.sha256(rollouts.encode()).hexdigest()[:16]}"


def uploaded(rollout: Rollout) -> Trajectory:
    """Return what the backend is told of a rollout."""
    assert rollout.reward is not None
    metadata: JsonObject = {"example_id": rollout.example_id, "generation": rollout.generation}
    if rollout.figures.components:
        metadata[REWARD_COMPONENTS] = {**rollout.figures.components}
    return Trajectory(
        rollout_id=rollout.rollout_id,
        call_ids=list(rollout.call_ids),
        reward=rollout.reward,
        ending=rollout.ending,
        metadata=metadata,
        step_rewards=None if rollout.call_rewards is None else list(rollout.call_rewards),
    )


def own_calls(rollout: Rollout) -> list[ModelCall]:
    """Return the calls of a rollout with their tokens, as recorded by the gateway of another run."""
    found = {call["id"]: call for call in rollout.read_calls()}
    return [_inline_call(found[call_id]) for call_id in rollout.call_ids]


def _inline_call(call: RecordedCall) -> ModelCall:
    given = call.get("source") == DEMONSTRATION
    return ModelCall(
        id=call["id"],
        rollout_id=None,
        model=call["model"],
        run=None,
        policy_step=0,
        policy_version=call["policy_version"] or DEMONSTRATION,
        prompt_ids=call.get("prompt_ids", []),
        output_ids=call.get("output_ids", []),
        logprobs=call.get("logprobs", []),
        finish_reason=call["finish_reason"],
        # The logprobs of a given answer are not the model's.
        constrained=given or call.get("constrained", False),
        sampling=call.get("sampling", {}),
        function=call.get("function"),
    )


def comparable(group: Sequence[Trajectory]) -> bool:
    """Return True if the returns of a turn differ; a single rollout has nothing to be compared with."""
    returns = [call_returns(t.reward, t.step_rewards, len(t.call_ids)) for t in group]
    turns = returns_by_turn(returns, [t.reward for t in group])
    return any(len(set(turn)) > 1 for turn in turns)
