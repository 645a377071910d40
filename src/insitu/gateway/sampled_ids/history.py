"""The gateway's own memory of recent rollouts: the ids of their calls, as they were sampled.

Records are written off the hot path, so the next turn of a conversation cannot wait for them. A conversation
is kept once, however many turns it has; a call that continues none of them starts another. The project that
has the most forgets its least recently used rollouts first; all are forgotten when the process ends.
"""

from __future__ import annotations

import logging
import time
from array import array
from dataclasses import dataclass

from insitu.access.fair_memory import FairMemory
from insitu.access.projects import project_of

MAX_CONVERSATIONS = 32
"""Per rollout; the least recently used one is evicted."""

ACTIVE_SECONDS = 300.0
"""A rollout that made a call within this time may make another."""
log = logging.getLogger(__name__)
Key = tuple[str, str]
"""A rollout and the run, or else the model, that answers it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: the length of its prompt, and of prompt and output together."""

    num_prompt: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Conversation:
    """A chain of calls: the prompt of each starts with all ids before it."""

    ids: array[int]
    turns: list[Turn]


class History:
    """Conversations by rollout, bounded in rollouts and in tokens."""

    def __init__(self, max_rollouts: int, max_tokens: int) -> None:
        self.num_forgotten = 0
        """Rollouts evicted to make room for newer ones."""
        self.num_forgotten_active = 0
        """Those of them that may go on: their next prompts stay as rendered."""
        self._max_rollouts, self._max_tokens = max_rollouts, max_tokens
        self._rollouts = FairMemory[Key, list[Conversation]](lambda key: project_of(key[0]).name)
        self._used_at: dict[Key, float] = {}

    @property
    def num_rollouts(self) -> int:
        return len(self._rollouts)

    @property
    def num_tokens(self) -> int:
        return self._rollouts.weight

    def of(self, key: Key) -> list[Conversation]:
        """Return the conversations of a rollout, least recently used first."""
        return self._rollouts.get(key) or []

    def add(self, key: Key, prompt: array[int], output: array[int]) -> None:
        """Remember a call as the next turn of the longest conversation that it continues, or as a new one."""
        kept = self._rollouts.get(key) or self._rollouts.put(key, [])
        self._used_at[key] = time.monotonic()
        continued = [c for c in kept if prompt[: len(c.ids)] == c.ids]
        found = max(continued, key=lambda c: len(c.ids), default=None)
        conversation = found or Conversation(array("i"), [])
        before = len(conversation.ids)
        conversation.ids += prompt[before:] + output
        conversation.turns.append(Turn(len(prompt), len(conversation.ids)))
        self._rollouts.add_weight(key, len(conversation.ids) - before)
        if found is not None:
            kept.remove(found)
        kept.append(conversation)
        if len(kept) > MAX_CONVERSATIONS:
            self._rollouts.add_weight(key, -len(kept.pop(0).ids))
        self._shrink()

    def _shrink(self) -> None:
        while (full := self.num_tokens > self._max_tokens) or len(self._rollouts) > self._max_rollouts:
            key, dropped = self._rollouts.forget(by_weight=full)
            self._rollouts.add_weight(key, -sum(len(conversation.ids) for conversation in dropped))
            self.num_forgotten += 1
            seconds = time.monotonic() - self._used_at.pop(key)
            if seconds < ACTIVE_SECONDS:
                self.num_forgotten_active += 1
                log.warning(
                    "the sampled ids of a rollout that made a call %.0f s ago are forgotten: this gateway "
                    "remembers %d rollouts and %d tokens. If its next prompt is rendered differently, it "
                    "starts a new sequence",
                    seconds,
                    self._max_rollouts,
                    self._max_tokens,
                )
