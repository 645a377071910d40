"""The gateway's own memory of recent rollouts: the ids of their calls, as they were sampled.

Records are written off the hot path, so the next turn of a conversation cannot wait for them. A conversation
is kept once, however many turns it has; a call that continues none of them starts another. The least
recently used rollouts are forgotten first, and all of them when the process ends.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass

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
        self.num_tokens = 0
        self.num_forgotten = 0
        """Rollouts evicted to make room for newer ones."""
        self.num_forgotten_active = 0
        """Those of them that may go on: their next prompts stay as rendered."""
        self._max_rollouts, self._max_tokens = max_rollouts, max_tokens
        self._rollouts: OrderedDict[Key, list[Conversation]] = OrderedDict()
        self._used_at: dict[Key, float] = {}

    @property
    def num_rollouts(self) -> int:
        return len(self._rollouts)

    def of(self, key: Key) -> list[Conversation]:
        """Return the conversations of a rollout, least recently used first."""
        if key not in self._rollouts:
            return []
        self._rollouts.move_to_end(key)
        return self._rollouts[key]

    def add(self, key: Key, prompt: array[int], output: array[int]) -> None:
        """Remember a call as the next turn of the longest conversation that it continues, or as a new one."""
        kept = self._rollouts.setdefault(key, [])
        self._rollouts.move_to_end(key)
        self._used_at[key] = time.monotonic()
        continued = [c for c in kept if prompt[: len(c.ids)] == c.ids]
        found = max(continued, key=lambda c: len(c.ids), default=None)
        conversation = found or Conversation(array("i"), [])
        before = len(conversation.ids)
        conversation.ids += prompt[before:] + output
        conversation.turns.append(Turn(len(prompt), len(conversation.ids)))
        self.num_tokens += len(conversation.ids) - before
        if found is not None:
            kept.remove(found)
        kept.append(conversation)
        self._shrink(kept)

    def _shrink(self, kept: list[Conversation]) -> None:
        if len(kept) > MAX_CONVERSATIONS:
            self.num_tokens -= len(kept.pop(0).ids)
        while self.num_tokens > self._max_tokens or len(self._rollouts) > self._max_rollouts:
            key, dropped = self._rollouts.popitem(last=False)
            self.num_tokens -= sum(len(conversation.ids) for conversation in dropped)
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
