"""The gateway's own memory of recent rollouts: the ids of their calls, as they were sampled.

Records are written off the hot path, so the next turn of a conversation cannot wait for them. A conversation
is kept once, however many turns it has; a call that continues none of them starts another. The least
recently used rollouts are forgotten first, and all of them when the process ends.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

MAX_CONVERSATIONS = 32
"""Per rollout; the least recently used one is evicted."""

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
        self._max_rollouts, self._max_tokens = max_rollouts, max_tokens
        self._rollouts: OrderedDict[Key, list[Conversation]] = OrderedDict()

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
            _, dropped = self._rollouts.popitem(last=False)
            self.num_tokens -= sum(len(conversation.ids) for conversation in dropped)
            self.num_forgotten += 1
