"""Rollout: one run of the agent on one example, from the collector to the store, the upload and the pages.

Rollout          what is compared and trained on: light, kept in memory for a whole epoch
RolloutDetails   what was said: input, output, calls; held until stored, then read from the disk on demand
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from insitu.harness.rollouts.call_rewards import trained_call_rewards
from insitu.harness.rollouts.capture import Capture
from insitu.harness.rollouts.episode_items import EpisodeItem, episode_of
from insitu.harness.rollouts.recorded_call import RecordedCall, complete
from insitu.json_values import as_object
from insitu.rewards.items import EvalResult
from insitu.types import REWARD_COMPONENTS, SCORED, Ending
from insitu.user_traceback import UserTraceback


@dataclass(frozen=True, slots=True)
class RolloutDetails:
    """The heavy half of a rollout."""

    input: object = None
    expected: object = None
    output: object = None
    """The agent's return value."""
    reasoning: object = None
    """The evaluator's."""
    calls: Sequence[RecordedCall] = ()
    """Every recorded call, each without what its parent holds."""
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why each call that is not trained on is not, by call id."""
    call_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """As the evaluator gave them, by call id."""
    traceback: UserTraceback | None = None
    """Of the agent or the evaluator, if one of them raised."""


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """Counts over the calls of a rollout, and the parts of its reward."""

    num_calls: int = 0
    num_output_tokens: int = 0
    policy_steps: tuple[int, ...] = ()
    """The steps of the weights that answered the calls to train on."""
    capture: Capture | None = None
    """The account of its model calls; None if whoever ran it kept none."""
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    """The parts of a composite reward, by name."""
    temperature: float | None = None
    """The mean temperature of the calls to train on; None if none is recorded."""

    def to_dict(self) -> dict[str, object]:
        """Serialize as `metadata` of a stored rollout."""
        written: dict[str, object] = {
            "num_calls": self.num_calls,
            "num_output_tokens": self.num_output_tokens,
            "policy_steps": list(self.policy_steps),
        }
        if self.capture is not None:
            written["capture"] = self.capture.to_dict()
        if self.temperature is not None:
            written["temperature"] = self.temperature
        return written | ({REWARD_COMPONENTS: dict(self.components)} if self.components else {})


class RolloutSource(Protocol):
    """The place of a rollout's details."""

    def read(self, *, tokens: bool) -> RolloutDetails:
        """Return them; without `tokens`, the calls may lack their token ids and logprobs."""
        ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """Details that are not stored yet."""

    details: RolloutDetails = RolloutDetails()

    def read(self, *, tokens: bool) -> RolloutDetails:  # noqa: ARG002 - all is there
        """Return the details."""
        return self.details


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished rollout."""

    rollout_id: str
    example_id: str
    generation: int
    ending: Ending
    reward: float | None
    """The evaluator's, or that of the ending (`finetuning.ending_rewards`); None if it has none."""
    reason: str = ""
    """Why it failed."""
    call_ids: Sequence[str] = ()
    """The calls to train on, in order."""
    call_rewards: Sequence[float] | None = None
    """One per entry of `call_ids`, see `insitu.harness.rollouts.call_rewards`; None without call rewards."""
    figures: RolloutFigures = RolloutFigures()
    index: int = 0
    """The position of the example in the dataset."""
    attempt: int = 0
    seconds: float | None = None
    started_at: float | None = None
    """Unix time."""
    inline: bool = False
    """True if its calls are uploaded with it, because the backend has no record of them."""
    source: RolloutSource = field(default=InMemory(), repr=False, compare=False)

    @property
    def trainable(self) -> bool:
        """True if it has a reward and calls to train on."""
        return self.reward is not None and len(self.call_ids) > 0

    @property
    def failed(self) -> bool:
        """True if there was nothing to score, or scoring failed; its ending may still have a reward."""
        return self.reward is None or self.ending not in SCORED

    @property
    def capture(self) -> Capture:
        """The account of its model calls; without one, only the calls to train on are known."""
        count = len(self.call_ids)
        return self.figures.capture or Capture(uncounted=count, trained=count)

    @property
    def episode(self) -> list[EpisodeItem]:
        """The messages of the calls in order, each once; a call that continues no other starts afresh."""
        return list(episode_of(self.read_calls()))

    @property
    def metadata(self) -> dict[str, object]:
        """The figures under the keys of the stored line, for plugins that read them there."""
        return self.figures.to_dict()

    @property
    def step_rewards(self) -> Sequence[float] | None:
        """The call rewards, under the name that plugins know."""
        return self.call_rewards

    def details(self, *, tokens: bool = False) -> RolloutDetails:
        """Return what was said, from memory or from the disk."""
        return self.source.read(tokens=tokens)

    def read_calls(self) -> list[RecordedCall]:
        """Return every call in full, with token ids and logprobs."""
        return complete(self.details(tokens=True).calls)

    def scored(self, result: EvalResult) -> Rollout:
        """Return it with its reward, or with the reason for none: a failed evaluation is never a 0."""
        if result.error is not None:
            details = replace(self.details(tokens=True), traceback=result.traceback)
            failed = replace(self, ending=Ending.EVALUATOR_ERROR, reason=result.error)
            return replace(failed, source=InMemory(details)) if result.traceback else failed
        given = dict(result.call_rewards)
        details = replace(self.details(tokens=True), reasoning=result.reasoning, call_rewards=given)
        return replace(
            self,
            reward=result.score,
            call_rewards=trained_call_rewards(given, self.call_ids, (call["id"] for call in details.calls)),
            figures=replace(self.figures, components=_components(result.reasoning)),
            source=InMemory(details),
        )

    def with_calls(
        self, calls: Sequence[RecordedCall], dropped: Mapping[str, str], figures: RolloutFigures
    ) -> Rollout:
        """Return it with more calls that are not trained on, such as a judge's, and the figures over all."""
        details = replace(self.details(tokens=True), calls=calls, dropped=dropped)
        figures = replace(figures, components=self.figures.components)
        return replace(self, figures=figures, source=InMemory(details))


def _components(reasoning: object) -> dict[str, float]:
    """Return the component scores of a composite reward, by name."""
    parts = {name: as_object(part) for name, part in (as_object(reasoning) or {}).items()}
    scores = {name: part.get("score") for name, part in parts.items() if part is not None}
    return {name: float(score) for name, score in scores.items() if isinstance(score, int | float)}
