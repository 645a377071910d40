"""The combinations of training method, trajectory builder and settings that cannot work."""

from __future__ import annotations

from insitu.config.finetuning import FinetuningConfig
from insitu.errors import InvalidRequest
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder


def check_method(config: FinetuningConfig, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
    """Reject a method that cannot learn from the builder's rollouts, and settings that it would ignore."""
    method = f"trainer_adapters.{config.trainer_adapter}.training.method"
    if builder.methods is not None and adapter.method not in builder.methods:
        able = " or ".join(sorted(builder.methods))
        raise InvalidRequest(
            f"{method} is {adapter.method}, which cannot learn from the rollouts of trajectory_builders."
            f"{config.trajectory_builder} ({type(builder).__qualname__}); {able} can",
            hint=f"set {method} to {able}, or choose a builder that runs the agent: `_type: insitu`",
        )
    if adapter.compares and builder.group_size is not None and builder.group_size < 2:
        raise InvalidRequest(
            f"num_generations is {builder.group_size}: a rollout is judged against others of the "
            "same example, and there would be none",
            hint=f"set trajectory_builders.{config.trajectory_builder}.num_generations to 2 or more (8 is a "
            f"good start); one is enough under {method}: sft or distill",
        )
    if not adapter.compares and config.max_refill is not None:
        raise InvalidRequest(
            f"finetuning.max_refill is set, but under {method}: {adapter.method} groups whose rewards are "
            "all equal teach too, so none is ever replaced",
            hint="remove finetuning.max_refill",
        )
    if not builder.runs_agent and config.curriculum_learning.enabled:
        raise InvalidRequest(
            f"finetuning.curriculum_learning is enabled, but the rollouts of trajectory_builders."
            f"{config.trajectory_builder} are given: their rewards do not say how hard an example is",
            hint="set finetuning.curriculum_learning.enabled to false",
        )


def why_nothing_trained(adapter: TrainerAdapter) -> str:
    """Say what the groups of a step without an update lacked."""
    if adapter.compares:
        return "no group had two different rewards"
    if adapter.min_reward is not None:
        return f"no rollout had a reward of {adapter.min_reward:g} or more"
    return "no rollout had a reward and calls to train on"
