"""Prevent drift between turns: restore the sampled ids in the prompt that continues them.

    render ──► ids of the template's text ──► restore ──► the same text, with the ids sampled before

A chat template turns the whole conversation into text at every turn, and the tokenizer may split the model's
own answers differently from how they were sampled (`1` `0` against `10`). If the rendered ids start with
exactly the text of an earlier call of the rollout, prompt and output, that part is replaced by the ids
of that call. Text that changed (reasoning dropped, tool calls rewritten, whitespace trimmed) stays as
rendered: production sees it the same way. Only whole calls are restored, from the first token on.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, replace

from insitu.gateway.engines.routes import Target
from insitu.gateway.protocols.base import Lane, Rendered
from insitu.gateway.sampled_ids.alignment import Alignment, align
from insitu.gateway.sampled_ids.history import Conversation, History, Key
from insitu.gateway.sampled_ids.tokenizers import Tokenizers
from insitu.gateway.shared.faults import reading
from insitu.gateway.shared.settings import Limits
from insitu.json_values import JsonObject

# The published names of the counters under `put_back` in `GET /health`.
OUTCOMES = ("exact", "put_back", "template_changed", "boundary", "no_room", "not_compared")
_MEDIA_FIELDS = ("features", "content_parts")


@dataclass(frozen=True, slots=True)
class Match:
    """A rendered prompt matched against one conversation."""

    conversation: Conversation
    num_recorded: int
    """Recorded ids of the longest run of whole calls that the prompt's text starts with; 0 if none."""
    num_rendered: int
    """The number of rendered ids with the same text."""
    broken: str | None = None
    """The reason why a later call, whose prompt it also starts with, is not continued."""
    broken_at: int = 0

    @property
    def rank(self) -> tuple[int, bool]:
        """Sort key: the longest text wins; ties go to a conversation that nothing has continued yet."""
        return self.num_rendered, self.num_recorded == len(self.conversation.ids)


class Restorer:
    """Remembers the calls of rollouts and restores their ids in the prompts that continue them."""

    def __init__(self, limits: Limits, tokenizers: Tokenizers) -> None:
        self._history = History(limits.max_remembered_rollouts, limits.max_remembered_tokens)
        self._tokenizers = tokenizers
        self._counts: Counter[str] = Counter()

    def report(self) -> JsonObject:
        """Report how prompts continued earlier calls, and what is remembered."""
        return {
            **{outcome: self._counts[outcome] for outcome in OUTCOMES},
            "tokenizers": {**self._tokenizers.states},
            "remembered_rollouts": self._history.num_rollouts,
            "remembered_tokens": self._history.num_tokens,
            "forgotten_rollouts": self._history.num_forgotten,
            "forgotten_active_rollouts": self._history.num_forgotten_active,
        }

    def remember(self, rollout_id: str | None, target: Target, rendered: Rendered, output: list[int]) -> None:
        """Remember an answered call, unless its prompt has media: equal ids may be different pictures."""
        if rollout_id is not None and not _has_media(rendered):
            prompt = array("i", rendered.prompt_ids) if rendered.packed is None else rendered.packed
            self._history.add(_key(rollout_id, target), prompt, array("i", output))

    async def restore(self, rollout_id: str | None, target: Target, lane: Lane, given: Rendered) -> Rendered:
        """Return the prompt with the ids sampled earlier, or as it was given if nothing is to be restored."""
        if rollout_id is None or not given.from_text or _has_media(given):
            return given
        key = _key(rollout_id, target)
        conversations = self._history.of(key)
        if not conversations:
            return given
        with reading():
            ids = array("i", given.prompt_ids)
        given = replace(given, packed=ids)
        if len(conversations) == 1 and ids[: len(conversations[0].ids)] == conversations[0].ids:
            self._counts["exact"] += 1
            return given
        served = await self._tokenizers.of(lane.engine, lane.engine_model)
        if served.pieces is None:
            exact = any(ids[: len(c.ids)] == c.ids for c in self._history.of(key))
            self._counts["exact" if exact else "not_compared"] += 1
            return given
        matches = [match(c, align(c.ids, ids, served.pieces)) for c in self._history.of(key)]
        best = max(matches, key=lambda m: m.rank, default=None)
        if best is None:  # forgotten while the table was read
            return given
        broken = {m.broken for m in matches if m.broken and m.broken_at >= best.num_rendered}
        if broken:
            self._counts["boundary" if "boundary" in broken else "template_changed"] += 1
        return self._apply(given, best, ids, served.max_model_len)

    def _apply(self, given: Rendered, best: Match, ids: array[int], max_model_len: int | None) -> Rendered:
        if not best.num_recorded:
            return given
        sampled = best.conversation.ids[: best.num_recorded]
        if sampled == ids[: best.num_rendered]:
            self._counts["exact"] += 1
            return given
        restored = _fitted(given, sampled + ids[best.num_rendered :], max_model_len)
        self._counts["no_room" if restored is None else "put_back"] += 1
        return restored or given


def match(conversation: Conversation, aligned: Alignment) -> Match:
    """Find the longest run of whole calls that the prompt starts with, and the fate of the call after it."""
    num_recorded = num_rendered = broken_at = 0
    broken: str | None = None
    for turn in conversation.turns:
        if turn.num_prompt > aligned.num_covered:
            break
        end = aligned.rendered_index(turn.num_tokens) if turn.num_tokens <= aligned.num_covered else None
        if end is not None:
            num_recorded, num_rendered, broken = turn.num_tokens, end, None
            continue
        if turn.num_tokens <= aligned.num_covered:
            broken = "boundary"
        elif not aligned.ran_out:  # the same prompt again, or a part of it, continues nothing
            broken = "template_changed"
        broken_at = aligned.rendered_before(turn.num_prompt)
    return Match(conversation, num_recorded, num_rendered, broken, broken_at)


def _fitted(given: Rendered, packed: array[int], max_model_len: int | None) -> Rendered | None:
    """Return the request for other ids of the same text, its output limited to the room the model has left.

    The limit was rendered for `given`; the sampled ids may be more. None if no room is left for an answer.
    """
    sampling = given.generate["sampling_params"]
    length = max_model_len or len(given.prompt_ids) + sampling["max_tokens"]
    max_tokens = min(sampling["max_tokens"], length - len(packed))
    if max_tokens < max(1, sampling["min_tokens"]):
        return None
    sampling = {**sampling, "max_tokens": max_tokens}
    prompt_ids = packed.tolist()
    generate = {**given.generate, "token_ids": prompt_ids, "sampling_params": sampling}
    return Rendered(prompt_ids, generate, packed=packed)


def _has_media(rendered: Rendered) -> bool:
    return any(rendered.generate.get(key) for key in _MEDIA_FIELDS)


def _key(rollout_id: str, target: Target) -> Key:
    return rollout_id, target.run or target.name
