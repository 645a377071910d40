"""Demonstrations: record given answers as calls, so that training can imitate them.

    messages before an answer ──► render, with the generation prompt ──► prompt ids ─┐
    the same and the answer   ──► render ──► must begin with them, end with a token  ├──► ModelCall
                                             at which the engine stops ── output ids ┘

Everywhere else the tokens trained on are tokens that were sampled. Here text is tokenised for training, by
the engine's own template and tokenizer. A conversation that the engine could not have produced like this is
rejected: its template may rewrite the answer, or give it no end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import orjson

from insitu.access.projects import EVERYTHING, Project
from insitu.errors import InvalidRequest, TooLarge
from insitu.gateway.calls.attempt import Attempt, CallContext, new_call_id, timed
from insitu.gateway.calls.labels import Labels
from insitu.gateway.calls.pipeline import Caller
from insitu.gateway.engines.upstream import GENERATE_PATH
from insitu.gateway.protocols.base import Lane
from insitu.gateway.protocols.chat import RENDER, ChatProtocol
from insitu.gateway.protocols.request import CallRequest
from insitu.gateway.recording.tally import Ticket
from insitu.gateway.shared.faults import reading
from insitu.gateway.shared.settings import Limits
from insitu.types import ModelCall
from insitu.wire.answers import DemonstratedCall, DemonstrationReceipt
from insitu.wire.bodies import Demonstration
from insitu.wire.message import field_names
from insitu.wire.model_call import DEMONSTRATION

_MOST_RENDERED_BYTES = 64 * 2**20
"""JSON bytes of all conversations before the answers, which are rendered one by one."""
_MOST_AFTER_END = 8
"""Tokens that a template may write after the end of an answer, usually one newline."""


@dataclass(frozen=True, slots=True)
class _Given:
    """An answer and its tokens."""

    place: int
    """Its position in the messages."""
    prompt_ids: list[int]
    output_ids: list[int]


async def record_demonstration(
    caller: Caller,
    body: dict[str, Any],
    labels: Labels,
    ticket: Ticket,
    project: Project = EVERYTHING,
    spend_tokens: Callable[[int], None] = lambda _num_tokens: None,
) -> DemonstrationReceipt:
    """Render every answer of a conversation and record them all, or none."""
    request, places = _parse(body, caller.limits)
    ticket.expect(len(places))
    context = CallContext(ChatProtocol(), request, labels, new_call_id(), ticket, project=project)
    timings: dict[str, float] = {}

    async def work(attempt: Attempt) -> list[_Given]:
        return [await timed(timings, "render", _rendered(attempt.lane, request, at)) for at in places]

    given = await caller.attempts(context, work)
    spend_tokens(sum(len(each.prompt_ids) + len(each.output_ids) for each in given))
    calls = [_call(context, answer, timings) for answer in given]
    await ticket.noted(caller.limits.record_seconds)
    recordings = [caller.recorder.submit(call) for call in calls]
    for _ in recordings:
        ticket.recorded()
    await caller.kept(recordings)
    return DemonstrationReceipt(
        [
            DemonstratedCall(project.shown(call.id), len(call.prompt_ids), len(call.output_ids))
            for call in calls
        ]
    )


def _parse(body: dict[str, Any], limits: Limits) -> tuple[CallRequest, list[int]]:
    """Check a request; return it as a chat request, and the positions of the answers to record."""
    if others := sorted(key for key in body if key not in field_names(Demonstration)):
        raise InvalidRequest(f"A demonstration has no field `{others[0][:40]}`.")
    only_last = body.get("only_last") or False
    if not isinstance(only_last, bool):
        raise InvalidRequest("`only_last` must be true or false.")
    request = ChatProtocol().parse({k: v for k, v in body.items() if k != "only_last"}, limits)
    messages = cast("list[dict[str, Any]]", request.body["messages"])
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise InvalidRequest(
            "`messages` has no assistant message: there is nothing to learn.",
            hint='end the conversation with {"role": "assistant", "content": …}',
        )
    if places[0] == 0:
        raise InvalidRequest("`messages[0]` is an answer to nothing.", hint="put a user message before it")
    places = places[-1:] if only_last else places
    _check_size(messages, places)
    return request, places


def _check_size(messages: list[dict[str, Any]], places: list[int]) -> None:
    """Reject what takes too long to render: each answer costs its whole conversation, twice."""
    sizes = [*accumulate(len(orjson.dumps(message)) for message in messages)]
    num_bytes = sum(sizes[place] for place in places)
    if num_bytes > _MOST_RENDERED_BYTES:
        raise TooLarge(
            f"`messages` has {len(places)} answers and {num_bytes} bytes of conversation up to them, counted "
            f"for each answer; the limit is {_MOST_RENDERED_BYTES}.",
            hint="send a request for each answer, with the conversation up to it and `only_last: true`",
        )


async def _rendered(lane: Lane, request: CallRequest, place: int) -> _Given:
    """Return the tokens of one answer, and of the conversation before it."""
    messages = request.body["messages"]
    before = await _render(lane, request, messages[:place], open_turn=True)
    after = await _render(lane, request, messages[: place + 1], open_turn=False)
    with reading():
        prompt_ids, whole = cast("list[int]", before["token_ids"]), cast("list[int]", after["token_ids"])
        stops = cast("list[int]", before["sampling_params"].get("stop_token_ids") or [])
        begins = whole[: len(prompt_ids)] == prompt_ids
    if not begins:
        raise InvalidRequest(
            f"`messages[{place}]`: with this answer, the model's template renders the conversation before it "
            "differently, so the model would never see it like this.",
            hint="give the answer as the model writes it (a reasoning model's reasoning in "
            "`reasoning_content`), or set `chat_template_kwargs` as the agent does",
        )
    output_ids = whole[len(prompt_ids) :]
    end = await _end_of_turn(lane, output_ids, stops)
    if end is None:
        raise InvalidRequest(
            f"`messages[{place}]`: the model's template writes no token after this answer at which the "
            "engine stops, so a model that learns it would never end.",
            hint="serve the model with a chat template that ends an assistant's turn",
        )
    output_ids = output_ids[: end + 1]
    if any(lane.engine.ends.get(token) for token in output_ids[:-1]):
        raise InvalidRequest(
            f"`messages[{place}]` holds a token in its middle at which the engine stops: the model could "
            "never write what follows.",
            hint="remove end-of-turn tokens from the text",
        )
    return _Given(place, prompt_ids, output_ids)


async def _render(
    lane: Lane, request: CallRequest, messages: list[dict[str, Any]], *, open_turn: bool
) -> dict[str, Any]:
    """Render messages, with the beginning of the next answer if it is the assistant's turn."""
    sent = {**request.body, "messages": messages, "model": lane.engine_model}
    return await lane.engine.post(RENDER, sent | {"add_generation_prompt": open_turn})


