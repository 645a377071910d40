"""Which of a rollout's recorded calls are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.types import WORKFLOW_FUNCTION

Call = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Targets:
    """`finetuning.target_functions` and the model that is trained."""

    run: str
    functions: frozenset[str]

    def chosen(self, calls: Sequence[Call]) -> list[Call]:
        """The calls that the trained model answered for a targeted function, in order."""
        return [call for call in calls if call["run"] == self.run and _function(call) in self.functions]

    def why_none(self, calls: Sequence[Call]) -> str:
        """What to say of a rollout of which nothing can be trained."""
        if not calls:
            return "no model call of this rollout passed the gateway"
        ours = [call for call in calls if call["run"] == self.run]
        if not ours:
            models = ", ".join(sorted({str(call["model"]) for call in calls}))
            return f"its {len(calls)} model calls went to {models}, not to the run {self.run}"
        seen = ", ".join(f"{name} ({count})" for name, count in Counter(map(_function, ours)).items())
        return f"none of its calls is of target_functions {sorted(self.functions)}; seen: {seen}"


def _function(call: Call) -> str:
    return call.get("function") or WORKFLOW_FUNCTION
