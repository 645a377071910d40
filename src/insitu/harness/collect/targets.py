"""Targets: selects the recorded calls of a rollout that are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.harness.rollouts.capture import INCOMPLETE_CALL, OTHER_FUNCTION, OTHER_MODEL
from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.types import INCOMPLETE, WORKFLOW_FUNCTION
from insitu.wire.headers import FUNCTION_HEADER


@dataclass(frozen=True, slots=True)
class Targets:
    """`finetuning.target_functions` and the trained model."""

    run: str | None
    """None: the base model."""
    functions: frozenset[str]
    gateway_url: str = ""
    model: str = ""
    """The name that calls must use; empty: the run's."""

    def dropped_as(self, call: RecordedCall) -> str | None:
        """Return why a call is not trained on: `other_model`, `other_function`, `incomplete`; None if it is.

        A fixed version (`<run>@<step>`) is another model, unless it is the one being evaluated.
        """
        if call["run"] != self.run or call["model"] != (self.model or self.run):
            return OTHER_MODEL
        if _function(call) not in self.functions:
            return OTHER_FUNCTION
        return INCOMPLETE_CALL if call["finish_reason"] in INCOMPLETE else None

    def chosen(self, calls: Sequence[RecordedCall]) -> list[RecordedCall]:
        """Return, in order, the calls of targeted functions that the trained model answered completely."""
        return [call for call in calls if self.dropped_as(call) is None]

    def why_none(self, calls: Sequence[RecordedCall], unrecorded: Mapping[str, int] | None = None) -> str:
        """Explain why no call of a rollout can be trained on."""
        if not calls:
            return self._why_no_calls(unrecorded or {})
        ours = [call for call in calls if self.dropped_as(call) != OTHER_MODEL]
        if not ours:
            name = self.model or self.run
            models = ", ".join(sorted({str(call["model"]) for call in calls}))
            return (
                f"its {_count(len(calls))} went to {models}, not to {name}: the agent must name the "
                f"model {name!r} (`context.llm().model`, for commands OPENAI_MODEL)"
            )
        targeted = [call for call in ours if self.dropped_as(call) != OTHER_FUNCTION]
        if not targeted:
            return self._why_no_function(ours)
        endings = Counter(str(call["finish_reason"]) for call in targeted)
        listed = ", ".join(f"{count} {ending}" for ending, count in endings.items())
        return (
            f"all {_count(len(targeted))} to train on broke off before their answer was whole ({listed}): "
            "look for time limits and cancelled streams in the agent, and for errors of the engine"
        )

    def _why_no_calls(self, unrecorded: Mapping[str, int]) -> str:
        if unrecorded:
            listed = ", ".join(f"{count} {reason}" for reason, count in unrecorded.items())
            return (
                f"{_count(sum(unrecorded.values()))} of this rollout reached the gateway, but none was "
                f"answered ({listed}): the agent's own error messages or the gateway's log say why"
            )
        address = f"{self.gateway_url}/rollouts/<id>/v1"
        return (
            f"no model call of this rollout passed the gateway: the agent did not use the address {address} "
            "that it was given (`context.llm().base_url`, for commands OPENAI_BASE_URL)"
        )

    def _why_no_function(self, ours: Sequence[RecordedCall]) -> str:
        functions = Counter(map(_function, ours))
        seen = ", ".join(f"{name} ({count})" for name, count in functions.items())
        reason = f"none of its calls is of target_functions {sorted(self.functions)}; seen: {seen}"
        if set(functions) == {WORKFLOW_FUNCTION}:
            name = min(self.functions)
            reason += (
                ": no call says which part of the agent made it; mark it with `with "
                f"insitu.function({name!r}):`, the header {FUNCTION_HEADER}, or the "
                f"address …/rollouts/<id>/functions/{name}/v1"
            )
        return reason


def _function(call: RecordedCall) -> str:
    return call.get("function") or WORKFLOW_FUNCTION


def _count(number: int) -> str:
    return "1 model call" if number == 1 else f"{number} model calls"
