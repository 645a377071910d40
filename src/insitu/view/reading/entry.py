"""Entry: the row that the index keeps of a stored rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson

from insitu.harness.files.json_lines import Span
from insitu.harness.files.rollout_line import from_line
from insitu.harness.rollouts.fields import items, members
from insitu.harness.rollouts.rollout import InMemory
from insitu.json_values import JsonObject
from insitu.view.reading.fates import Member

_SHOWN_CHARS = 300
_SEARCHED_CHARS = 4_000
_TEXT_KEYS = ("question", "input", "prompt", "query", "content", "text")
_SOURCE = InMemory()


@dataclass(frozen=True, slots=True)
class Entry:
    """One rollout."""

    rollout_id: str
    example_id: str
    position: int
    generation: int
    ending: str
    reward: float | None
    failure: str
    num_calls: int
    num_output_tokens: int
    policy_steps: str
    """A JSON list."""
    seconds: float | None
    started_at: float | None
    question: str
    answer: str
    member: str
    """`Member`, as JSON."""
    line_offset: int
    line_length: int

    @property
    def columns(self) -> dict[str, object]:
        """The columns of the table."""
        return {name: getattr(self, name) for name in ENTRY_COLUMNS}


ENTRY_COLUMNS = tuple(Entry.__annotations__)


def entry_of(line: JsonObject, span: Span) -> tuple[Entry, str]:
    """Return the row of a stored line and the text to search in.

    Raises KeyError, TypeError or ValueError for a line that is not a rollout.
    """
    rollout = from_line(line, _SOURCE)
    question, answer = _text(line.get("input")), _text(line.get("output"))
    reason = _storable(rollout.reason)
    failure = reason if rollout.failed else ""
    words = "\n".join([_storable(rollout.example_id), question, answer, reason, rollout.rollout_id])
    entry = Entry(
        rollout_id=rollout.rollout_id,
        example_id=_storable(rollout.example_id),
        position=rollout.index,
        generation=rollout.generation,
        ending=str(rollout.ending),
        reward=rollout.reward,
        failure=failure[:_SHOWN_CHARS],
        num_calls=rollout.figures.num_calls,
        num_output_tokens=rollout.figures.num_output_tokens,
        policy_steps=orjson.dumps(rollout.figures.policy_steps).decode(),
        seconds=rollout.seconds,
        started_at=rollout.started_at,
        question=question[:_SHOWN_CHARS],
        answer=answer[:_SHOWN_CHARS],
        member=orjson.dumps(asdict(_member(line, rollout.call_rewards))).decode(),
        line_offset=span.offset,
        line_length=span.length,
    )
    return entry, words[:_SEARCHED_CHARS].casefold()


def member_of(text: str) -> Member:
    """Read back the `member` of an entry."""
    return Member(**orjson.loads(text))


def _member(line: JsonObject, call_rewards: Sequence[float] | None) -> Member:
    calls = {str(call.get("id")): call for call in map(members, items(line.get("calls")))}
    trained = [calls.get(str(call_id), {}) for call_id in items(line.get("call_ids"))]
    sampled = [call.get("num_output_tokens") for call in trained]
    reward = line.get("reward")
    return Member(
        rollout_id=str(line["rollout_id"]),
        reward=float(reward) if isinstance(reward, int | float) else None,
        ending=str(line["ending"]),
        num_calls=len(trained),
        call_rewards=None if call_rewards is None else list(call_rewards),
        num_sampled=sum(count for count in sampled if isinstance(count, int)),
        policy_steps=sorted({step for call in trained if isinstance(step := call.get("policy_step"), int)}),
        last_cut=bool(trained) and trained[-1].get("finish_reason") == "length",
        constrained=[place for place, call in enumerate(trained) if call.get("constrained") is True],
    )


def _text(value: object) -> str:
    """Return a value as people would write it: the question itself where the input is an object."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _storable(value)
    if isinstance(value, Mapping):
        for key in _TEXT_KEYS:
            if isinstance(found := value.get(key), str):  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                return _storable(found)
    return json.dumps(value, ensure_ascii=False)[:_SEARCHED_CHARS].encode(errors="replace").decode()


def _storable(text: str) -> str:
    """Replace lone surrogates, which no database takes; the page of the rollout shows them."""
    return text[:_SEARCHED_CHARS].encode(errors="replace").decode()