async def _end_of_turn(lane: Lane, output_ids: list[int], stops: list[int]) -> int | None:
    """Return the position of the last token at which the engine stops; None if there is none near the end."""
    for place in range(len(output_ids) - 1, max(-1, len(output_ids) - 1 - _MOST_AFTER_END), -1):
        if await _stops_at(lane, output_ids[place], stops):
            return place
    return None


async def _stops_at(lane: Lane, token: int, stops: list[int]) -> bool:
    """Return True if a generation ends when it comes to this token; the engine is asked once per token."""
    known = lane.engine.ends.get(token)
    if known is not None:
        return known
    # Only the engine knows all its end tokens: let it generate this one, with room for it alone.
    sampling = {"allowed_token_ids": [token], "stop_token_ids": stops, "temperature": 0.0, "max_tokens": 1}
    body = {"model": lane.engine_model, "token_ids": [token], "sampling_params": sampling, "stream": False}
    answer = await lane.engine.post(GENERATE_PATH, body, generating=True)
    with reading():
        ended = answer["choices"][0]["finish_reason"] == "stop"
    lane.engine.ends[token] = ended
    return ended


def _call(context: CallContext, given: _Given, timings: dict[str, float]) -> ModelCall:
    messages = context.request.body["messages"]
    return ModelCall(
        id=context.project.stored(new_call_id()),
        rollout_id=context.labels.rollout_id,
        model=context.request.model,
        run=None,
        policy_step=0,
        policy_version="",
        prompt_ids=given.prompt_ids,
        output_ids=given.output_ids,
        logprobs=[0.0] * len(given.output_ids),
        finish_reason="stop",
        messages=messages[: given.place],
        tools=context.request.body.get("tools"),
        answer=messages[given.place],
        timings={**timings, "total": time.monotonic() - context.started},
        started_at=context.started_at,
        function=context.labels.function,
        source=DEMONSTRATION,
    )
